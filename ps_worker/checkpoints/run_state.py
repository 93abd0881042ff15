"""Run progress stored with a checkpoint, for resuming."""

import json
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, Self, get_origin

from ctr_ps.protos.errors import CheckpointError

RUN_ATTACHMENT = "run.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """One evaluation on `data.valid`."""

    epoch: int  # the current epoch, or the one that it ended; from 1
    step: int  # steps of worker 0 before it
    auc: float | None  # None with one class only
    log_loss: float | None  # mean; None without rows
    # name in `checkpoint.dir` of the checkpoint of its model; empty: not the best, not saved
    checkpoint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Progress of a run; the position of each worker in an unfinished epoch is in the manifest."""

    epochs_done: int  # epochs that all workers have finished
    is_between_epochs: bool  # no worker has started another epoch
    num_workers: int  # workers of the run
    files: str  # digest of the training files (`digest_of_files`)
    order: dict[str, int | str]  # order of the rows in the files, as `order_of_data`
    validations: list[Validation] = field(default_factory=list)  # all so far
    # of worker 0, in the unfinished epoch, where validations are due by steps
    steps_since_validation: int = 0
    signature: str = ""  # `signature_of` the files; empty: of an older release

    def to_json(self) -> str:
        """Returns a text for `from_json`."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: bytes, source: str) -> Self:
        """Returns the state that `to_json` wrote; a CheckpointError for another text names `source`."""
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
