"""Python's `hash()` in code that makes samples: each process salts it, and so has other keys for a value.

Two workers would train different rows for the same value, and a server of predictions would find none. Such
code is recognized by its bytecode, so none of it runs twice and no built-in is replaced. Commands run with a
fixed salt instead (pipe.py). This module imports little, as data_generator.py does.
"""

import builtins
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property, partial, partialmethod
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from ctr_ps.protos.errors import DataError


def is_salted() -> bool:
    """Whether `hash()` of text differs in other processes: this one was not started with PYTHONHASHSEED."""
    seed = os.environ.get("PYTHONHASHSEED")
    was_set_too_late = seed == "0" and sys.flags.hash_randomization
    return seed in (None, "", "random") or bool(was_set_too_late or sys.flags.ignore_environment)


def require_no_salted_hash(code: object, what: str) -> None:
    """Refuses user code that names the built-in `hash`, unless PYTHONHASHSEED is set.

    `code` is a function or an object with methods, named `what` in the DataError; what it refers to is read,
    too. Not found: `hash` by way of `getattr`, what installed packages do, a module that only the code
    imports, and keys by the order of a set.
    """
    if not is_salted():
        return
    pending, known = [code], {id(code)}
    while pending:
        each = pending.pop()
        for part in _parts(each):
            if part is builtins.hash:
                raise DataError(
                    f"{what} uses hash(), in {getattr(each, '__qualname__', each)}: Python salts hash() of "
                    "text, so each process would have other keys for the same values. Yield the text "
                    "itself, in a sample or with MultiSlotStringDataGenerator, or use ctr_ps.key_of(slot, "
                    "text). If no key depends on hash(), skip this check: start with PYTHONHASHSEED=0"
                )
            if id(part) not in known:
                known.add(id(part))
                pending.append(part)


def _parts(value: Any) -> Iterator[object]:
    """Yields what the user's code in a value refers to; nothing of others' code."""
    kind = type(value)  # a proxy answers isinstance, and may do anything then
    if kind.__module__ in ("builtins", "functools"):
        yield getattr(value, "__wrapped__", None)  # by functools.wraps, lru_cache, staticmethod
    if kind in (dict, list, tuple, set, frozenset):
        yield from value.values() if kind is dict else value
    elif kind is FunctionType:
        if _is_users(value.__module__):
            yield from _globals(value.__code__, value.__globals__)
            yield from (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
            for cell in value.__closure__ or ():
                with suppress(ValueError):  # not assigned yet
                    yield cell.cell_contents
    elif kind is MethodType:
        yield from (value.__func__, value.__self__)
    elif kind in (partial, partialmethod):
        yield from (value.func, *value.args, *value.keywords.values())
    elif kind in (property, cached_property):
        yield value.fget if kind is property else value.func
    elif issubclass(kind, type):
        if _is_users(value.__module__):
            yield from value.__bases__
            # The hash of an object of the user's own is no key.
            yield from (each for name, each in vars(value).items() if name != "__hash__")
    elif _is_users(kind.__module__):
        yield from (kind, *getattr(value, "__dict__", {}).values())


def _globals(code: CodeType, names: dict[str, object]) -> Iterator[object]:
    """Yields the globals that bytecode loads, with what it takes from modules."""
    import dis  # late: most processes need none

    last: object = None
    module: object = None  # whose names `from ... import` takes
    for each in dis.get_instructions(code):
        if each.opname == "LOAD_GLOBAL":
            last = names.get(each.argval, getattr(builtins, each.argval, None))
        elif each.opname == "IMPORT_NAME":  # in the function; not imported yet: nothing is found
            last = sys.modules.get(each.argval)
        elif each.opname in ("LOAD_ATTR", "LOAD_METHOD") and issubclass(type(last), ModuleType):
            last = vars(last).get(each.argval)  # getattr may import more
        elif each.opname == "IMPORT_FROM" and issubclass(type(module), ModuleType):
            last = vars(module).get(each.argval)
        else:
            last = None
        module = last if each.opname == "IMPORT_NAME" else module
        yield last
    for each in code.co_consts:
        if isinstance(each, CodeType):  # a function or comprehension inside
            yield from _globals(each, names)


def _is_users(module: str | None) -> bool:
    package = (module or "").partition(".")[0]
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    is_others = package in sys.stdlib_module_names or package == "ctr_ps"
    return not is_others and "site-packages" not in file and "dist-packages" not in file
