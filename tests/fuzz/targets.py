"""All targets by name. Each is made in a scratch folder, in the process that fuzzes it."""

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

from tests.fuzz.driver import Target


def _late(module: str, function: str) -> Callable[[Path], Target]:
    """Imports a target with what it fuzzes, when it is made."""

    def make(folder: Path) -> Target:
        target: Target = getattr(import_module(f"tests.fuzz.{module}"), function)(folder)
        return target

    return make


TARGETS: Mapping[str, Callable[[Path], Target]] = {
    "columns": _late("data_targets", "columns"),
    "text": _late("data_targets", "text"),
    "rows": _late("data_targets", "rows"),
    "attachments": _late("serving_targets", "attachments"),
    "http": _late("serving_targets", "http"),
    "grpc": _late("serving_targets", "grpc"),
    "checkpoint": _late("server_targets", "checkpoint"),
    "log": _late("server_targets", "log"),
    "rpc": _late("server_targets", "rpc"),
}
