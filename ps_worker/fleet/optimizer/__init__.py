"""Optimizers under the names that they have in Paddle; their arguments are hyper-parameters.

    fleet.optimizer.Adagrad(learning_rate=0.02)
    fleet.optimizer.Adam(fleet.optimizer.lr.StepDecay(0.01, step_size=1000), weight_decay=0.1)

They are applied on the servers, those that end in Row to rows only. ps_server/optimizers has the formulas.
"""

from ps_worker.fleet.optimizer import lr
from ps_worker.fleet.optimizer.optimizers import (
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
