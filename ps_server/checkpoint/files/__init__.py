"""The files of a checkpoint: rows as Arrow, the manifest, digests."""
