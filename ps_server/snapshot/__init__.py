"""Snapshots of a server's parameters at one moment, while training runs."""
