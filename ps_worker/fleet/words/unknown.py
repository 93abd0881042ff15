"""Errors for names and arguments of Paddle that do not exist here: they show what does."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import ParamSpec, TypeVar

from ctr_ps.protos.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")

_ASK_FOR_NOTHING: Mapping[str, tuple[object, ...]] = {
    "debug": (False,),
    "executor": (None,),
    "fetch_info": (None,),
    "fetch_list": (None,),
    "main_program": (None,),
    "print_period": (None, 100),
    "program": (None,),
    "scope": (None,),
    "thread": (None, 0),
}
"""Paddle's defaults of arguments that calls do not have here."""


def called_as(example: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Returns a decorator: arguments that a function does not take are a UsageError that shows `example`.

    Arguments with Paddle's defaults are left out.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs.keys() - signature.parameters.keys():
                if kwargs[name] in _ASK_FOR_NOTHING.get(name, ()):
                    del kwargs[name]
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise UsageError(f"call {function.__name__}() as in {example}: {error}") from None
            return function(*args, **kwargs)

        return checked

    return decorate


def unknown_name(where: str, name: str, names: Iterable[str]) -> AttributeError:
    """Returns the error for an attribute of `where` that is none of `names`."""
    return AttributeError(f"{where} has no {name!r}: there are {', '.join(names)}")
