"""Optimizers, one in each module: the formula, its source, one row function."""
