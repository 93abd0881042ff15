"""A job: one TOML file that says what to train on what, and how.

    [model] [data] [train] [optimizer] [strategy] [checkpoint] [cluster]

Each key can be overridden by `--set section.key=value`. An unknown key is an error that names the nearest
known one; a wrong value is an error that names file and key. Paths are relative to the working directory.
"""

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from protos.errors import JobError
from protos.spec import OptimizerSpec


class Section(BaseModel):
    """One section of a job."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", coerce_numbers_to_str=True, allow_inf_nan=False
    )


class ModelSection(Section):
    """Which model; all keys but `name` are the model's own options."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str = "ctr_dnn"

    @property
    def options(self) -> dict[str, Any]:
        """The model's own options."""
        return dict(self.model_extra or {})


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


Globs = Annotated[tuple[str, ...], BeforeValidator(_as_list)]


class DataSection(Section):
    """What to read.

    Attributes:
        train: Patterns of files to train on; the workers share them out.
        test: Patterns of files to evaluate on after training; empty: no evaluation.
        schema_source: Path of a schema, or "criteo"; the key is `schema`.
        bad_row_limit: Malformed rows that a worker skips in a pass over its files, before it stops.
    """

    train: Globs = ()
    test: Globs = ()
    schema_source: str = Field("criteo", alias="schema")
    bad_row_limit: int = Field(100, ge=0)


class TrainSection(Section):
    """How to go through the data.

    Attributes:
        batch_size: Examples of one step of one thread.
        epochs: Passes over the data.
        thread_num: Training threads of one worker.
        seed: Of the initial values of all parameters.
        log_every_s: Seconds between lines of progress.
    """

    batch_size: int = Field(512, ge=1)
    epochs: int = Field(1, ge=1)
    thread_num: int = Field(1, ge=1)
    seed: int = Field(0, ge=0, lt=2**63)
    log_every_s: float = Field(5.0, gt=0)


class OptimizerChoice(Section):
    """An optimizer by name; all other keys are its hyper-parameters."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str

    @model_validator(mode="after")
    def _require_numbers(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{name} is {value!r}, expected a number")
        return self

    def spec(self) -> OptimizerSpec:
        """Returns the spec that servers get."""
        params = {name: float(value) for name, value in (self.model_extra or {}).items()}
        return OptimizerSpec(name=self.name, params=params)


def _choice(default: str) -> Any:
    """Reads `"name"`, or a table whose name may be left out."""

    def read(value: object) -> object:
        if isinstance(value, str):
            return {"name": value}
        return {"name": default, **value} if isinstance(value, Mapping) else value

    return BeforeValidator(read)


class OptimizerSection(Section):
    """The optimizers, each `"name"` or `{ name = "...", learning_rate = ... }`.

    Attributes:
        sparse: Of the rows of tables.
        dense: Of the dense parameters.
    """

    sparse: Annotated[OptimizerChoice, _choice("adagrad")] = OptimizerChoice(name="adagrad")
    dense: Annotated[OptimizerChoice, _choice("adam")] = OptimizerChoice(name="adam")


class StrategySection(Section):
    """How workers keep together (docs/consistency.md).

    Attributes:
        mode: "sync": all workers step together; "async": each at its own pace.
        max_merge_var_num: Async: batches whose sparse gradients are averaged before they are sent.
        max_merge_dense_num: Async: the same for dense gradients.
        send_queue_size: Async: batches that may wait to be sent before training waits.
        max_delay_ms: Async: no gradient waits longer for others to be merged with.
    """

    mode: Literal["sync", "async"] = "async"
    max_merge_var_num: int = Field(1, ge=1)
    max_merge_dense_num: int = Field(4, ge=1)
    send_queue_size: int = Field(16, ge=1)
    max_delay_ms: float = Field(100.0, gt=0)


class CheckpointSection(Section):
    """Where models are saved to and loaded from.

    Attributes:
        dir: Folder for checkpoints, one after each epoch; empty: nothing is saved.
        load: Checkpoint, or folder of checkpoints, to start from; empty: from what the servers hold, which
            are initial values unless they stayed after another job.
    """

    dir: str = ""
    load: str = ""


class ClusterSection(Section):
    """How long to wait, in seconds.

    Attributes:
        connect_timeout_s: For servers that are not up yet.
        rpc_timeout_s: For an answer to a pull or a push.
        wait_timeout_s: For other workers, at a step or a barrier.
    """

    connect_timeout_s: float = Field(120.0, gt=0)
    rpc_timeout_s: float = Field(60.0, gt=0)
    wait_timeout_s: float = Field(600.0, gt=0)


class Job(Section):
    """A whole job."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    optimizer: OptimizerSection = OptimizerSection()
    strategy: StrategySection = StrategySection()
    checkpoint: CheckpointSection = CheckpointSection()
    cluster: ClusterSection = ClusterSection()

    def to_json(self) -> str:
        """Returns the job as JSON, every default filled in."""
        return self.model_dump_json(by_alias=True, indent=1)


def load_job(path: Path, overrides: Sequence[str] = ()) -> Job:
    """Returns the job of a TOML file with overrides of the form `section.key=value`.

    Raises:
        JobError: If the file cannot be read or is not TOML, or a key or value is wrong.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise JobError(f"cannot read job {path}: {error.strerror}") from error
    except ValueError as error:
        raise JobError(f"{path} is not TOML: {error}") from error
    return override_job(data, overrides, source=str(path))


def override_job(data: Mapping[str, Any], overrides: Sequence[str], *, source: str) -> Job:
    """Returns the job of nested mappings with overrides; `source` is named in errors."""
    tree = {
        key: dict(value) if isinstance(value, Mapping) else value for key, value in data.items()
    }
    for override in overrides:
        _set(tree, override)
    try:
        return Job.model_validate(tree)
    except ValidationError as error:
        raise JobError("; ".join(_explain(source, detail) for detail in error.errors())) from error


def _set(tree: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    path = name.strip().split(".")
    if not equals or len(path) < 2 or not all(path):
        raise JobError(f"--set {override!r}: expected section.key=value")
    node = tree
    for part in path[:-1]:
        child = node.get(part)
        # `optimizer.sparse = "adam"` is short for `{ name = "adam" }`.
        node[part] = dict(child) if isinstance(child, Mapping) else _named(child)
        node = node[part]
    node[path[-1]] = _value(text.strip())


def _named(value: object) -> dict[str, Any]:
    return {"name": value} if isinstance(value, str) else {}


def _value(text: str) -> Any:
    """Returns the TOML value that `text` is, or the text itself: quotes around words are optional."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        return text


def _explain(source: str, detail: Any) -> str:
    location = [str(part) for part in detail["loc"]]
    key = ".".join(location)
    if detail["type"] == "extra_forbidden":
        known = _known_keys(location[:-1])
        nearest = difflib.get_close_matches(location[-1], known, 1, cutoff=0.0)
        hint = f", did you mean {'.'.join([*location[:-1], nearest[0]])!r}?" if nearest else ""
        return f"{source}: unknown key {key!r}{hint}"
    return f"{source}: {key} is {detail['input']!r}: {detail['msg']}"


def _known_keys(path: list[str]) -> list[str]:
    section: type[BaseModel] = Job
    for part in path:
        annotation = section.model_fields[part].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        section = annotation
    return [field.alias or name for name, field in section.model_fields.items()]
