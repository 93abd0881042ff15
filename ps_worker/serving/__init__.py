"""Predictions from a checkpoint, without servers."""

from ps_worker.serving.predictor import Predictor

__all__ = ["Predictor"]
