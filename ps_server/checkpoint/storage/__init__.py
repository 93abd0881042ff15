"""Storage of checkpoints: local folders, object stores, remote file systems."""
