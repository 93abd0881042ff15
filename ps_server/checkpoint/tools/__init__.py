"""`ps-ckpt`: what is done with checkpoints beside saving and loading them."""
