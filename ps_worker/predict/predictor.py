"""Predicting online with a saved model: no servers, ready at once, and switched while it answers.

    Predictor.load --> predict, predict, predict, ...
                          ^ switch_to: the next model, in one step      ^ roll_back: the one before

Keys and weights are copied into memory, so that nobody changes them. Mapped instead, a model may be larger
than memory, and processes on one machine share it.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.models.checks import errors_with_shapes, require_probabilities
from ctr_ps.ctr_model.models.model import Model, Workspace, tasks_of
from ctr_ps.ctr_model.parameters import Lookup
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import UsageError
from ctr_ps.protos.gradients import Values
from ctr_ps.ps_server.checkpoint.publish import of_newest
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.checkpoint.saved_model import SavedModel
from ctr_ps.ps_worker.checkpoints.attachments import (
    job_of_checkpoint,
    model_of_checkpoint,
    require_consent,
    schema_of_checkpoint,
    values_of_checkpoint,
)
from ctr_ps.ps_worker.data.files.listing import are_files
from ctr_ps.ps_worker.data.slot_values import SlotValues
from ctr_ps.ps_worker.data.sources import Source, features_only, in_arrow, is_source, opened
from ctr_ps.ps_worker.data.user_code.samples import Sample, batches_of_samples
from ctr_ps.ps_worker.job import Job
from ctr_ps.ps_worker.job.model import DENSE_BLOCK
from ctr_ps.ps_worker.training.lookups import keys_of_batch

if TYPE_CHECKING:
    from ctr_ps.ctr_model.torch.export import ProgramInputs

MAX_KEPT = 2  # models that `roll_back` can go back to


@dataclass(frozen=True, slots=True)
class _Loaded:
    """One saved model with the code that reads it, and workspaces that no thread uses at the moment."""

    saved: SavedModel
    schema: Schema
    model: Model
    job: Job
    values: SlotValues
    workspaces: list[Workspace] = field(default_factory=list)
    program_inputs: "list[ProgramInputs]" = field(default_factory=list)

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(task.name for task in tasks_of(self.model))

    @property
    def none(self) -> Values:
        return np.empty((0, len(self.tasks)) if self.tasks else 0, np.float32)

    def batch(self, samples: Sequence[Sample]) -> Batch:
        (batch,) = batches_of_samples(
            samples, self.schema, batch_size=len(samples), meant=self.values
        )
        return batch

    def lookups(self, batch: Batch) -> dict[str, Lookup]:
        keys = keys_of_batch(batch, self.model.tables)
        return keys.lookups(
            {name: self.saved.read(name, unique) for name, unique in keys.unique.items()}
        )

    def predict(self, batch: Batch) -> Values:
        with self._workspace(batch.size) as workspace:
            params = self.saved.dense[DENSE_BLOCK]
            lookups = self.lookups(batch)
            with errors_with_shapes(self.model, "predict", batch, lookups):
                predictions = self.model.predict(params, batch, lookups, workspace)
            require_probabilities("predict", predictions, batch, len(tasks_of(self.model)))
            return predictions.copy()

    def outputs(self, batch: Batch) -> dict[str, Values]:
        from ctr_ps.ps_worker.predict.export import torch_model  # late, as this is asked for seldom

        model, lookups = torch_model(self.model), self.lookups(batch)
        params = self.saved.dense[DENSE_BLOCK]
        with (
            self._workspace(batch.size) as workspace,
            errors_with_shapes(self.model, "forward", batch, lookups),
        ):
            return model.outputs(params, batch, lookups, workspace)

    def inputs_of_program(self, batch: Batch) -> dict[str, NDArray[Any]]:
        from ctr_ps.ps_worker.predict.export import torch_model  # late, as this is asked for seldom

        model = torch_model(self.model)
        from ctr_ps.ctr_model.torch.export import ProgramInputs  # late: an extra

        try:
            inputs = self.program_inputs.pop()
        except IndexError:
            inputs = ProgramInputs(model)
        found = inputs.of(batch, self.lookups(batch))
        self.program_inputs.append(inputs)
        return found

    @contextmanager
    def _workspace(self, size: int) -> Iterator[Workspace]:
        """Lends a workspace that is large enough; list operations are atomic, so no lock is needed."""
        try:
            workspace = self.workspaces.pop()
        except IndexError:
            workspace = self.model.workspace(size)
        if workspace.max_batch_size < size:
            workspace = self.model.workspace(size)
        yield workspace
        self.workspaces.append(workspace)


class Predictor:
    """Predicts clicks with a saved model. Thread-safe."""

    def __init__(self, loaded: _Loaded, options: Mapping[str, bool]) -> None:
        self._loaded = loaded
        self._options = options
        self._previous: list[_Loaded] = []
        self._switching = threading.Lock()

    @classmethod
    def load(
        cls, url: str | Path, *, verify: bool = False, map: bool = False, allow_code: bool = False
    ) -> Self:
        """Opens the checkpoint `url`, or the latest one in that folder, as `switch_to` does later.

        Raises CtrPsError if there is no checkpoint, it is not complete, or its model's code is missing or not
        allowed.

        Args:
            url: A path or a URL.
            verify: Compare the checksums of everything; without, those of manifest and dense parameters are
                compared, and keys and sizes are checked.
            map: Map the files of rows instead of copying keys and weights into memory. The files must not be
                changed, but may be removed.
            allow_code: Run the file of a model of one's own, which the checkpoint names; whoever writes the
                checkpoint chooses that code.
        """
        options = {"verify": verify, "map": map, "allow_code": allow_code}
        return cls(of_newest(url, lambda each: _load(each, None, **options)), options)

    def successor(self, url: str | Path) -> Self:
        """Returns a predictor of another checkpoint; raises CtrPsError as `load`, whose options are the same.

        Both share the rows of checkpoints that they have in common, such as those of a delta's base.
        """
        return type(self)(_load(url, self._loaded, **self._options), self._options)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by name: whoever unpickles it loads the checkpoint again."""
        return partial(type(self).load, self.url, **self._options), ()

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint that answers now."""
        return self._loaded.saved.checkpoint

    @property
    def url(self) -> str:
        """Its URL."""
        return self.checkpoint.url

    @property
    def model_digest(self) -> str:
        """The digest of the model that answers now; of a delta empty."""
        return self.checkpoint.model_digest

    @property
    def schema(self) -> Schema:
        """The columns of examples."""
        return self._loaded.schema

    @property
    def slot_values(self) -> SlotValues:
        """What the values of slots were in the data that the model was trained on."""
        return self._loaded.values

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the probabilities that a model of several tasks predicts; empty for any other."""
        return self._loaded.tasks

    def predict(self, data: Batch | Source) -> Values:
        """Returns the click probabilities of a batch, a table or files, float32[B]; of K tasks float32[B, K].

        All is predicted by one model, also during a switch. The keys of a batch must come from this
        predictor's schema; files and tables are as those of the training, with labels or without. Raises
        DataError if no file matches, or a row is malformed, as predictions are in the order of the rows;
        UsageError if data are none of these.
        """
        loaded = self._loaded
        batches = self._batches(loaded, data)
        return np.concatenate([loaded.none, *(loaded.predict(batch) for batch in batches)])

    def outputs(self, data: Batch | Source) -> dict[str, Values]:
        """Returns the outputs by name, float32[B, ...], of a PyTorch module whose `forward` returns a dict.

        Such as the vectors of `two_towers`. `data` and errors are as for `predict`; without rows there are no
        names. Raises UsageError if the model is none of PyTorch.
        """
        loaded = self._loaded
        parts = [loaded.outputs(batch) for batch in self._batches(loaded, data)]
        names = parts[0] if parts else ()
        return {name: np.concatenate([part[name] for part in parts]) for name in names}

    def _batches(self, loaded: _Loaded, data: Batch | Source) -> Iterable[Batch]:
        if isinstance(data, Batch):
            return [data]
        if not is_source(data):
            raise UsageError(
                f"the predictor was given {type(data).__name__}, expected a Batch, files or a table; "
                f"predict_samples() takes samples (label, numbers, values of slots)"
            )
        # Late: who is asked online reads no files.
        from ctr_ps.ps_worker.job.datasets import format_of_job, streamed

        if are_files(data):
            command = "data.pipe_command"
            allow_code = self._options["allow_code"]
            require_consent(self.url, loaded.job, [command], allow_code=allow_code)
        schema = features_only(loaded.schema)
        source = in_arrow(data, schema)
        if getattr(source, "num_rows", None) == 0:  # a table, which may be empty
            return []
        files, format = opened(source, schema, format_of_job(loaded.job), loaded.values)
        rows = streamed(loaded.job, schema, format=format)
        rows.set_filelist(files)
        return rows

    def predict_samples(self, samples: Iterable[Sample]) -> Values:
        """Returns the click probabilities of samples (label, dense, slots), float32[B]; labels do not count.

        Those of K tasks are float32[B, K]. A whole number in a slot means what it did in the training data:
        of a column of whole numbers its digits, of keys a key. Raises DataError, which says where and why, if
        a sample does not fit the schema, or has a whole number where the data had text.
        """
        loaded, listed = self._loaded, list(samples)
        return loaded.predict(loaded.batch(listed)) if listed else loaded.none

    def nearest(
        self, slot: str, value: str, *, values: Sequence[str] = (), table: str = "", top: int = 10
    ) -> list[tuple[str, float]]:
        """Returns those of `values` nearest to one of a slot, with cosines; see `value_vectors.nearest`."""
        from ctr_ps.ps_worker.predict.value_vectors import nearest  # late: asked for seldom

        model = self._loaded
        loaded = (model.saved, model.job, model.schema)
        return nearest(loaded, slot, value, values=values, table=table, top=top)

    def program_inputs(self, samples: Sequence[Sample]) -> dict[str, NDArray[Any]]:
        """Returns what the program of `ps-worker export` takes, by name: embeddings, looked up for samples.

        Raises UsageError if the model is none of PyTorch, or there are no samples; DataError if a sample does
        not fit the schema.
        """
        loaded = self._loaded
        if not samples:
            raise UsageError("a program predicts at least one sample, and none was given")
        return loaded.inputs_of_program(loaded.batch(samples))

    def switch_to(self, url: str | Path, *, verify: bool | None = None) -> None:
        """Opens another checkpoint, a delta for instance, and answers with it from the next call on.

        The model before answers until the new one is ready, and stays if that fails. Raises CtrPsError as
        `load`, whose `verify` counts if none is given; also if the checkpoint has another schema, under which
        keys mean something else.
        """
        with self._switching:
            own = {} if verify is None else {"verify": verify}
            loaded = _load(url, self._loaded, **{**self._options, **own})
            if loaded.schema.fingerprint != self.schema.fingerprint:
                raise UsageError(
                    f"{loaded.saved.checkpoint.url} was trained with another schema than {self.url}: load "
                    "it into another predictor, and give that predictor examples of its schema"
                )
            self._previous = [*self._previous, self._loaded][-MAX_KEPT:]
            self._loaded = loaded

    def roll_back(self) -> None:
        """Answers again with the model from before the last switch, up to `MAX_KEPT` times in a row.

        Raises UsageError if no such model is kept.
        """
        with self._switching:
            if not self._previous:
                raise UsageError(
                    f"no model from before {self.url} is left: only the last {MAX_KEPT} replaced models "
                    "are kept. Give switch_to the url of the model that you want"
                )
            self._loaded = self._previous.pop()


def _load(
    url: str | Path, earlier: _Loaded | None, *, verify: bool, map: bool, allow_code: bool
) -> _Loaded:
    checkpoint = Checkpoint.open(url)
    schema = schema_of_checkpoint(checkpoint)
    # A prediction for each row of files.
    job = job_of_checkpoint(checkpoint, ["data.bad_row_limit=0"])
    require_consent(checkpoint.url, job, ["model.name"], allow_code=allow_code)
    model = model_of_checkpoint(checkpoint, job, schema)
    known = None if earlier is None else earlier.saved
    saved = SavedModel(checkpoint, maps=map, verifies=verify, earlier=known)
    return _Loaded(saved, schema, model, job, values_of_checkpoint(checkpoint))
