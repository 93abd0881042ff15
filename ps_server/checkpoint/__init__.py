"""Checkpoints: Arrow files of rows, and the manifest that makes them one."""
