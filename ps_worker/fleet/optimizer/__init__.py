"""Optimizers under the names that they have in Paddle; their arguments are hyper-parameters.

    fleet.optimizer.Adagrad(learning_rate=0.02)
    fleet.optimizer.Adam(fleet.optimizer.lr.StepDecay(0.01, step_size=1000), weight_decay=0.1)

They are applied on the servers, those that end in Row to rows only. ps_server/optimizers has the formulas.
"""

from typing import TYPE_CHECKING, NoReturn

from ctr_ps.ps_worker.fleet.optimizer import lr
from ctr_ps.ps_worker.fleet.optimizer.optimizers import (
    SGD,
    Adagrad,
    AdagradRow,
    Adam,
    AdamRow,
    ClipGradByGlobalNorm,
    Ftrl,
    Momentum,
    Optimizer,
    require_optimizer,
)
from ctr_ps.ps_worker.fleet.words.unknown import unknown_name

__all__ = [
    "SGD",
    "Adagrad",
    "AdagradRow",
    "Adam",
    "AdamRow",
    "ClipGradByGlobalNorm",
    "Ftrl",
    "Momentum",
    "Optimizer",
    "lr",
    "require_optimizer",
]

if not TYPE_CHECKING:  # a type checker knows the names

    def __getattr__(name: str) -> NoReturn:
        """Says which optimizers there are."""
        names = [each for each in __all__ if each != "require_optimizer"]
        raise unknown_name("fleet.optimizer", name, names)
