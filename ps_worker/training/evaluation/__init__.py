"""Figures of predictions: an evaluation, and what a model that knows nothing would have."""
