"""Run progress stored with a checkpoint, for resuming."""

import json
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, Self, get_origin

from protos.errors import CheckpointError

RUN_ATTACHMENT = "run.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """One evaluation on `data.valid`.

    Attributes:
        epoch: In which it was, or which it ended; from 1.
        step: Steps of worker 0 before it.
        auc: None with one class only.
        log_loss: Mean; None without rows.
        checkpoint: Name under which its model was saved, in `checkpoint.dir`; empty: it was not, since it was
            not the best so far, or nothing is saved.
    """

    epoch: int
    step: int
    auc: float | None
    log_loss: float | None
    checkpoint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Progress of a run; the position of each worker in an unfinished epoch is in the manifest.

    Attributes:
        epochs_done: Epochs that all workers have finished.
        is_between_epochs: No worker has started another epoch.
        num_workers: Workers of the run.
        files: The training files, as `digest_of_files`.
        signature: What they were, as `signature_of`; empty: of an older release, which did not say.
        order: The order of their rows, as `order_of_data`.
        validations: All so far.
        steps_since_validation: Of worker 0, in the unfinished epoch, where validations are due by steps.
    """

    epochs_done: int
    is_between_epochs: bool
    num_workers: int
    files: str
    order: dict[str, int | str]
    validations: list[Validation] = field(default_factory=list)
    steps_since_validation: int = 0
    signature: str = ""

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
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{source} is not JSON: {error}") from error
        if isinstance(values, dict):
            values.pop("has_text_values", None)  # of an older release, see `values_of_checkpoint`
        expected = {each.name: get_origin(each.type) or each.type for each in fields(cls)}
        # Of an older release: it knew no validations.
        optional = {each.name for each in fields(cls) if each.default_factory is not MISSING}
        optional |= {each.name for each in fields(cls) if each.default is not MISSING}
        is_object = isinstance(values, dict)
        found = {name: type(value) for name, value in values.items()} if is_object else {}
        missing = expected.keys() - found.keys() - optional
        if missing or any(expected.get(name) != kind for name, kind in found.items()):
            named = ", ".join(f"{each.name}: {each.type}" for each in fields(cls))
            raise CheckpointError(f"{source} is {values!r}, expected an object with {named}")
        values["validations"] = _validations(values.get("validations", []), source)
        return cls(**values)


def _validations(values: list[Any], source: str) -> list[Validation]:
    try:
        return [Validation(**each) for each in values]
    except TypeError as error:
        named = ", ".join(f"{each.name}: {each.type}" for each in fields(Validation))
        raise CheckpointError(
            f"{source}: validations are {values!r}, expected objects with {named}"
        ) from error
