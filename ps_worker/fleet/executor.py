"""The executor of a script: trains the model of this run, and predicts with it."""

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from typing import Any

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.metrics import ClickMetrics
from ctr_ps.ctr_model.models.model import Model
from ctr_ps.protos.errors import UsageError
from ctr_ps.ps_worker.data.blocks import DataPosition
from ctr_ps.ps_worker.data.file_dataset import head_of
from ctr_ps.ps_worker.data.in_memory_dataset import InMemoryDataset
from ctr_ps.ps_worker.data.queue_dataset import QueueDataset
from ctr_ps.ps_worker.data.user_code.samples import SampleLoader
from ctr_ps.ps_worker.fleet.running import FLEET
from ctr_ps.ps_worker.fleet.words.unknown import called_as
from ctr_ps.ps_worker.training.evaluation.evaluator import OnPredictions
from ctr_ps.ps_worker.training.monitor import FetchHandler, Fetching
from ctr_ps.ps_worker.training.step_loop import TrainedStep

FETCH_PERIOD_S = 5.0


class Executor:
    """Trains what was minimized; all executors of a process are of its one run."""

    @called_as("executor.train_from_dataset(dataset, fetch_handler=print, fetch_period=5)")
    def train_from_dataset(
        self,
        dataset: Iterable[Batch],
        fetch_handler: FetchHandler | None = None,
        fetch_period: float = FETCH_PERIOD_S,
        *,
        start: DataPosition | None = None,
    ) -> None:
        """Trains once on each batch of a dataset, with the dataset's `thread_num` threads.

        Args:
            dataset: `fleet.QueueDataset`, `fleet.SampleLoader`, or any batches.
            fetch_handler: Called every few seconds, and once more at the end, with `fleet.Fetched`; what it
                raises ends training.
            fetch_period: Seconds between two of its calls.
            start: Where in a `fleet.QueueDataset` or `fleet.InMemoryDataset` to resume, as
                `fleet.data_position()` says; None: at the start of its next pass.

        Raises:
            UsageError: If `start` is of other data, or the dataset has no order; or if `fetch_handler` is no
                function, as where a program comes before the dataset.
            CtrPsError: If something goes wrong; says what.
        """
        if fetch_handler is not None and not callable(fetch_handler):
            raise UsageError(
                f"fetch_handler is {fetch_handler!r}, expected a function; there is no program here: "
                f"executor.train_from_dataset(dataset, fetch_handler=print, fetch_period=5)"
            )
        run = FLEET.run_of("training")
        FLEET.agree_on(dataset, "training")
        FLEET.trains_on(dataset)
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
        run = FLEET.run_of("training")
        FLEET.agree_on(reader, "training")
        FLEET.trains_on(reader)
        run.start(head_of(reader))
        return run.steps(_batches(reader))

    @called_as("executor.infer_from_dataset(dataset)")
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

        Raises:
            UsageError: If another model was minimized, or `loader` can be gone through once only.
        """
        FLEET.require_task(model)
        if epoch > 1 and isinstance(loader, Iterator):
            raise UsageError(
                f"loader is {loader!r}, which can be gone through once only, and epoch is {epoch}: "
                f"give a list of batches, a dataset or a fleet.SampleLoader"
            )
        if FLEET.is_server():
            FLEET.init_server()
            FLEET.run_server()
            return
        FLEET.init_worker()
        for _ in range(epoch):
            self.train_from_dataset(loader)
        FLEET.stop_worker()


def _positioned(dataset: Iterable[Any], start: DataPosition | None) -> Iterable[Any]:
    """Returns what a dataset gives, with positions if it has them."""
    if isinstance(dataset, QueueDataset | InMemoryDataset) and dataset.has_order:
        return dataset.positioned(start)
    if start is not None:
        raise UsageError(
            f"start is {start}, and {dataset!r} has no order: use a dataset of files with reader_num=1"
        )
    return dataset


def _batches(source: Iterable[Any]) -> Generator[Any, None, None]:
    for batch in source:
        if not isinstance(batch, Batch) and not _has_position(batch):
            raise UsageError(
                f"the data yields {type(batch).__name__}, expected Batch: a function that yields samples is "
                f"to be wrapped as fleet.SampleLoader(function, schema, batch_size=512)"
            )
        yield batch


def _has_position(batch: object) -> bool:
    """Whether it is what `dataset.positioned()` yields."""
    return isinstance(batch, tuple) and list(map(type, batch)) == [Batch, DataPosition]
