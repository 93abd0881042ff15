"""The optimizers of a script: what `distributed_optimizer` takes.

Arguments of Paddle that say what happens anyway are taken; others are errors that say what to write.
"""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from protos.errors import UsageError
from ps_worker.fleet.optimizer.lr import LRScheduler

Rate = float | LRScheduler

_ADVICE = {
    "parameters": "leave it out, the model that minimize() gets says what is trained",
    "parameter_list": "leave it out, the model that minimize() gets says what is trained",
    "regularization": "give weight_decay=0.01, say (docs/optimizers.md#weight-decay)",
    "multi_precision": 'leave it out, parameters are float32; minimize(model, compute="bfloat16") trains in '
    "lower precision",
    "initial_accumulator_value": "give initial_accumulator",
    "use_nesterov": "give nesterov=1",
    "rescale_grad": "leave it out, servers apply means over examples",
    "amsgrad": "leave it out, there is none here",
    "apply_decay_param_fun": "leave it out, all parameters decay alike",
    "lr_ratio": "leave it out; dense= of distributed_optimizer has another learning rate",
}
"""What to write instead of arguments of Paddle."""

_ADVICE_OF_FTRL = _ADVICE | dict.fromkeys(
    ("weight_decay", "regularization"), "give l1 or l2, which pull weights to zero"
)

_HARMLESS: Mapping[str, Any] = {
    "name": None,
    "parameters": None,
    "parameter_list": None,
    "regularization": None,
    "multi_precision": False,
    "use_nesterov": False,
    "amsgrad": False,
    "use_multi_tensor": False,
    "rescale_grad": 1.0,
}
"""Values of arguments of Paddle that ask for nothing."""


class ClipGradByGlobalNorm:
    """Clips the gradient of each batch, of rows and dense parameters together: `train.clip_norm` of a job."""

    def __init__(self, clip_norm: float) -> None:
        """Takes the largest norm.

        Raises:
            UsageError: If it is not above 0.
        """
        if not clip_norm > 0:
            raise UsageError(f"clip_norm is {clip_norm!r}, expected a number above 0")
        self.clip_norm = float(clip_norm)


class Optimizer:
    """An optimizer of a script.

    Attributes:
        choice: As a job's `[optimizer]` names it: name, hyper-parameters, schedule.
        clip_norm: Of the gradient of a batch; 0: any.
        is_lazy: Whether rows that a batch does not have stay as they are, as on servers; False: asked not to.
    """

    is_lazy = True
    _advice: Mapping[str, str] = _ADVICE

    def __init__(
        self,
        name: str,
        learning_rate: Rate,
        hyper: Mapping[str, float | None],
        *,
        weight_decay: float | None = None,
        grad_clip: ClipGradByGlobalNorm | None = None,
        of_paddle: Mapping[str, Any],
    ) -> None:
        """Checks what only scripts have; the rest is checked as that of a job.

        Args:
            name: Of the optimizer, in jobs.
            learning_rate: A number or a schedule.
            hyper: The other hyper-parameters; None: the choice leaves it out, as a job that does not say.
            weight_decay: See docs/optimizers.md; None: 0.
            grad_clip: Clips gradients; None: they are not.
            of_paddle: Other arguments.

        Raises:
            UsageError: If an argument has no counterpart; says what to write.
        """
        where = f"fleet.optimizer.{type(self).__name__}"
        known = {"learning_rate", "weight_decay", "grad_clip", *hyper} - self._advice.keys()
        _refuse(where, of_paddle, sorted(known), self._advice)
        if grad_clip is not None and not isinstance(grad_clip, ClipGradByGlobalNorm):
            raise UsageError(
                f"grad_clip of {where} is {grad_clip!r}, expected "
                f"fleet.optimizer.ClipGradByGlobalNorm(1.0), say: gradients are clipped by their norm over "
                f"all parameters, and by nothing else"
            )
        rate = learning_rate.base_lr if isinstance(learning_rate, LRScheduler) else learning_rate
        others = {**hyper, "weight_decay": weight_decay}
        numbers = {"learning_rate": rate} | {k: v for k, v in others.items() if v is not None}
        for key, value in numbers.items():
            if not isinstance(value, int | float):
                raise UsageError(f"{key} of {where} is {value!r}, expected a number")
        self.choice: dict[str, Any] = {
            "name": name,
            **{key: float(value) for key, value in numbers.items()},
        }
        if isinstance(learning_rate, LRScheduler):
            self.choice["schedule"] = learning_rate.schedule
        self.clip_norm = 0.0 if grad_clip is None else grad_clip.clip_norm


class SGD(Optimizer):
    """See ps_server/optimizers/sgd.py."""

    def __init__(
        self,
        learning_rate: Rate,
        *,
        weight_decay: float | None = None,
        grad_clip: ClipGradByGlobalNorm | None = None,
        **of_paddle: Any,
    ) -> None:
        """Takes hyper-parameters; see `Optimizer`."""
        super().__init__(
            "sgd",
            learning_rate,
            {},
            weight_decay=weight_decay,
            grad_clip=grad_clip,
            of_paddle=of_paddle,
        )


