"""What a checkpoint of a job says of its run beside what the servers know: enough to go on from it."""

import json
from dataclasses import asdict, dataclass, fields
from typing import Self, get_origin

from protos.errors import CheckpointError

RUN_ATTACHMENT = "run.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Where a run is. How far each worker is in the epoch that goes on, the manifest says.

    Attributes:
        epochs_done: Epochs that all workers have ended.
        is_between_epochs: No worker has begun another one.
        num_workers: Workers of the run.
        files: What they go through, as `digest_of_files`.
        order: In which order, as `order_of_data`.
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
            CheckpointError: If it is none, as of another release.
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
