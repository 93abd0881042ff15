"""Optimizers, one a file: the formula, its source, one row function."""