class Momentum(Optimizer):
    """See ps_server/optimizers/momentum.py."""

    def __init__(
        self,
        learning_rate: Rate,
        momentum: float = 0.9,
        nesterov: float = 0.0,
        *,
        weight_decay: float | None = None,
        grad_clip: ClipGradByGlobalNorm | None = None,
        **of_paddle: Any,
    ) -> None:
        """Takes hyper-parameters; see `Optimizer`."""
        super().__init__(
            "momentum",
            learning_rate,
            {"momentum": momentum, "nesterov": nesterov},
            weight_decay=weight_decay,
            grad_clip=grad_clip,
            of_paddle=of_paddle,
        )


class Adagrad(Optimizer):
    """See ps_server/optimizers/adagrad.py."""

    def __init__(
        self,
        learning_rate: Rate = 0.05,
        initial_accumulator: float | None = None,
        epsilon: float = 1e-10,
        *,
        weight_decay: float | None = None,
        grad_clip: ClipGradByGlobalNorm | None = None,
        **of_paddle: Any,
    ) -> None:
        """Takes hyper-parameters; see `Optimizer`.

        Args:
            learning_rate: A number or a schedule.
            initial_accumulator: None: for rows by the size of a batch (docs/optimizers.md), else 0.
            epsilon: See its module.
            weight_decay: See `Optimizer`.
            grad_clip: See `Optimizer`.
            of_paddle: See `Optimizer`.
        """
        super().__init__(
            "adagrad",
            learning_rate,
            {"initial_accumulator": initial_accumulator, "epsilon": epsilon},
            weight_decay=weight_decay,
            grad_clip=grad_clip,
            of_paddle=of_paddle,
        )


class AdagradRow(Optimizer):
    """See ps_server/optimizers/adagrad_row.py."""

    def __init__(
        self,
        learning_rate: Rate = 0.05,
        initial_g2sum: float = 3.0,
        *,
        weight_decay: float | None = None,
        grad_clip: ClipGradByGlobalNorm | None = None,
        **of_paddle: Any,
    ) -> None:
        """Takes hyper-parameters; see `Optimizer`."""
        super().__init__(
            "adagrad_row",
            learning_rate,
            {"initial_g2sum": initial_g2sum},
            weight_decay=weight_decay,
            grad_clip=grad_clip,
            of_paddle=of_paddle,
        )


class _Adams(Optimizer):
    _name = ""

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        *,
        lazy_mode: bool = True,
        weight_decay: float | None = None,
        grad_clip: ClipGradByGlobalNorm | None = None,
        **of_paddle: Any,
    ) -> None:
        """Takes hyper-parameters; see `Optimizer`.

        Args:
            learning_rate: A number or a schedule.
            beta1: See its module.
            beta2: See its module.
            epsilon: See its module.
            lazy_mode: As in Paddle: only the rows of a batch change. False is for dense parameters alone.
            weight_decay: See `Optimizer`.
            grad_clip: See `Optimizer`.
            of_paddle: See `Optimizer`.
        """
        super().__init__(
            self._name,
            learning_rate,
            {"beta1": beta1, "beta2": beta2, "epsilon": epsilon},
            weight_decay=weight_decay,
            grad_clip=grad_clip,
            of_paddle=of_paddle,
        )
        self.is_lazy = bool(lazy_mode)


class Adam(_Adams):
    """See ps_server/optimizers/adam.py."""

    _name = "adam"


class AdamRow(_Adams):
    """See ps_server/optimizers/adam_row.py."""

    _name = "adam_row"


class Ftrl(Optimizer):
    """See ps_server/optimizers/ftrl.py."""

    _advice = _ADVICE_OF_FTRL

    def __init__(
        self,
        learning_rate: Rate = 0.05,
        beta: float = 1.0,
        l1: float = 0.0,
        l2: float = 0.0,
        *,
        grad_clip: ClipGradByGlobalNorm | None = None,
        **of_paddle: Any,
    ) -> None:
        """Takes hyper-parameters; see `Optimizer`."""
        super().__init__(
            "ftrl",
            learning_rate,
            {"beta": beta, "l1": l1, "l2": l2},
            grad_clip=grad_clip,
            of_paddle=of_paddle,
        )


def require_optimizer(optimizer: Any) -> Optimizer:
    """Returns an optimizer of these.

    Raises:
        UsageError: If it is none.
    """
    if isinstance(optimizer, Optimizer):
        return optimizer
    raise UsageError(
        f"{optimizer!r} is no optimizer: write fleet.optimizer.Adagrad(learning_rate=0.02), say"
    )


def _refuse(
    where: str, of_paddle: Mapping[str, Any], known: Sequence[str], advice: Mapping[str, str]
) -> None:
    """Refuses arguments without a counterpart, unless they ask for nothing."""
    for name, value in of_paddle.items():
        if name in _HARMLESS and value in (None, _HARMLESS[name]):
            continue
        if name in advice:
            raise UsageError(f"{where} has no {name}: {advice[name]}")
        nearest = difflib.get_close_matches(name, known, 1, cutoff=0.0)[0]
        raise UsageError(f"{where} has no {name}, did you mean {nearest!r}?")
