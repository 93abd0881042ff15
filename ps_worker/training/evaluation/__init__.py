"""Evaluations, and their baseline: a constant click rate."""
