"""The loop of a heter trainer: join batches, train the dense part on them, push its gradient.

    next --batches--> parameters -> forward, backward -> answers -> push, synchronously as a part of the step
      |  --barrier--> come to it as well
      `--nothing----> who has left? Is the job still there?

As a part of a synchronous step it counts no examples: the parts of CPU trainers do, and the sum of all parts
is divided by those (ps_server/coordination/steps.py). Pushed on arrival, it is divided by its own number.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ctr_ps.protos.errors import AbortedError, CtrPsError
from ctr_ps.protos.gradients import DenseGrad, Gradients
from ctr_ps.protos.wire.heter import Attend
from ctr_ps.ps_worker.communicators.lockstep import HalfAsyncCommunicator
from ctr_ps.ps_worker.extras.heter.dense_part import DensePart
from ctr_ps.ps_worker.extras.heter.inbox import Inbox, Waiting
from ctr_ps.ps_worker.extras.heter.joining import Joined
from ctr_ps.ps_worker.job.model import DENSE_BLOCK

logger = logging.getLogger(__name__)

LOOK_S = 0.5
"""Without work it looks so often who has left, and whether the job has ended."""


@dataclass(slots=True)
class HeterProgress:
    """What a heter trainer has done.

    Attributes:
        examples: Trained on.
        batches: Of CPU trainers.
        steps: Forward and backward passes, each over batches that were joined.
    """

    examples: int = 0
    batches: int = 0
    steps: int = 0


class HeterTrainer:
    """Trains until all CPU trainers that it serves have left. For one thread."""

    def __init__(
        self,
        part: DensePart,
        communicator: HalfAsyncCommunicator,
        inbox: Inbox,
        *,
        come: Callable[[Attend], None],
        gone: Callable[[], Collection[int]],
    ) -> None:
        """Prepares to train.

        Args:
            part: Computes.
            communicator: How gradients leave and parameters arrive.
            inbox: The calls of CPU trainers.
            come: Comes to a barrier or an all-reduce, with nothing to bring.
            gone: Returns the workers that have left; raises AbortedError if the job has ended.
        """
        self.progress = HeterProgress()
        self._part = part
        self._communicator = communicator
        self._inbox = inbox
        self._come = come
        self._gone = gone

    def train(self, is_told_to_end: Callable[[], bool] = lambda: False) -> None:
        """Trains until those that it serves have left, or it is told to end.

        Raises:
            CtrPsError: What ends the job; calls that wait get it, too, and hear of any other error.
        """
        try:
            while not is_told_to_end():
                match self._inbox.next(LOOK_S):
                    case Joined(batches):
                        self._step(batches)
                    case Attend() as barrier:
                        self._come(barrier)
                    case None:
                        if not self._inbox.remove(self._gone()):
                            return
        except CtrPsError as error:
            self._inbox.fail(error)
            raise
        except Exception as error:  # of the user's module: any kind
            self._inbox.fail(
                AbortedError(f"a heter trainer failed: {type(error).__name__}: {error}")
            )
            raise

    def _step(self, batches: Sequence[Waiting]) -> None:
        with self._communicator.params() as params:
            grad, examples, answers = self._part.train(params, [each.batch for each in batches])
        for waiting, answer in zip(batches, answers, strict=True):
            waiting.answer.set_result(answer)  # before the push, which they need not wait for
        dense = {DENSE_BLOCK: DenseGrad(grad, examples)} if examples else {}
        self._communicator.push(
            Gradients(dense=dense), examples=0, pulled=self._communicator.pulled, numbers=()
        )
        self.progress.examples += examples
        self.progress.batches += len(batches)
        self.progress.steps += 1
