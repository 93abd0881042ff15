"""`ps-ckpt`: inspection, export and rewriting of checkpoints."""
