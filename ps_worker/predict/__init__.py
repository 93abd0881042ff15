"""Predictions from a checkpoint, without servers."""

from ctr_ps.ps_worker.predict.predictor import Predictor

__all__ = ["Predictor"]
