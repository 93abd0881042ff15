"""Deployment: the launcher `ps-launch`, images, manifests. Imports none of the other packages."""
