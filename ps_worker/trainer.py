"""Training from Python, in this process: in a notebook, or where no job file is wanted (docs/python.md)."""

import logging
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, Self, TypeGuard, cast, get_args

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.models.model import Model, module_class_of, origin_of, tasks_of
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import DataError, UsageError
from ctr_ps.protos.store import SaveRequest
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.checkpoints.attachments import (
    attachments_of,
    attachments_of_model,
    values_of_checkpoint,
)
from ctr_ps.ps_worker.checkpoints.resume import Validation
from ctr_ps.ps_worker.checkpoints.warm_start import require_schema
from ctr_ps.ps_worker.data.file_dataset import head_of
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.data.formats import values_of_files
from ctr_ps.ps_worker.data.queue_dataset import QueueDataset
from ctr_ps.ps_worker.data.slot_values import SlotValues
from ctr_ps.ps_worker.data.sources import (
    Source,
    Table,
    features_only,
    in_arrow,
    is_source,
    is_table,
    opened,
)
from ctr_ps.ps_worker.data.user_code.samples import Sample, SampleLoader, batches_of_samples
from ctr_ps.ps_worker.extras.device_pass import new_pass_trainer
from ctr_ps.ps_worker.job import Job, override_job
from ctr_ps.ps_worker.job.datasets import TrainingData, format_of_job, streamed
from ctr_ps.ps_worker.job.model import corrected, errors_of_model, model_of
from ctr_ps.ps_worker.job.sections import Metric
from ctr_ps.ps_worker.run.plan import checked_model_plan
from ctr_ps.ps_worker.run.run import Run
from ctr_ps.ps_worker.run.training_job.validation import EarlyStopping
from ctr_ps.ps_worker.training.evaluation.evaluator import Evaluation, Figures, figures

if TYPE_CHECKING:
    from ctr_ps.ps_worker.extras.report.importance import Importance

logger = logging.getLogger(__name__)

Data = Source | Sequence[Sample] | Iterable[Batch]
"""Files; a DataFrame or another `Table`; a list of samples (label, numbers, values of slots); or batches,
such as a dataset of `fleet`."""


_EXPECTED = (
    "expected files, a DataFrame or another table, a list of samples (label, numbers, values of slots), "
    "or batches, such as a dataset of fleet"
)

_SECTIONS = ("data", "train", "optimizer", "life", "strategy", "device")

_SHUFFLED = {"in_memory": True, "shuffle": "local"}

_GIVEN_OTHERWISE = {
    "train": "give files to train()",
    "test": "give files to evaluate()",
    "valid": "give it as train(valid=...)",
    "schema": "give it as Trainer(schema=...)",
}
"""What a job has in its section [data], and a trainer elsewhere."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What a call of `Trainer.train` did."""

    examples: int  # trained on, over all epochs of the call
    loss: float  # their mean, by their weights; each was predicted before it was trained on
    seconds: float  # that it took
    validations: Sequence[Validation] = ()  # on the data of `valid`, one after each epoch
    best: Validation | None = None  # the best of them by `metric`


class _Call:
    """What a call of `Trainer.train` has done so far."""

    def __init__(self, run: Run, rule: EarlyStopping) -> None:
        self.rule = rule
        self._progress = run.progress
        self._before, self._start = run.progress.counts(), time.monotonic()
        self._validations: list[Validation] = []
        self._best: Validation | None = None

    def add(self, validation: Validation) -> bool:
        """Adds that of an epoch; returns whether it is the best so far."""
        is_best = self.rule.is_better(validation)
        self._best = validation if is_best else self._best
        self._validations.append(validation)
        self.rule = self.rule.after(validation)
        return is_best

    def done(self) -> Trained:
        """Returns it."""
        now = self._progress.counts()
        weight = now.weight - self._before.weight
        return Trained(
            examples=now.examples - self._before.examples,
            loss=(now.loss - self._before.loss) / weight if weight else float("nan"),
            seconds=time.monotonic() - self._start,
            validations=[*self._validations],
            best=self._best,
        )


