"""Run progress stored with a checkpoint, for resuming."""

import json
from dataclasses import asdict, dataclass, fields
from typing import Self, get_origin

from protos.errors import CheckpointError

RUN_ATTACHMENT = "run.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Progress of a run; the position of each worker in an unfinished epoch is in the manifest.

    Attributes:
        epochs_done: Epochs that all workers have finished.
        is_between_epochs: No worker has started another epoch.
        num_workers: Workers of the run.
        files: The training files, as `digest_of_files`.
        order: The order of their rows, as `order_of_data`.
    """

    epochs_done: int
    is_between_epochs: bool
    num_workers: int
    files: str
    order: dict[str, int | str]

    def to_json(self) -> str:
        """Returns a text that `from_json` reads back."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: bytes, source: str) -> Self:
        """Returns the state of which `to_json` gave `text`; `source` is named in errors.

        Raises:
            CheckpointError: If the text is not such a state, as one of another release.
        """
        try:
            values = json.loads(text)
        except ValueError as error:
            raise CheckpointError(f"{source} is not JSON: {error}") from error
        is_object = isinstance(values, dict)
        expected = {field.name: get_origin(field.type) or field.type for field in fields(cls)}
        found = {name: type(value) for name, value in values.items()} if is_object else None
        if found != expected:
            named = ", ".join(f"{field.name}: {field.type}" for field in fields(cls))
            raise CheckpointError(f"{source} is {values!r}, expected an object with {named}")
        return cls(**values)
