"""Deployment: the launcher `ps-launch`, images, manifests. Imports `protos` alone."""