class Trainer(AbstractContextManager["Trainer"]):
    """A model, its parameters, and what trains and evaluates it, in this process. For one thread.

    Nothing is shared between two trainers, and nothing is left of one that is deleted. After `close` all
    methods raise UsageError. Its attributes `model`, `schema` and `job` are what is trained, the columns of
    the data, and the settings.
    """

    def __init__(
        self,
        model: str | Model,
        options: Mapping[str, Any] | None = None,
        *,
        schema: str | Path | Schema | None = None,
        **sections: Mapping[str, Any],
    ) -> None:
        """Makes a model with initial parameters.

        Args:
            model: A name ("deepfm", or "my_model.py:MyModel"), or a model: `DeepFm(schema, dim=8)`.
            options: Of the model that is named, as the keys of a job's section [model].
            schema: The columns of the data: "criteo", the path of a schema, or one; None: that of a model
                that is given, else "criteo".
            sections: Settings, as a job's sections of the same name: `data` (of files: format and the like),
                `train`, `optimizer`, `life`, `strategy`, `device`.

        Raises:
            JobError: If a setting or an option is wrong.
            SchemaError: If there is no such schema.
            UsageError: If a section or the schema cannot be given here.
        """
        for name in sections:
            if name not in _SECTIONS:
                raise UsageError(
                    f"Trainer has no argument {name!r}: it has {', '.join(_SECTIONS)}. Give files to train() "
                    "and evaluate(), a folder to save()"
                )
        if options and "name" in options:
            raise UsageError(
                f"options name the model {options['name']!r}, but the first argument is {model!r}: leave "
                "'name' out of the options"
            )
        named = {"name": model, **(options or {})} if isinstance(model, str) else {}
        self.job: Job = override_job({"model": named, **sections}, [], source="Trainer()")
        for key, instead in _GIVEN_OTHERWISE.items():
            if key in sections.get("data", {}):
                raise self.job.error(
                    f"data.{key}", f"data.{key} is not a setting of a Trainer: {instead}"
                )
        if isinstance(model, str):
            source = "criteo" if schema is None else schema
            self.schema = source if isinstance(source, Schema) else Schema.load(source)
            self.model = model_of(self.job, self.schema)
        else:
            self.schema = _schema_of(model, options, schema)
            self.model = corrected(self.job, model)
        plan = checked_model_plan(self.model, self.job, new_pass_trainer=new_pass_trainer)
        self.job = plan.job
        self._is_named = isinstance(model, str)
        self._epochs_done = 0
        self._values = SlotValues()  # of what was trained on, or loaded
        self._plan = plan
        self._hold(self._new_run())

    def _new_run(self) -> Run:
        return Run(ParameterStore(wait_limit_s=self.job.cluster.wait_timeout_s), self._plan)

    def _hold(self, run: Run) -> None:
        self._run = run
        self._close = weakref.finalize(self, run.close)

    @classmethod
    def from_frame(
        cls,
        frame: Table,
        model: str = "deepfm",
        options: Mapping[str, Any] | None = None,
        *,
        label: str = "",
        ignore: Collection[str] = (),
        **sections: Mapping[str, Any],
    ) -> Self:
        """Makes a trainer for a DataFrame or another table, whose schema is proposed as by `ps-data init`.

        `label` is the column of 0 and 1, by default one with a usual name; columns in `ignore` are left out.
        Logs what each column is taken for, as a warning if it is ignored or its numbers become names. Rows
        are shuffled before each epoch, unless the section `data` says something else.

        Raises UsageError if the label is not clear, or no column is a slot, DataError if a column cannot be
        read; otherwise as `Trainer`.
        """
        # Late, as most trainers have a schema.
        from ctr_ps.ps_worker.data.columnar.tables import arrow_table
        from ctr_ps.ps_worker.extras.data_tools.roles import AS_NAMES, propose
        from ctr_ps.ps_worker.extras.data_tools.samples import sample_of_table

        if isinstance(ignore, str):
            raise UsageError(f"ignore is {ignore!r}, expected a list of names")
        if not is_table(frame):
            _are_samples(frame)  # refuses several tables
        sample = sample_of_table(arrow_table(frame, ignore=ignore))
        proposal = propose(sample, label=label, ignore=ignore)
        for role in (*proposal.numbers, *proposal.vectors, *proposal.slots):
            log = logger.warning if AS_NAMES in role.why else logger.info
            log("column %s: %s, %s", role.name, type(role).__name__.lower(), role.why)
        for role in proposal.ignored:
            logger.warning("column %s is ignored: %s", role.name, role.why)
        given = sections.pop("data", {})
        shuffled = {} if {"in_memory", "shuffle"} & given.keys() else _SHUFFLED
        data = {**shuffled, **given}
        return cls(model, options, schema=proposal.schema(), data=data, **sections)

    def train(
        self,
        data: Data,
        *,
        epochs: int | None = None,
        valid: Data | None = None,
        metric: Metric = "log_loss",
        patience: int = 0,
        final_model: Literal["last", "best"] = "last",
        on_epoch: Callable[[Trained], object] | None = None,
    ) -> Trained:
        """Trains on data with labels, from the parameters as they are; a second call is a further one.

        Args:
            data: To train on.
            epochs: Passes over them; None: as the section `train` says, 1 without it.
            valid: Data to evaluate on after each epoch, as `evaluate`; None: none. What follows needs them.
            metric: The figure by which epochs are compared.
            patience: Number of epochs in a row that are no better than the best, after which training stops;
                0: it does not.
            final_model: What the parameters are afterwards: those of the last epoch or of the best.
            on_epoch: Called after each epoch with what the call has done so far; a true result, as of a
                limit of one's own, is the last epoch's. The trainer may evaluate, predict and save in it.

        Raises:
            DataError: If no file matches, there are no rows, data are malformed, or cannot be compared.
            UsageError: If an argument is wrong, or data are not of a kind in `Data`.
            CtrPsError: If something else goes wrong; says what. The steps before it have been taken.
        """
        self._require_open()
        # Once for all epochs.
        data, valid = in_arrow(data, self.schema), in_arrow(valid, self.schema)
        epochs = self.job.train.epochs if epochs is None else epochs
        self._check_arguments(data, epochs, valid, patience, metric, final_model)
        self._require_weights(data)
        if isinstance(data, Sequence) and not data:
            raise DataError(f"train(): data is empty: {data!r}")
        if valid is not None:
            self._require_rows(valid)
        known = SlotValues()
        known.merge(self._values)
        if is_source(data):
            files, format = opened(data, self.schema, format_of_job(self.job))
            self._values.merge(values_of_files(files, self.schema, format))
        call = _Call(self._run, EarlyStopping(metric=metric, patience=patience))
        skipped = self._run.non_finite.skipped
        with self._errors(), TemporaryDirectory() as folder:
            try:
                self._run.start(self._head(data))
                for batches in self._epochs(data, epochs):
                    self._run.train(batches)
                    self._epochs_done += 1
                    if valid is not None:
                        is_best = call.add(self._validation(valid, metric))
                        if is_best and final_model == "best":
                            self._run.save(SaveRequest(url=f"{folder}/best"))
                    if (on_epoch is not None and on_epoch(call.done())) or call.rule.is_over:
                        break
            finally:  # of a dataset; those of samples are seen as they come
                if isinstance(values := getattr(data, "slot_values", None), SlotValues):
                    self._values.merge(values)
                if not call.done().examples:
                    self._values = known
            self._run.progress.log()
            self._run.progress.warn_of_one_class(self._run.progress.of_pass(), self.schema.label)
            trained = call.done()
            if not trained.examples and self._run.non_finite.skipped == skipped:
                raise DataError("train(): data has no rows to train on")
            if final_model == "best" and call.rule.waits:
                self._go_back(f"{folder}/best")
                self._epochs_done -= call.rule.waits
        return trained

    def _require_rows(self, valid: Data) -> None:
        """Refuses what no epoch can be evaluated on, as far as its first rows tell."""
        if is_source(valid):
            self._dataset(valid, self.schema, None).require_rows()
        elif not isinstance(valid, Iterable):
            raise UsageError(f"valid is {valid!r}, {_EXPECTED}")
        elif isinstance(valid, Sequence) and not valid:
            raise DataError(f"valid is empty: {valid!r}")

    def _go_back(self, url: str) -> None:
        """Goes on from a checkpoint of this run in a new one, as one that has begun loads nothing."""
        manifest, run = Checkpoint.open(url).manifest, self._new_run()
        try:
            run.load(url)
            run.resume(manifest.version, manifest.workers, batches=manifest.batches)
            run.start()
        except BaseException:
            run.close()
            raise
        self._close()
        self._hold(run)

    def _validation(self, data: Data, metric: Metric) -> Validation:
        found = self.evaluate(data)
        if found[metric] is None:
            raise DataError(
                f"metric is {metric!r}, which the data of valid does not have: it needs rows with a click "
                "and rows without"
            )
        logger.info(
            "validation epoch=%d auc=%s log_loss=%s",
            self._epochs_done,
            found["auc"],
            found["log_loss"],
        )
        return Validation(
            epoch=self._epochs_done,
            step=self._run.progress.steps,
            auc=found["auc"],
            log_loss=found["log_loss"],
        )

    def _check_arguments(
        self,
        data: Data,
        epochs: int,
        valid: Data | None,
        patience: int,
        metric: str,
        final_model: str,
    ) -> None:
        if epochs < 1:
            raise UsageError(f"epochs is {epochs}, expected at least 1")
        for name, each in (("data", data), ("valid", valid)):
            if epochs > 1 and isinstance(each, Iterator):
                raise UsageError(
                    f"{name} is {each!r}, which can be iterated only once, but epochs is {epochs}: give "
                    "files, a list or a dataset"
                )
        if metric not in get_args(Metric):
            raise UsageError(f"metric is {metric!r}, expected one of {', '.join(get_args(Metric))}")
        if final_model not in ("last", "best"):
            raise UsageError(f"final_model is {final_model!r}, expected 'last' or 'best'")
        if patience < 0:
            raise UsageError(f"patience is {patience}, expected at least 0")
        if valid is None and (patience, metric, final_model) != (0, "log_loss", "last"):
            raise UsageError(
                "patience, metric and final_model need data to evaluate on: give valid="
            )
        if self.job.data.negative_rate != 1 and not is_source(data):
            raise self.job.error(
                "data.negative_rate",
                f"data.negative_rate is {self.job.data.negative_rate:g}, which selects rows while files or "
                f"tables are read, but train() was given {type(data).__name__}: give these, or leave it out",
            )

    def evaluate(self, data: Data) -> Figures:
        """Returns `auc`, `log_loss`, `accuracy`, `calibration` and the number of `test_examples`.

        And `unknown_values`: by slot the share that the model has no weights for, most of which it warns of.
        Raises DataError if no row has a label; otherwise as `train`.
        """
        self._require_open()
        self._require_weights(data)
        with self._errors():
            metrics = self._score(self._batches(data, self.schema, meant=self._values))
        if not metrics.examples:
            raise DataError("evaluate() needs labels, but no row has one: use predict()")
        return figures(metrics)

    def predict(self, data: Data) -> NDArray[np.float32]:
        """Returns the click probability of each row, float32[n]; labels do not count, and may be missing.

        Those of a model of K tasks are float32[n, K], in the order of its `tasks`. Raises DataError if a row
        is malformed; otherwise as `train`.
        """
        self._require_open()
        schema, tasks = features_only(self.schema), tasks_of(self.model)
        data = in_arrow(data, schema)
        none = np.empty((0, len(tasks)) if tasks else 0, np.float32)
        if getattr(data, "num_rows", None) == 0:  # a table, which may be empty
            return none
        predictions: list[NDArray[np.float32]] = [none]
        batches = self._batches(data, schema, meant=self._values)
        with self._errors():
            self._score(batches, lambda each: predictions.append(each.copy()))
        return np.concatenate(predictions)

    def _score(
        self, batches: Iterable[Batch], then: Callable[..., None] | None = None
    ) -> Evaluation:
        found = self._run.evaluate(batches, on_predictions=then)
        if self._epochs_done or self._values.are_known:  # a model before training knows no values
            found.warn_of_unknown()
        return found

    def importance(self, data: Data, *, rows: int = 100_000) -> "Importance":
        """Returns by how much AUC and log loss get worse when the values of a feature are permuted.

        Of the first `rows` with a label; each is predicted once a feature. Raises DataError with fewer than 2
        of them; otherwise as `train`.
        """
        # Late, as it is asked for seldom.
        from ctr_ps.ps_worker.extras.report.importance import importance_of_features

        self._require_open()
        self._require_weights(data)
        with self._errors():
            return importance_of_features(
                self._run.reader(),
                self.model,
                self.schema,
                self._batches(data, self.schema, meant=self._values),
                rows=rows,
                batch_size=self.job.train.batch_size,
            )

    def save(self, folder: str | Path) -> str:
        """Saves the model with its optimizer state, for `Predictor.load`, `ps-worker infer` and `load`.

        Returns `folder`, a path or URL that does not exist, or a checkpoint, which is replaced.

        Raises:
            UsageError: If an option of the model cannot be saved.
            CheckpointError: If it cannot be written; an older checkpoint there stays as it was.
        """
        self._require_open()
        attachments = (
            attachments_of(self.job, self.schema, self._values)
            if self._is_named
            else attachments_of_model(self.model, self.job, self._values)
        )
        if not attachments:
            logger.warning(
                "%s has only parameters, for load(): the model's class, %s, and arguments cannot be saved",
                folder,
                type(self.model).__qualname__,
            )
        self._run.save(SaveRequest(url=str(folder), attachments=attachments))
        return str(folder)

    def load(self, folder: str | Path) -> None:
        """Takes the parameters and optimizer state of a saved model, before training.

        `folder` is a checkpoint, or has some: then its newest.

        Raises:
            UsageError: If training has begun.
            CheckpointError: If it is not a checkpoint, or of another model; nothing was replaced.
            JobError: If it was trained with another schema.
        """
        self._require_open()
        checkpoint = Checkpoint.open(folder)
        require_schema(self.job, self.model, self.schema, checkpoint.url, takes_dense=True)
        self._run.load(checkpoint.url, token=checkpoint.token)
        self._values.merge(values_of_checkpoint(checkpoint))

    def close(self) -> None:
        """Ends the background work of training; deleting the trainer does the same.

        What it has learnt is gone then: evaluate, predict and save before.
        """
        self._close()

    def _errors(self) -> AbstractContextManager[None]:
        model_class = module_class_of(self.model) or type(self.model)
        return errors_of_model(self.job, None if self._is_named else model_class.__name__)

    def _require_open(self) -> None:
        if not self._close.alive:
            raise UsageError(
                "this Trainer is closed, by close() or at the end of its with block: train, evaluate, "
                "predict and save before that, or make another and load() the saved model"
            )

    def __exit__(self, *_: object) -> None:
        self.close()

    def _epochs(self, data: Data, epochs: int) -> Iterator[Any]:
        if not is_source(data):
            for _ in range(epochs):
                yield self._batches(data, self.schema)
            return
        files, format = opened(data, self.schema, format_of_job(self.job))
        training = TrainingData(self.job, self.schema, [FileSplit(each) for each in files], format)
        for epoch in range(self._epochs_done + 1, self._epochs_done + epochs + 1):
            training.prepare(self._run, epoch)
            yield training.batches(epoch)

    def _batches(
        self, data: Data, schema: Schema, *, meant: SlotValues | None = None
    ) -> Iterable[Batch]:
        """Returns the batches of data; with `meant` to predict: values mean what they did in training."""
        if is_source(data):
            return self._dataset(data, schema, meant)
        if _are_samples(data):
            size, seen = self.job.train.batch_size, self._values if meant is None else None
            return batches_of_samples(data, schema, batch_size=size, seen=seen, meant=meant)
        if isinstance(data, SampleLoader) and meant is not None:
            return data.to_predict(meant)
        return _checked(cast("Iterable[Batch]", data))

    def _dataset(self, data: Source, schema: Schema, meant: SlotValues | None) -> QueueDataset:
        # Before training, values may mean anything.
        known = meant if self._epochs_done or self._values.are_known else None
        files, format = opened(data, schema, format_of_job(self.job), known)
        limit = 0 if schema.is_for_prediction else None  # a prediction for each row
        dataset = streamed(self.job, schema, format=format, bad_row_limit=limit)
        dataset.set_filelist(files)
        return dataset

    def _head(self, data: Data) -> Iterable[Batch]:
        """Returns the first rows of data that can be gone through twice."""
        if isinstance(data, Iterator):
            return ()
        if not is_source(data) and _are_samples(data):
            return self._batches(data, self.schema)
        batches = cast("Iterable[Batch]", data)
        return head_of(self._batches(data, self.schema) if is_source(data) else batches)

    def _require_weights(self, data: Data) -> None:
        """Refuses samples where the schema has weights, without which other figures would come out."""
        if self.schema.weight is not None and not is_source(data) and _are_samples(data):
            raise UsageError(
                f"the schema names {self.schema.weight!r} as the column of weights, but samples have no "
                f"weights: give files, a table or batches, or remove 'weight' from the schema"
            )


