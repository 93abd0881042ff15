"""Checkpoints: Arrow files and the manifest that lists them."""
