"""Optimizers under the names that they have in Paddle; their arguments are hyper-parameters.

    fleet.optimizer.Adagrad(learning_rate=0.02)
    fleet.optimizer.Adam(fleet.optimizer.lr.StepDecay(0.01, step_size=1000), weight_decay=0.1)

They are applied on the servers, those that end in Row to rows only. ps_server/optimizers has the formulas.
"""

from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self

from ctr_ps.protos.errors import UsageError, did_you_mean
from ctr_ps.ps_server.optimizers.registry import OPTIMIZERS
from ctr_ps.ps_worker.fleet import lr
from ctr_ps.ps_worker.fleet.words.unknown import unknown_name

__all__ = [
    "SGD",
    "Adagrad",
    "AdagradRow",
    "Adam",
    "AdamRow",
    "ClipGradByGlobalNorm",
    "Ftrl",
    "L2Decay",
    "Momentum",
    "Optimizer",
    "lr",
]

_HARMLESS: dict[str, Any] = {
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
"""Values of arguments of Paddle that ask for nothing; others are refused."""


class ClipGradByGlobalNorm:
    """Clips the gradient of each batch, of rows and dense parameters together: `train.clip_norm` of a job.

    Raises UsageError if the norm is not above 0.
    """

    def __init__(self, clip_norm: float) -> None:
        if not clip_norm > 0:
            raise UsageError(f"clip_norm is {clip_norm!r}, expected a number above 0")
        self.clip_norm = float(clip_norm)


class L2Decay(float):
    """A `weight_decay` that is added to gradients, coeff w: of SGD only, where both are the same."""

    def __new__(cls, coeff: float = 0.0) -> Self:
        """Returns the number; Paddle's argument has a name."""
        return super().__new__(cls, coeff)


class Optimizer:
    """An optimizer of a script; its subclasses have the hyper-parameters of one of the servers' as arguments.

    Args:
        learning_rate: A number or a schedule.
        weight_decay: See docs/optimizers.md; None: 0. Of SGD it may be an L2Decay, which is the same.
        grad_clip: Clips gradients; None: they are not.
        lazy_mode: As in Paddle, of Adam and AdamRow: only the rows of a batch change. False is for dense
            parameters alone.
        initial_accumulator: Of Adagrad; None: for rows by the size of a batch (docs/optimizers.md), else 0.

    Attributes:
        choice: As a job's `[optimizer]` names it: name, hyper-parameters, schedule.
        clip_norm: Of the gradient of a batch; 0: any.
        is_lazy: Whether rows that a batch does not have stay as they are, as on servers; False: asked not to.
    """

    __signature__: ClassVar[Signature]
    _name: ClassVar[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        where = f"fleet.optimizer.{type(self).__name__}"
        known = self.__signature__.parameters
        for name in kwargs.keys() - known.keys():
            if name not in _HARMLESS or kwargs[name] not in (None, _HARMLESS[name]):
                raise UsageError(
                    f"{where} has no {name}{did_you_mean(name, known, likeness=0.6) or '.'} Its arguments "
                    f"are {', '.join(known)}"
                )
            del kwargs[name]
        bound = self.__signature__.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        grad_clip = given.pop("grad_clip")
        if grad_clip is not None and not isinstance(grad_clip, ClipGradByGlobalNorm):
            raise UsageError(
                f"grad_clip of {where} is {grad_clip!r}, expected for example "
                "fleet.optimizer.ClipGradByGlobalNorm(1.0): gradients can be clipped only by their norm "
                "over all parameters"
            )
        self.clip_norm = 0.0 if grad_clip is None else grad_clip.clip_norm
        self.is_lazy = bool(given.pop("lazy_mode", True))
        self.choice: dict[str, Any] = {"name": self._name}
        rate = given["learning_rate"]
        if isinstance(rate, lr.LRScheduler):
            given["learning_rate"] = rate.base_lr
            self.choice["schedule"] = rate.schedule
        for name, value in given.items():
            if value is None and known[name].default is None:
                continue  # as a job that does not say
            if isinstance(value, L2Decay) and value and self._name != "sgd":
                raise UsageError(
                    f"{name} of {where} is L2Decay({value}), added to gradients: only SGD has that. Give "
                    f"the number, {name}={value}, for a decay apart from them, as in AdamW"
                )
            if not isinstance(value, int | float):
                raise UsageError(f"{name} of {where} is {value!r}, expected a number")
            self.choice[name] = float(value)


def _optimizer(name: str, of_servers: str, **defaults: Any) -> type[Optimizer]:
    """Returns the class of a script for an optimizer of the servers; `defaults` replace its own."""
    known = OPTIMIZERS[of_servers]
    by_place = {**known.hyper._field_defaults, **defaults}
    by_name = {each: value for each, value in defaults.items() if each not in known.ranges}
    by_name |= {"weight_decay": None} if known.decays else {}
    parameters = [
        Parameter(
            each, Parameter.POSITIONAL_OR_KEYWORD, default=by_place.get(each, Parameter.empty)
        )
        for each in known.ranges
    ]
    parameters += [
        Parameter(each, Parameter.KEYWORD_ONLY, default=value)
        for each, value in {**by_name, "grad_clip": None}.items()
    ]
    return type(
        name,
        (Optimizer,),
        {
            "__doc__": f"See ps_server/optimizers/{of_servers}.py, and `Optimizer` for the arguments.",
            "__module__": __name__,
            "__signature__": Signature(parameters),
            "_name": of_servers,
        },
    )


SGD = _optimizer("SGD", "sgd")
Momentum = _optimizer("Momentum", "momentum")
Adagrad = _optimizer("Adagrad", "adagrad", initial_accumulator=None)
AdagradRow = _optimizer("AdagradRow", "adagrad_row")
Adam = _optimizer("Adam", "adam", lazy_mode=True)
AdamRow = _optimizer("AdamRow", "adam_row", lazy_mode=True)
Ftrl = _optimizer("Ftrl", "ftrl")


def require_optimizer(optimizer: Any) -> Optimizer:
    """Returns an optimizer of these; raises UsageError if it is none."""
    if isinstance(optimizer, Optimizer):
        return optimizer
    raise UsageError(
        f"{optimizer!r} is not an optimizer: give for example fleet.optimizer.Adagrad(learning_rate=0.02)"
    )


if not TYPE_CHECKING:  # a type checker knows the names

    def __getattr__(name: str) -> NoReturn:
        raise unknown_name("fleet.optimizer", name, __all__)
