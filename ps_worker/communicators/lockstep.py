"""Training in lockstep: threads of a worker take each step together, and it is applied before the next.

    pull -> each thread computes a batch -> their sum is pushed -> pull fresh parameters -> ...
                                            `--one thread: in one call to each server--'

    sync         all workers share the steps:   pull at version t, push as a part of step t, wait for t + 1
    half_async   each worker has its own steps: pull what is there, push to be applied on arrival

Synchronous: W workers of batch B learn what one worker of batch W * B learns, up to the order of float
additions; on any number of servers the same to the last bit. Half-asynchronous: as PaddlePaddle's
communicator of that name; with one worker and one thread it is training without a cluster.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from ctr_ps.protos.gradients import Values
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.store import Future, Member, Missing, Parameters, Pulled, Version
from ctr_ps.ps_worker.communicators.communicator import Communicator, StepPush
from ctr_ps.ps_worker.job.model import DENSE_BLOCK


class HalfAsyncCommunicator(Communicator):
    """Half-asynchronous training: each push is applied before the next step begins.

    `pulled` is the version of the dense parameters last lent by `params`.
    """

    is_lockstep = True
    _has_common_steps = False

    def __init__(self, store: Parameters, *, member: Member, num_params: int) -> None:
        super().__init__(member)
        self._store = store
        self.pulled: Version = 0
        self._params = np.empty(num_params, np.float32)
        self._lock = threading.Lock()
        self._asked: Future[Version] | None = None  # for the dense parameters of this step
        self._has_params = False
        # Keys pulled with the last push, and their rows.
        self._ahead: tuple[Mapping[str, Keys], Future[Pulled]] | None = None

    @property
    def _step(self) -> Version | None:
        """The step of pulls and pushes; None: no common steps."""
        return self.version if self._has_common_steps else None

    def pull(self, keys: Mapping[str, Keys]) -> Future[Pulled]:
        """Requests the embeddings of this step, and the dense parameters with them."""
        if (ahead := self._take_ahead()) is not None:
            asked_for, rows = ahead
            if asked_for is keys:
                return rows
            rows.result()  # other keys: the push must be acknowledged nevertheless
        self._ask()
        return self._store.pull_sparse(keys, missing=Missing.INITIAL, at=self._step)

    @contextmanager
    def params(self) -> Iterator[Values]:
        """Lends the dense parameters of this step, which its threads share."""
        self._ask()
        with self._lock:  # the first thread waits for all
            if not self._has_params and self._asked is not None:
                self.pulled = self._asked.result()
                self._has_params = True
        yield self._params

    def push(self, step: StepPush) -> None:
        """Pushes the step's gradients; returns when the servers have them, or `next_keys` are requested."""
        push_id = self.push_ids.next(
            examples=step.examples,
            batches=len(step.numbers),
            pulled=step.pulled,
            whole=step.numbers,
            weight=step.weight,
        )
        if step.next_keys is None:
            self._store.push_grad(step.gradients, push_id, at=self._step).result()
            self._forget()
        else:
            rows, params = self._store.push_pull(
                step.gradients, push_id, keys=step.next_keys, into=self._into(), at=self._step
            )
            with self._lock:
                self._ahead = step.next_keys, rows
                self._asked, self._has_params = params, False
        self.version += self._has_common_steps

    def flush(self) -> None:
        """Returns when the last push is acknowledged; rows pulled with it are kept."""
        with self._lock:
            ahead = self._ahead
        if ahead is not None:
            ahead[1].result()

    def rejoin(self, version: Version) -> None:
        """Reads parameters again: other workers, or a checkpoint, may have changed them."""
        self._take_ahead()
        self._forget()
        if self._has_common_steps:
            self.version = version

    def _ask(self) -> None:
        """Requests the dense parameters, unless another thread of this step has, or there are none."""
        with self._lock:
            if self._asked is None and self._params.size:
                self._asked = self._store.pull_dense(self._into(), at=self._step)
                self._has_params = False

    def _into(self) -> dict[str, Values]:
        return {DENSE_BLOCK: self._params} if self._params.size else {}

    def _take_ahead(self) -> tuple[Mapping[str, Keys], Future[Pulled]] | None:
        """Returns the pull that came with the last push, if any, and forgets it."""
        with self._lock:
            ahead, self._ahead = self._ahead, None
        return ahead

    def _forget(self) -> None:
        """Makes the next step pull again; no thread has the parameters on loan."""
        with self._lock:
            self._asked = None


class SyncCommunicator(HalfAsyncCommunicator):
    """Synchronous training: all workers take every step together, and a pull waits for the last one."""

    _has_common_steps = True
