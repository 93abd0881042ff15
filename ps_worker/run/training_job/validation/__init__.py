"""Validation while training: the evaluations, what they decide, and the steps between them."""
