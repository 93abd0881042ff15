"""Where checkpoints are: folders of this machine, object stores, remote file systems."""
