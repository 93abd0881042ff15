"""The seam between the trainer and the store: when gradients leave and when parameters arrive.

    trainer thread: pull -> params -> (model) -> push        all modes
    communicator:   what these mean in one mode

The trainer passes gradients as sums over examples (protos/gradients.py) and never waits on the store itself.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import numpy as np

from ctr_ps.protos.errors import ProtocolError, WaitTimeoutError
from ctr_ps.protos.gradients import Gradients, Values
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.store import Future, Member, Missing, Parameters, Pulled, Version
from ctr_ps.ps_worker.communicators.push_ids import UNNUMBERED, PushIds
from ctr_ps.ps_worker.job.model import DENSE_BLOCK


@dataclass(frozen=True, slots=True)
class StepPush:
    """What a trainer pushes after a step."""

    gradients: Gradients  # sums over the examples of the step; finite (training/non_finite.py)
    examples: int
    pulled: Version  # the oldest one of the embeddings that the gradients were computed from
    numbers: Sequence[int] = (UNNUMBERED,)  # of the step's batches, from `push_ids.take`
    # in synchronous training, sum of the weights of its examples, by which its part counts in the
    # mean; None: each has weight 1. In other modes the gradients contain it
    weight: float | None = None
    # keys of the next `pull`, so that modes in lockstep may pull with this push; both may then be
    # acknowledged together
    next_keys: Mapping[str, Keys] | None = None


class Communicator(ABC):
    """One mode of training; what is not said here it does at once. Thread-safe unless `is_lockstep`."""

    # the threads of a worker take each step together, and their gradients are pushed as one
    is_lockstep = False
    is_overlapped = False  # the next batch may be pulled before this one is pushed; after `begin`
    version: Version = 0  # steps of synchronous training done; 0 in the asynchronous modes

    def __init__(self, member: Member) -> None:
        """Numbers batches from 0; `member` is this process, in its worker's place."""
        self.push_ids = PushIds(member)  # numbers the worker's batches, in the order of its data

    def begin(self, thread_num: int) -> None:  # noqa: B027
        """Called with the number of threads before training."""

    @abstractmethod
    def pull(self, keys: Mapping[str, Keys]) -> Future[Pulled]:
        """Requests the embeddings of a batch's unique keys, by table."""

    @abstractmethod
    def params(self) -> AbstractContextManager[Values]:
        """Lends the dense parameters, float32[P], which do not change while the context is open."""

    @abstractmethod
    def push(self, step: StepPush) -> None:
        """Takes the gradients of a step; its arrays may be reused when it returns.

        Raises CtrPsError if this push failed, or an earlier one in the background.
        """

    def flush(self) -> None:  # noqa: B027
        """Returns when every gradient is acknowledged; raises as `push` does."""

    def let_others_begin(self) -> None:  # noqa: B027
        """Has no worker wait for the first batches of this one, which has no rows now."""

    def rejoin(self, version: Version) -> None:  # noqa: B027
        """Continues at `version`, after a barrier."""

    def close(self) -> None:  # noqa: B027
        """Stops background threads without sending anything more."""


class DirectCommunicator(Communicator):
    """Each push is applied before it returns: training on a store in the same process. Thread-safe.

    With several threads this is asynchronous training without a network, as in Hogwild (Recht, Re, Wright,
    Niu, NIPS 2011), but no update is lost: tables and dense blocks lock what they change.
    """

    def __init__(self, store: Parameters, *, member: Member, num_params: int) -> None:
        super().__init__(member)
        self._store = store
        self._num_params = num_params
        self._local = threading.local()

    def pull(self, keys: Mapping[str, Keys]) -> Future[Pulled]:
        return self._store.pull_sparse(keys, missing=Missing.INITIAL)

    @contextmanager
    def params(self) -> Iterator[Values]:
        """Lends this thread's own fresh copy."""
        if not hasattr(self._local, "params"):
            self._local.params = np.empty(self._num_params, np.float32)
        self._store.pull_dense({DENSE_BLOCK: self._local.params}).result()
        yield self._local.params

    def push(self, step: StepPush) -> None:
        push_id = self.push_ids.next(
            examples=step.examples,
            batches=len(step.numbers),
            pulled=step.pulled,
            whole=step.numbers,
        )
        self._store.push_grad(step.gradients, push_id).result()


class Background:
    """Threads that send and receive while others train, with one condition and the first error of any."""

    def __init__(self, *, stall_limit_s: float, stalled: str) -> None:
        # held while shared state is read or written; notified on changes
        self.changed = threading.Condition()
        self.is_closed = False  # the threads must end
        self._stall_limit_s = stall_limit_s
        self._stalled = stalled
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []

    def start(self, name: str, work: Callable[[], None]) -> None:
        """Runs `work` in a thread; the next call of a training thread raises its error."""

        def run() -> None:
            try:
                work()
            except BaseException as error:
                with self.changed:
                    self._error = self._error or error
                    self.changed.notify_all()

        thread = threading.Thread(target=run, name=f"communicator-{name}", daemon=True)
        thread.start()
        self._threads.append(thread)

    def require_health(self) -> None:
        """Raises the first error of the background threads, if any."""
        if self._error is not None:
            raise self._error

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits until another thread makes `condition` true; the caller holds `changed`.

        Raises the first error of the background threads, or WaitTimeoutError at the limit.
        """
        arrived = self.changed.wait_for(
            lambda: self._error is not None or condition(), self._stall_limit_s
        )
        self.require_health()
        if not arrived:
            raise WaitTimeoutError(
                f"{self._stalled} within {self._stall_limit_s:g} s; see the logs of the servers"
            )

    def close(self) -> None:
        """Stops the threads; waiting threads get an error."""
        with self.changed:
            self.is_closed = True
            self._error = self._error or ProtocolError("the communicator is closed: make a new one")
            self.changed.notify_all()
        for thread in self._threads:
            thread.join()
