"""The seam between the trainer and the store: when gradients leave and when parameters arrive.

    trainer thread: pull -> params -> (model) -> push        all modes
    communicator:   what these mean in one mode

The trainer hands over gradients as sums over examples (protos/gradients.py) and never waits on the store
itself.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from protos.gradients import Gradients, Values
from protos.keys import Keys
from protos.store import Future, Pulled, Version
from ps_worker.communicators.push_ids import UNNUMBERED, PushIds


class Communicator(Protocol):
    """One mode of training. Thread-safe where `is_lockstep` is False.

    Attributes:
        is_lockstep: The threads of a worker take each step together, and their gradients are pushed as one.
        is_overlapped: The next batch's pull may be asked for before this batch's push; after `begin`.
        version: Steps of synchronous training done; 0 in the asynchronous modes.
        push_ids: Numbers the worker's batches, in the order of its data.
    """

    @property
    def is_lockstep(self) -> bool: ...  # noqa: D102

    @property
    def is_overlapped(self) -> bool: ...  # noqa: D102

    @property
    def version(self) -> Version: ...  # noqa: D102

    @property
    def push_ids(self) -> PushIds: ...  # noqa: D102

    def begin(self, thread_num: int) -> None:
        """Called before batches are trained, with the number of threads."""
        ...

    def pull(self, keys: Mapping[str, Keys]) -> Future[Pulled]:
        """Asks for the embeddings of a batch's unique keys, by table."""
        ...

    def params(self) -> AbstractContextManager[Values]:
        """Lends the dense parameters, float32[P], which stay as they are while the context is open."""
        ...

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
        """Takes the gradients of a step; the arrays may be reused when it returns.

        Args:
            gradients: Sums over the examples of the step; finite, which training/non_finite.py sees to.
            examples: Their number.
            pulled: The version of the embeddings that the gradients were computed from; the oldest.
            numbers: Of the batches of the step, from `push_ids.take`.
            weight: Of a synchronous step, the sum of the weights of its examples, which its part counts in
                the mean; None: each has weight 1. In other modes the gradients say it themselves.
            next_keys: Those that the next `pull` is to ask for, so that modes in lockstep may ask with this
                push; then it may be acknowledged only when that pull is answered.

        Raises:
            CtrPsError: If this push failed, or an earlier one in the background.
        """
        ...

    def flush(self) -> None:
        """Returns when every gradient has been acknowledged; raises as `push` does."""
        ...

    def rejoin(self, version: Version) -> None:
        """Continues at `version`, after a barrier."""
        ...

    def close(self) -> None:
        """Stops what runs in the background, without sending anything more."""
        ...
