"""A model that answers requests, and is exchanged for a newer one while it does.

    request --a thread of the pool--> samples --> the predictor of this moment --> answer
    folder  --every few seconds-----> a newer checkpoint? --> a predictor of its own --> answers from now on

A request has one predictor from its beginning to its end. A checkpoint that cannot be loaded is logged once,
and the one before goes on. What requests took, Prometheus and the status page are told.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ctr_ps.protos.errors import CtrPsError, OverloadedError, UsageError
from ctr_ps.protos.metrics.metrics_port import Series, Status
from ctr_ps.ps_server.checkpoint.publish import of_newest, read_manifest, resolve
from ctr_ps.ps_worker.checkpoints.notices import Channel
from ctr_ps.ps_worker.data.streams.stream_data import newest_ms
from ctr_ps.ps_worker.extras.inference_server.tensors import (
    Tensor,
    TensorType,
    inputs_of,
    outputs_of,
    samples_of,
)
from ctr_ps.ps_worker.predict.predictor import Predictor

logger = logging.getLogger(__name__)

MAX_WAITING = 64
"""Requests that have a thread or wait for one, of up to 16 MiB each; more are refused, so that those which
wait are still wanted."""

RETRY_AFTER_S = 1.0

BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class UnknownModelError(CtrPsError):
    """A request asks for a model, version or output that is not served here."""


@dataclass(frozen=True, slots=True)
class Current:
    """The model that answers: its version is the name of its checkpoint, its token that of the save.

    `since` is when it was loaded, `newest_row` the time of `newest_ms`, in seconds since 1970; 0: of none.
    """

    predictor: Predictor
    version: str
    token: str
    newest_row: float = 0.0
    since: float = field(default_factory=time.time)

    @property
    def newest_row_age(self) -> float:
        """Seconds since `newest_row`; 0 if it is ahead of this clock."""
        return max(time.time() - self.newest_row, 0.0)


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for: rows as tensors, and names of outputs; none: all."""

    tensors: Sequence[Tensor]
    outputs: Sequence[str]


Outputs = Sequence[tuple[TensorType, NDArray[np.float32]]]
"""Of a request; at least one."""


@dataclass(slots=True)
class Counts:
    """What a served model has done: rows predicted, and newer models that were loaded or could not be."""

    rows: int = 0
    reloads: int = 0
    failed_reloads: int = 0


class ServedModel:
    """The model of a checkpoint, or of the newest one in a folder. For one event loop."""

    def __init__(
        self,
        url: str,
        *,
        name: str,
        max_rows: int,
        threads: int,
        verify: bool = True,
        allow_code: bool = False,
        maps: bool = False,
    ) -> None:
        """Loads it; raises CtrPsError if there is no checkpoint, or it cannot be loaded.

        `max_rows` is of a request, `threads` predict, for the others see `Predictor.load`.
        """
        self.name = name  # by which requests ask for it
        self.counts = Counts()  # what it has done
        self._url = url
        self._max_rows = max_rows
        self.num_waiting = 0  # requests that have a thread, or wait for one
        self._fault = ""  # of the newest checkpoint; told once
        self._open = partial(Predictor.load, verify=verify, map=maps, allow_code=allow_code)
        # the model that answers
        self.current = of_newest(url, self._load)
        self._threads = ThreadPoolExecutor(threads, "predict")
        logger.info(
            "serving model=%s version=%s url=%s",
            name,
            self.current.version,
            self.current.predictor.url,
        )

    def metadata(self) -> dict[str, Any]:
        """Returns the fields of the protocol's ModelMetadataResponse."""
        predictor = self.current.predictor
        return {
            "name": self.name,
            "versions": [self.current.version],
            "platform": "ctr-ps",
            "inputs": [asdict(each) for each in inputs_of(predictor.schema)],
            "outputs": [asdict(each) for each in outputs_of(predictor.tasks)],
        }

    def meant(self, name: str, version: str = "") -> Current:
        """Returns the model that answers; raises UnknownModelError if another is meant. "" is any version."""
        current = self.current
        if name != self.name:
            raise UnknownModelError(f"no model {name!r} here, only {self.name!r}")
        if version not in ("", current.version):
            raise UnknownModelError(
                f"version {version!r} of {name!r} is not served, only {current.version!r}: leave the version "
                "out to ask for the newest"
            )
        return current

    @contextmanager
    def place(self) -> Iterator[None]:
        """Counts a request, before its body is read, for a block; raises OverloadedError if too many wait."""
        if self.num_waiting >= MAX_WAITING:
            raise OverloadedError(
                f"{self.num_waiting} requests wait for this process: try again in {RETRY_AFTER_S:g} s, or "
                f"use more processes",
                retry_after_s=RETRY_AFTER_S,
            )
        self.num_waiting += 1
        try:
            yield
        finally:
            self.num_waiting -= 1

    async def infer(self, current: Current, decode: Callable[[], Request]) -> Outputs:
        """Predicts the rows of a request that meant `current`, and is decoded, too, in a thread of the pool.

        Raises:
            DataError: If the request is not as the protocol says, or does not fit the model.
            UnknownModelError: If there is no output that it asks for.
        """
        loop = asyncio.get_running_loop()
        outputs = await loop.run_in_executor(self._threads, self._infer, current, decode)
        self.counts.rows += len(outputs[0][1])
        return outputs

    def _infer(self, current: Current, decode: Callable[[], Request]) -> Outputs:
        predictor, request = current.predictor, decode()
        types = outputs_of(predictor.tasks)
        if unknown := set(request.outputs) - {each.name for each in types}:
            raise UnknownModelError(
                f"no output {sorted(unknown)}, the model has {[each.name for each in types]}"
            )
        samples = samples_of(
            request.tensors, predictor.schema, max_rows=self._max_rows, values=predictor.slot_values
        )
        predictions = predictor.predict_samples(samples)
        columns = predictions.reshape(len(samples), len(types)).T
        return [
            (TensorType(each.name, each.datatype, (len(samples),)), column)
            for each, column in zip(types, columns, strict=True)
            if not request.outputs or each.name in request.outputs
        ]

    async def reload_every(self, seconds: float, channel: Channel | None = None) -> None:
        """Looks for a newer checkpoint every so many seconds, and when a channel tells of one, for ever."""
        while True:
            try:
                await (channel.wait(seconds) if channel else asyncio.sleep(seconds))
                await asyncio.to_thread(self.reload)
            except Exception:  # the next look may find another checkpoint
                self.counts.failed_reloads += 1
                logger.exception("looking for a newer model failed")

    def reload(self) -> bool:
        """Answers with the newest checkpoint from now on; returns whether it is another one.

        One that cannot be loaded, or predict a row, changes nothing.
        """
        try:
            newest = resolve(self._url)
            if read_manifest(newest).data_folder == f"data-{self.current.token}":
                self._fault = ""  # what was wrong is over, and told if it comes again
                return False
            loaded = self._load(newest.url, self.current.predictor)
            old, new = self.current.predictor, loaded.predictor
            if new.schema.fingerprint != old.schema.fingerprint or new.tasks != old.tasks:
                raise UsageError(
                    f"{new.url} has another schema or other tasks than {old.url}, for which clients send "
                    "tensors: start another ps-serve for it"
                )
        except Exception as error:  # a checkpoint of anybody's, with code of the user's
            fault = str(error) if isinstance(error, CtrPsError) else repr(error)
            if fault != self._fault:
                self._fault = fault
                self.counts.failed_reloads += 1
                logger.error(
                    "a newer model cannot be served, still serving version=%s: %s",
                    self.current.version,
                    fault,
                )
            return False
        self.current = loaded
        self._fault = ""
        self.counts.reloads += 1
        logger.info("serving model=%s version=%s", self.name, loaded.version)
        return True

    def _load(self, url: str, earlier: Predictor | None = None) -> Current:
        predictor = self._open(url) if earlier is None else earlier.successor(url)
        # Of missing values: kernels are compiled, and the model can predict, before the first request.
        schema = predictor.schema
        predictor.predict_samples([(None, [None] * len(schema.dense), [""] * len(schema.slots))])
        checkpoint = predictor.checkpoint
        newest_s = newest_ms(checkpoint.manifest.workers) / 1000
        return Current(predictor, PurePosixPath(checkpoint.url).name, checkpoint.token, newest_s)

    def close(self) -> None:
        """Ends the threads, after what they predict now."""
        self._threads.shutdown()


