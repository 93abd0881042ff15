"""Calls and names as in Paddle: arguments without an effect here are left out, others show what there is."""

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from ctr_ps.protos.errors import UsageError

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

_DEFAULTS = {"debug": False, "thread": 0, "export_for_deployment": True}
"""Paddle's, other than None, of arguments that have no effect here."""


def called_as(
    example: str, *, paddle: str, instead: str = ""
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Returns a decorator of a method that takes Paddle's arguments, too.

    Those that it has not are left out, with a warning unless the value is Paddle's default. Any other call is
    a UsageError.

    Args:
        example: A call, for the error.
        paddle: The names of Paddle's arguments in their order, separated by blanks.
        instead: What there is in place of those left out, for the warning.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature, name = inspect.signature(function), function.__name__
        positions = ("self", *paddle.split())

        def bound(
            args: Sequence[Any], kwargs: Mapping[str, Any]
        ) -> tuple[inspect.BoundArguments, dict[str, Any]]:
            """Returns the arguments of a call in the order of here or else Paddle's, and those left out."""
            orders = [(args, kwargs)]
            if len(args) <= len(positions):
                orders.append(((), {**dict(zip(positions, args, strict=False)), **kwargs}))
            errors = []
            for values, named in orders:
                own = signature.parameters
                foreign = {
                    each: named[each] for each in named if each in positions and each not in own
                }
                rest = {each: named[each] for each in named if each not in foreign}
                try:
                    return signature.bind(*values, **rest), foreign
                except TypeError as error:
                    errors.append(error)
            raise UsageError(f"call {name}() as in {example}: {errors[0]}")

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            arguments, foreign = bound(args, kwargs)
            unused = [
                each
                for each in foreign
                # There is one program, and one executor; what is fetched is printed by time.
                if each not in ("executor", "program", "fetch_info", "print_period")
                and foreign[each] not in (None, _DEFAULTS.get(each))
            ]
            if unused:
                logger.warning("%s(): %s without effect%s", name, ", ".join(unused), instead)
            return function(*arguments.args, **arguments.kwargs)

        return checked

    return decorate


def unknown_name(where: str, name: str, names: Iterable[str]) -> AttributeError:
    """Returns the error for an attribute of `where` that is none of `names`."""
    return AttributeError(f"{where} has no {name!r}: there are {', '.join(names)}")
