"""What a script trains with: a distributed optimizer, and the executor that its `minimize` returns."""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, Literal

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.metrics import ClickMetrics
from ctr_ps.ctr_model.models.model import Model
from ctr_ps.protos.errors import UsageError
from ctr_ps.ps_worker.data.blocks import DataPosition
from ctr_ps.ps_worker.data.file_dataset import head_of
from ctr_ps.ps_worker.data.in_memory_dataset import InMemoryDataset
from ctr_ps.ps_worker.data.queue_dataset import QueueDataset
from ctr_ps.ps_worker.data.user_code.samples import SampleLoader
from ctr_ps.ps_worker.fleet.optimizer import require_optimizer
from ctr_ps.ps_worker.fleet.running import FLEET
from ctr_ps.ps_worker.fleet.task import Task
from ctr_ps.ps_worker.fleet.words.program import Loss, default_main_program
from ctr_ps.ps_worker.fleet.words.settings import as_calls
from ctr_ps.ps_worker.fleet.words.strategy import DistributedStrategy
from ctr_ps.ps_worker.fleet.words.unknown import called_as
from ctr_ps.ps_worker.job import override_job
from ctr_ps.ps_worker.job.checks import require_base_rate, require_life, require_optimizers
from ctr_ps.ps_worker.job.model import specs_of, trained_model
from ctr_ps.ps_worker.training.evaluation.evaluator import OnPredictions
from ctr_ps.ps_worker.training.monitor import FetchHandler, Fetching
from ctr_ps.ps_worker.training.step_loop import TrainedStep

_OF_PADDLE = "program dataset scope thread debug fetch_list fetch_info print_period fetch_handler"


class Executor:
    """Trains what was minimized; all executors of a process are of its one run."""

    @called_as(
        "executor.train_from_dataset(dataset, fetch_handler=print, fetch_period=5)",
        paddle=_OF_PADDLE,
        instead=": threads are those of the dataset",
    )
    def train_from_dataset(
        self,
        dataset: Iterable[Batch],
        *,
        fetch_handler: FetchHandler | None = None,
        fetch_period: float = 5.0,
        fetch_list: object = None,
        start: DataPosition | None = None,
    ) -> None:
        """Trains once on each batch of a dataset, with the dataset's `thread_num` threads.

        Args:
            dataset: `fleet.QueueDataset`, `fleet.SampleLoader`, or any batches.
            fetch_handler: Called every few seconds, and once more at the end, with `fleet.Fetched`; what it
                raises ends training.
            fetch_period: Seconds between two of its calls.
            fetch_list: As in Paddle: with anything in it and without a handler, loss and AUC are printed.
            start: Where in a `fleet.QueueDataset` or `fleet.InMemoryDataset` to resume, as
                `fleet.data_position()` says; None: at the start of its next pass.
        """
        if fetch_handler is not None and not callable(fetch_handler):
            raise UsageError(
                f"fetch_handler is {fetch_handler!r}, expected a function that gets fleet.Fetched"
            )
        if fetch_list and fetch_handler is None:
            fetch_handler = print
        run = FLEET.trains_on(dataset)
        thread_num = getattr(dataset, "thread_num", 1)
        # Closed, or readers outlive an error.
        with closing(_batches(_positioned(dataset, start))) as batches:
            run.start(head_of(dataset))
            if fetch_handler is None:
                run.train(batches, thread_num=thread_num)
            else:
                with Fetching(
                    fetch_handler,
                    period_s=fetch_period,
                    progress=run.progress,
                    staleness=lambda: run.store.status().staleness,
                ) as fetching:
                    run.train(fetching.watch(batches), thread_num=thread_num)
            run.progress.log()

    def steps(self, reader: Iterable[Batch]) -> Iterator[TrainedStep]:
        """Trains on each batch once in this thread, and yields after each: the plain loop.

        for step in executor.steps(reader):
            print(step.loss)
        """
        run = FLEET.trains_on(reader)
        run.start(head_of(reader))
        return run.steps(_batches(reader))

    @called_as("executor.infer_from_dataset(dataset)", paddle=_OF_PADDLE)
    def infer_from_dataset(
        self, dataset: Iterable[Batch], *, on_predictions: OnPredictions | None = None
    ) -> ClickMetrics:
        """Returns the metrics of predictions for this worker's dataset; fleet.metrics has those of all.

        Args:
            dataset: As for training; examples without labels count in no metric.
            on_predictions: Gets each batch's click probabilities, float32[B], or those of K tasks,
                float32[B, K]; a view, valid only during the call.
        """
        run, values = FLEET.run_of("inference"), FLEET.slot_values()
        if isinstance(dataset, SampleLoader) and values.are_known:
            dataset = dataset.to_predict(values)
        with closing(_batches(dataset)) as batches:
            return run.evaluate(batches, on_predictions=on_predictions)

    def fit(self, model: Model, loader: Iterable[Batch], epoch: int = 1) -> None:
        """Runs the rest of a script: serves on a server, and trains `epoch` times on a worker.

        Raises UsageError if another model was minimized, or `loader` can be gone through once only.
        """
        FLEET.require_task(model)
        if epoch > 1 and isinstance(loader, Iterator):
            raise UsageError(
                f"loader is {loader!r}, which can be iterated only once, but epoch is {epoch}: give a list "
                "of batches, a dataset or a fleet.SampleLoader"
            )
        if FLEET.is_server():
            FLEET.init_server()
            FLEET.run_server()
            return
        FLEET.init_worker()
        for _ in range(epoch):
            self.train_from_dataset(loader)
        FLEET.stop_worker()


