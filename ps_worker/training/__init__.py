"""Training and evaluation on any store, in any mode."""
