"""What Paddle's layers are told of their parameters: name, initializer, admission of keys.

An initializer is a tuple of its name and numbers. Those of Xavier and Kaiming become others by the shape of
the parameter.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from ctr_ps.protos.errors import UsageError

Initializer = tuple[Any, ...]
"""Its name and numbers."""

_OF_XAVIER = {"fan_in": None, "fan_out": None, "gain": 1.0}
_OF_KAIMING = {"fan_in": None, "negative_slope": 0.0, "nonlinearity": "relu"}

INITIALIZERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Constant": ("constant", {"value": 0.0}),
    "KaimingNormal": ("kaiming_normal", _OF_KAIMING),
    "KaimingUniform": ("kaiming_uniform", _OF_KAIMING),
    "Normal": ("normal", {"mean": 0.0, "std": 1.0}),
    "TruncatedNormal": ("truncated_normal", {"mean": 0.0, "std": 1.0}),
    "Uniform": ("uniform", {"low": -1.0, "high": 1.0}),
    "XavierNormal": ("xavier_normal", _OF_XAVIER),
    "XavierUniform": ("xavier_uniform", _OF_XAVIER),
}
"""By Paddle's name: that in the tuple, and the arguments with their defaults."""

_GAINS = {"relu": math.sqrt(2.0), "tanh": 5.0 / 3.0, "linear": 1.0, "sigmoid": 1.0}
_ROW_RANGE = 0.01  # of new rows without an initializer
_DEVIATION_WITHIN_2 = 0.8796  # of a normal number that is cut off at 2 deviations


def initializer(name: str) -> Callable[..., Initializer]:
    """Returns the function of an initializer's numbers that has this name in Paddle."""
    kind, defaults = INITIALIZERS[name]

    def make(*values: Any, name: str | None = None, **named: Any) -> Initializer:
        numbers = {**defaults, **dict(zip(defaults, values, strict=False)), **named}
        if len(values) > len(defaults) or len(numbers) > len(defaults):
            raise UsageError(f"initializer {kind} of {[*values]} and {named}: it has {[*defaults]}")
        return (kind, *numbers.values())

    return make


def of_shape(initializer: Initializer | None, fan_in: int, fan_out: int) -> Initializer | None:
    """Returns an initializer by numbers, for one of Xavier or Kaiming by the shape of its parameter.

    Their variance is 2 gain^2 / (fan_in + fan_out) (Glorot, Bengio, AISTATS 2010) and gain^2 / fan_in (He et
    al., ICCV 2015).
    """
    match initializer:
        case "xavier_uniform" | "xavier_normal" as kind, own_in, own_out, gain:
            deviation = gain * math.sqrt(2.0 / ((own_in or fan_in) + (own_out or fan_out)))
        case "kaiming_uniform" | "kaiming_normal" as kind, own_in, slope, nonlinearity:
            gains = {**_GAINS, "leaky_relu": math.sqrt(2.0 / (1.0 + slope**2))}
            if nonlinearity not in gains:
                raise UsageError(
                    f"nonlinearity is {nonlinearity!r}, expected one of {', '.join(gains)}"
                )
            deviation = gains[nonlinearity] / math.sqrt(own_in or fan_in)
        case _:
            return initializer
    if kind.endswith("normal"):
        return ("normal", 0.0, deviation)
    return ("uniform", -deviation * math.sqrt(3), deviation * math.sqrt(3))


def range_of_rows(initializer: Initializer | None) -> float:
    """Returns the range of new rows, which are uniform, with the deviation of the initializer.

    Raises UsageError for one that is not around 0.
    """
    match initializer:
        case None:
            return _ROW_RANGE
        case "uniform", low, high if high == -low >= 0:
            return float(high)
        case "normal", 0.0, deviation:
            return float(deviation) * math.sqrt(3)
        case "truncated_normal", 0.0, deviation:
            return float(deviation) * _DEVIATION_WITHIN_2 * math.sqrt(3)
        case "constant", 0.0:
            return 0.0
    raise UsageError(
        f"the initializer of rows is {initializer}, expected a Uniform(-r, r), Normal(0, s) or Constant(0)"
    )


@dataclass(frozen=True)
class ParamAttr:
    """Name and initializer of a parameter; others of Paddle's arguments may only ask for nothing.

    Raises UsageError for those that do not.
    """

    name: str | None = None
    initializer: Initializer | None = None
    learning_rate: float = 1.0
    regularizer: object = None
    trainable: bool = True
    do_model_average: bool = True
    need_clip: bool = True

    def __post_init__(self) -> None:
        for each in fields(self)[2:]:
            if (value := getattr(self, each.name)) != each.default:
                raise UsageError(
                    f"{each.name} of ParamAttr is {value!r}, but is not supported: leave it out; rates and "
                    "weight_decay are those of the optimizer"
                )


@dataclass(frozen=True)
class Entry:
    """The admission of keys to a table, as in a job's [life]."""

    policy: str
    threshold: float


def count_filter_entry(count_filter: int) -> Entry:
    """Admits a key at its `count_filter`-th show."""
    if type(count_filter) is not int or count_filter < 0:
        raise UsageError(f"count_filter is {count_filter!r}, expected a whole number")
    return Entry("count", max(count_filter, 1))


def probability_entry(probability: float) -> Entry:
    """Admits a key at each of its shows with a probability."""
    if not (isinstance(probability, float) and 0 < probability < 1):
        raise UsageError(f"probability is {probability!r}, expected a number between 0 and 1")
    return Entry("probability", probability)
