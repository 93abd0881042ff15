"""Optimizers, a family in each module: the formulas, their sources, the row functions."""
