"""Synchronous training: all workers take each step together.

    pull at version t -> compute -> push as a part of step t -> wait for version t + 1 -> ...

W workers of batch B learn what one worker of batch W * B learns, up to the order of float additions; on any
number of servers the same to the last bit.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

from protos.gradients import Gradients, Values
from protos.keys import Keys
from protos.store import Future, Missing, Pulled, Store, Version
from ps_worker.communicators.push_ids import UNNUMBERED, PushIds
from ps_worker.communicators.step_params import StepParams


class SyncCommunicator:
    """The worker's side of synchronous training; a step waits for the servers, never overlaps."""

    is_lockstep = True
    is_overlapped = False

    def __init__(self, store: Store, *, worker: int, num_params: int) -> None:
        self._store = store
        self.push_ids = PushIds(worker)
        self._params = StepParams(store, num_params)
        self.version: Version = 0

    def begin(self, thread_num: int) -> None:
        """Has nothing to do: any number of threads may train."""

    def pull(self, keys: Mapping[str, Keys]) -> Future[Pulled]:
        """Asks for embeddings as of this step, and for the dense parameters with them."""
        self._params.ask(at=self.version)
        return self._store.pull_sparse(keys, missing=Missing.INITIAL, at=self.version)

    def params(self) -> AbstractContextManager[Values]:
        """Lends the parameters as of this step."""
        self._params.ask(at=self.version)
        return self._params.lend()

    def push(
        self,
        gradients: Gradients,
        examples: int,
        *,
        pulled: Version,
        numbers: Sequence[int] = (UNNUMBERED,),
    ) -> None:
        """Pushes this worker's part of the step and goes on to the next."""
        push_id = self.push_ids.next(
            examples=examples, batches=len(numbers), pulled=pulled, whole=numbers
        )
        self._store.push_grad(gradients, push_id, at=self.version).result()
        self._params.forget()
        self.version += 1

    def flush(self) -> None:
        """Has nothing to do: each push was acknowledged."""

    def rejoin(self, version: Version) -> None:
        """Goes on at `version`, after a barrier."""
        self._params.forget()
        self.version = version

    def close(self) -> None:
        """Has nothing to do."""
