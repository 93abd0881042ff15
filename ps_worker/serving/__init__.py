"""Predictions from a checkpoint, without servers."""