class RequestMetrics(Collector):
    """Counts requests, and collects what there is to know of a served model. Thread-safe."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._durations = Histogram(
            "ctr_serve_request_duration_seconds",
            "Time from request to answer.",
            ["protocol", "method", "status"],
            buckets=BOUNDS_S,
            registry=None,
        )
        self._num_requests = 0

    def ended(self, protocol: str, method: str, status: str, seconds: float) -> None:
        """A request ended with a status of its protocol."""
        self._num_requests += 1
        self._durations.labels(protocol, method, status).observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics as of now."""
        yield from self._durations.collect()
        model, counts = self._model, self._model.counts
        yield CounterMetricFamily("ctr_serve_rows", "Rows predicted.", value=counts.rows)
        yield GaugeMetricFamily(
            "ctr_serve_waiting_requests",
            "Requests in a thread or waiting for one.",
            value=model.num_waiting,
        )
        reloads = CounterMetricFamily("ctr_serve_reloads", "Newer models found.", labels=["result"])
        reloads.add_metric(["served"], counts.reloads)
        reloads.add_metric(["failed"], counts.failed_reloads)
        yield reloads
        served = GaugeMetricFamily(
            "ctr_serve_model_info",
            "1; the labels name the served model.",
            labels=["model", "version"],
        )
        served.add_metric([model.name, model.current.version], 1)
        yield served
        yield GaugeMetricFamily(
            "ctr_serve_model_age_seconds",
            "Time since the served model was loaded.",
            value=time.time() - model.current.since,
        )
        if model.current.newest_row:
            yield GaugeMetricFamily(
                "ctr_serve_newest_row_age_seconds",
                "Age of the newest row that the worker furthest behind has brought to the served model.",
                value=model.current.newest_row_age,
            )

    def status(self) -> Status:
        """Returns what the status page shows."""
        model, counts = self._model, self._model.counts
        age_s = round(model.current.newest_row_age)
        age = {"seconds since the newest row": age_s} if model.current.newest_row else {}
        return Status(
            title=f"ps-serve {model.name}",
            figures={
                "version": model.current.version,
                "seconds since the model was loaded": round(time.time() - model.current.since),
                "rows": counts.rows,
                "reloads": counts.reloads,
                "reloads that failed": counts.failed_reloads,
                "requests waiting": model.num_waiting,
                **age,
            },
            series=[
                Series(name="requests a second", value=self._num_requests, kind="rate"),
                Series(name="rows a second", value=counts.rows, kind="rate"),
            ],
        )
