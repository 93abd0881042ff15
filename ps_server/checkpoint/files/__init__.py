"""Files of a checkpoint: Arrow files, the manifest, digests and checksums."""
