"""Half-asynchronous training: the threads of a worker step together, workers do not wait for each other.

    pull -> each thread computes a batch -> their mean is pushed and applied -> pull fresh parameters -> ...

As PaddlePaddle's half-async communicator. With one worker and one thread it is training without a cluster.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

from protos.gradients import Gradients, Values
from protos.keys import Keys
from protos.store import Future, Missing, Pulled, Store, Version
from ps_worker.communicators.push_ids import UNNUMBERED, PushIds
from ps_worker.communicators.step_params import StepParams


class HalfAsyncCommunicator:
    """The worker's side of half-asynchronous training: each push is applied before the next step begins."""

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
        """Asks for embeddings as they are now, and for the dense parameters with them."""
        self._params.ask()
        return self._store.pull_sparse(keys, missing=Missing.INITIAL)

    def params(self) -> AbstractContextManager[Values]:
        """Lends the parameters as they were when the step began."""
        self._params.ask()
        return self._params.lend()

    def push(
        self,
        gradients: Gradients,
        examples: int,
        *,
        pulled: Version,
        numbers: Sequence[int] = (UNNUMBERED,),
    ) -> None:
        """Pushes the step's gradients, and returns when they are applied."""
        push_id = self.push_ids.next(
            examples=examples, batches=len(numbers), pulled=pulled, whole=numbers
        )
        self._store.push_grad(gradients, push_id).result()
        self._params.forget()

    def flush(self) -> None:
        """Has nothing to do: each push was applied."""

    def rejoin(self, version: Version) -> None:
        """Reads dense parameters anew: other workers, or a checkpoint, may have changed them."""
        self._params.forget()

    def close(self) -> None:
        """Has nothing to do."""
