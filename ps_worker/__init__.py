"""One trainer: reads clicks, runs the model, pulls parameters, pushes gradients.

From Python, without a job file, `Trainer` and `Predictor` are all that is needed (docs/python.md).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ps_worker.run.in_process import Trainer
    from ps_worker.serving import Predictor

__all__ = ["Predictor", "Trainer"]


def __getattr__(name: str) -> Any:
    """Imports what is asked for when it is asked for: commands should not wait for all of it."""
    if name == "Trainer":
        from ps_worker.run.in_process import Trainer

        return Trainer
    if name == "Predictor":
        from ps_worker.serving import Predictor

        return Predictor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
