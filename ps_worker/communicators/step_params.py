"""The dense parameters of one step in lockstep: asked for once, with the embeddings, read by all threads."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from protos.gradients import Values
from protos.store import Future, Store, Version
from ps_worker.communicators.communicator import DENSE_BLOCK


class StepParams:
    """One flat vector, read anew for each step. Thread-safe."""

    def __init__(self, store: Store, num_params: int) -> None:
        self._store = store
        self._params = np.empty(num_params, np.float32)
        self._lock = threading.Lock()
        self._answer: Future[Version] | None = None
        self._is_here = False

    def ask(self, at: Version | None = None) -> None:
        """Asks for the parameters, unless another thread of this step has."""
        with self._lock:
            if self._answer is None:
                self._answer = self._store.pull_dense({DENSE_BLOCK: self._params}, at=at)
                self._is_here = False

    @contextmanager
    def lend(self) -> Iterator[Values]:
        """Lends the parameters that were asked for."""
        with self._lock:  # the first thread waits for all
            if not self._is_here and self._answer is not None:
                self._answer.result()
                self._is_here = True
        yield self._params

    def forget(self) -> None:
        """Lets the next `ask` read anew; nobody has the parameters on loan any more."""
        with self._lock:
            self._answer = None
