"""Training on a store in the same process: each thread pulls, computes and pushes in turn.

With several threads this is asynchronous training without a network, as in Hogwild (Recht, Re, Wright, Niu,
NIPS 2011), but no update is lost: tables and dense blocks lock what they change.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from ctr_ps.protos.gradients import Gradients, Values
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.store import Future, Member, Missing, Parameters, Pulled, Version
from ctr_ps.ps_worker.communicators.communicator import Communicator
from ctr_ps.ps_worker.communicators.push_ids import UNNUMBERED
from ctr_ps.ps_worker.job.model import DENSE_BLOCK


class DirectCommunicator(Communicator):
    """Each push is applied before it returns. Thread-safe."""

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

    def push(
        self,
        gradients: Gradients,
        examples: int,
        *,
        pulled: Version,
        numbers: Sequence[int] = (UNNUMBERED,),
        weight: float | None = None,
        next_keys: Mapping[str, Keys] | None = None,
    ) -> None:
        push_id = self.push_ids.next(
            examples=examples, batches=len(numbers), pulled=pulled, whole=numbers
        )
        self._store.push_grad(gradients, push_id).result()