def _are_samples(data: Data) -> TypeGuard[Sequence[Sample]]:
    if isinstance(data, Sequence) and any(map(is_table, data[:2])):
        raise UsageError(
            f"data is a {type(data).__name__} of tables, expected one table, with the label as a column"
        )
    return isinstance(data, Sequence) and not all(isinstance(each, Batch) for each in data)


def _checked(data: Iterable[object]) -> Iterator[Batch]:
    if not isinstance(data, Iterable):
        hint = ": collect() it first" if hasattr(data, "collect") else ""
        raise UsageError(f"data is {data!r}, {_EXPECTED}{hint}")
    for each in data:
        if not isinstance(each, Batch):
            raise UsageError(
                f"data is of type {type(data).__name__} and has a {type(each).__name__}, {_EXPECTED}"
            )
        yield each


def _schema_of(
    model: Model, options: Mapping[str, Any] | None, schema: str | Path | Schema | None
) -> Schema:
    if options:
        raise UsageError(
            f"options are {options!r}, but an instance of a model already has its options: leave them out"
        )
    origin = origin_of(model)
    if origin is None and not isinstance(schema, Schema):
        raise UsageError(
            f"{type(model).__name__} does not store the schema that it was made for: give schema="
        )
    if origin is not None and schema is not None and schema != origin.schema:
        raise UsageError("schema= differs from the schema of the model: leave out schema=")
    return cast("Schema", schema if origin is None else origin.schema)
