"""What Paddle's layers are told of their parameters: name, initializer, admission of keys."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from ctr_ps.protos.errors import UsageError

Initializer = tuple[Any, ...]
"""Its name and numbers."""

Entry = dict[str, Any]
"""The admission of keys to a table, as in a job's [life]."""

_OF_PARAM_ATTR = {"learning_rate": 1.0, "regularizer": None} | dict.fromkeys(
    ("trainable", "do_model_average", "need_clip"), True
)
_ROW_RANGE = 0.01  # of new rows without an initializer
_DEVIATION_WITHIN_2 = 0.8796  # of a normal number that is cut off at 2 deviations


def require_defaults(
    call: str, given: Mapping[str, object], defaults: Mapping[str, object], instead: str = ""
) -> None:
    """Refuses arguments of Paddle's call that would ask for something; `instead` ends the message."""
    for name, value in given.items():
        # A reduction of "none" is followed by a mean.
        if name not in defaults or value not in (None, "none", defaults[name]):
            raise UsageError(
                f"{name} of {call} is {value!r}, but is not supported: leave it out{instead}"
            )


class ParamAttr:
    """Name and initializer of a parameter; the rest of Paddle's arguments may only ask for nothing."""

    def __init__(
        self, name: str | None = None, initializer: Initializer | None = None, **rest: object
    ) -> None:
        self.name, self.initializer = name, initializer
        require_defaults("ParamAttr", rest, _OF_PARAM_ATTR, ": the optimizer has rates and decays")


def entry(policy: str, kind: type[float], most: float) -> Callable[[float], Entry]:
    """Returns the function of an entry's number, of a type and from 0 to `most`."""

    def make(number: float) -> Entry:
        if type(number) is not kind or not 0 <= number <= most:
            raise UsageError(f"the entry has {number!r}, expected {kind.__name__}, 0 to {most}")
        return {"policy": policy, "threshold": number}

    return make


def initializer(kind: str, **defaults: Any) -> Callable[..., Initializer]:
    """Returns a function of an initializer's numbers, as in Paddle."""

    def make(*values: Any, name: str | None = None, **named: Any) -> Initializer:
        numbers = {**defaults, **dict(zip(defaults, values, strict=False)), **named}
        if len(values) > len(defaults) or len(numbers) > len(defaults):
            raise UsageError(f"initializer {kind} of {[*values]} and {named}: it has {[*defaults]}")
        return (kind, *numbers.values())

    return make


def of_shape(initializer: Initializer | None, fan_in: int, fan_out: int) -> Initializer | None:
    """Returns a normal or uniform initializer for one of Xavier or Kaiming, any other as it is.

    Their variance is 2 gain^2 / (fan_in + fan_out) (Glorot, Bengio, AISTATS 2010), and 2 / (1 + slope^2) /
    fan_in (He et al., ICCV 2015).
    """
    match initializer:
        case ("xavier_uniform" | "xavier_normal") as kind, own_in, own_out, gain:
            deviation = gain * math.sqrt(2.0 / ((own_in or fan_in) + (own_out or fan_out)))
        case ("kaiming_uniform" | "kaiming_normal") as kind, own_in, slope, nonlinearity:
            if nonlinearity not in ("relu", "leaky_relu"):
                raise UsageError(f"nonlinearity is {nonlinearity!r}, expected relu or leaky_relu")
            slope = slope if nonlinearity == "leaky_relu" else 0.0
            deviation = math.sqrt(2.0 / (1.0 + slope**2) / (own_in or fan_in))
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
