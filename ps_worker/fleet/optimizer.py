"""Optimizers under the names that they have in Paddle; their arguments are hyper-parameters.

    fleet.optimizer.Adagrad(learning_rate=0.02)

They are applied on the servers, those that end in Row to rows only. ps_server/optimizers has the formulas.
"""

from typing import Any

from protos.errors import UsageError
from ps_server.optimizers.adagrad import Adagrad
from ps_server.optimizers.adagrad_row import AdagradRow
from ps_server.optimizers.adam import Adam
from ps_server.optimizers.adam_row import AdamRow
from ps_server.optimizers.ftrl import Ftrl
from ps_server.optimizers.momentum import Momentum
from ps_server.optimizers.registry import OPTIMIZERS
from ps_server.optimizers.sgd import Sgd

SGD = Sgd

__all__ = ["SGD", "Adagrad", "AdagradRow", "Adam", "AdamRow", "Ftrl", "Momentum", "choice_of"]


def choice_of(optimizer: Any) -> dict[str, str | float]:
    """Returns an optimizer as a job's [optimizer] names it, with all its hyper-parameters.

    Raises:
        UsageError: If it is not one of these.
    """
    for name, known in OPTIMIZERS.items():
        if type(optimizer) is known.hyper:
            return {"name": name, **{key: float(x) for key, x in optimizer._asdict().items()}}
    raise UsageError(
        f"{optimizer!r} is no optimizer: write fleet.optimizer.Adagrad(learning_rate=0.02), say"
    )