class DistributedOptimizer:
    """Trains a model on servers."""

    def __init__(self, optimizer: Any, strategy: DistributedStrategy, dense: Any) -> None:
        of_rows, of_dense = require_optimizer(optimizer), require_optimizer(dense)
        if not of_rows.is_lazy:
            raise UsageError(
                "lazy_mode=False is not supported for rows: a step changes only the rows of its batch, as "
                "changing all rows would be too slow. Leave lazy_mode out; dense parameters always change in "
                "each step"
            )
        norms = {each.clip_norm for each in (of_rows, of_dense) if each.clip_norm}
        if len(norms) > 1:
            raise UsageError(
                f"optimizers have different grad_clip, {sorted(norms)}: rows and dense parameters are "
                "clipped together, by one norm"
            )
        self._clip_norm = max(norms, default=0.0)
        self._optimizer = {"sparse": of_rows.choice, "dense": of_dense.choice}
        self._strategy = strategy

    def minimize(
        self,
        model: Model | Loss,
        *,
        seed: int | None = None,
        log_every_s: float = 5.0,
        life: Mapping[str, Any] | None = None,
        non_finite: str = "fail",
        compute: str = "float32",
        clip_norm: float = 0.0,
        dropout: float = 0.0,
        base_rate: float | Sequence[float] | Literal["data"] = "data",
    ) -> Executor:
        """Makes `model` what this run trains, and returns what trains it; nothing is trained yet.

        Args:
            model: For the columns of the data; a table that asks for an optimizer of its own gets it. Or the
                loss of a static program.
            seed: Of the initial values of all parameters; None: that of `paddle.seed`, else 0.
            log_every_s: Seconds between two log lines of training.
            life: What a job's [life] would say, before any `entry` of a program's tables;
                `shrink_every_epochs` is up to the script.
            non_finite: As a job's `train.non_finite`, and so on for the others.
            compute: "float32" or "bfloat16".
            clip_norm: Also that of `grad_clip` of the optimizers. 0: any.
            dropout: Of the outputs of hidden layers.
            base_rate: "data": that of the first rows of worker 0's dataset of files, or list of batches.

        Raises:
            UsageError: If strategy, optimizers or numbers are wrong, or the run has begun.
        """
        program = model.label.program if isinstance(model, Loss) else default_main_program()
        seed = program.seed if seed is None else seed
        if isinstance(model, Loss):
            life = program.life(life or {})
            model = model.model_of_program(seed)
        if not hasattr(model, "tables"):
            raise UsageError(
                f"minimize() got {model!r}, expected a model, or the loss of a program"
            )
        if clip_norm and self._clip_norm and clip_norm != self._clip_norm:
            raise UsageError(
                f"clip_norm is {clip_norm!r}, but grad_clip is {self._clip_norm!r}: give one of them"
            )
        job = override_job(
            {
                "train": {
                    "seed": seed,
                    "log_every_s": log_every_s,
                    "non_finite": non_finite,
                    "compute": compute,
                    "clip_norm": clip_norm or self._clip_norm,
                    "dropout": dropout,
                    "base_rate": base_rate,
                },
                "optimizer": self._optimizer,
                "life": life or {},
                "strategy": self._strategy.section(),
                "cluster": FLEET.limits,
            },
            [],
            source="this script",
            words=as_calls,
        )
        require_optimizers(job, model)
        require_base_rate(job, model)
        trained_model(job, model)  # refuses dropout and precisions that it has no use for
        require_life(specs_of(model, job))
        FLEET.minimize(Task(model=model, job=job))
        return Executor()


def distributed_optimizer(
    optimizer: Any, strategy: DistributedStrategy | None = None, *, dense: Any = None
) -> DistributedOptimizer:
    """Returns what trains under a strategy: None: asynchronously.

    `optimizer` is for rows of embeddings, `dense` for dense parameters: both of `fleet.optimizer`, the same
    without the latter. Raises UsageError if one of them is not an optimizer.
    """
    return DistributedOptimizer(
        optimizer, strategy or DistributedStrategy(), optimizer if dense is None else dense
    )


def _positioned(dataset: Iterable[Any], start: DataPosition | None) -> Iterable[Any]:
    if isinstance(dataset, QueueDataset | InMemoryDataset) and dataset.has_order:
        return dataset.positioned(start)
    if start is not None:
        raise UsageError(
            f"start is {start}, but {dataset!r} has no order: use a dataset of files with reader_num=1"
        )
    return dataset


def _batches(source: Iterable[Any]) -> Generator[Any, None, None]:
    if not isinstance(source, Iterable):
        raise UsageError(f"dataset is {source!r}, expected batches, such as a fleet.QueueDataset")
    for batch in source:
        # A tuple is what `dataset.positioned()` yields.
        has_position = isinstance(batch, tuple) and [*map(type, batch)] == [Batch, DataPosition]
        if not isinstance(batch, Batch) and not has_position:
            raise UsageError(
                f"the data yields {type(batch).__name__}, expected Batch: wrap a function that yields "
                "samples, as in fleet.SampleLoader(function, schema, batch_size=512)"
            )
        yield batch
