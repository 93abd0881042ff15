"""Learning rates of a schedule, for lines of progress."""

import logging
from collections.abc import Callable, Mapping

from ctr_ps.protos.spec import OptimizerSpec
from ctr_ps.ps_server.optimizers.registry import Tuning

logger = logging.getLogger(__name__)


class LearningRates:
    """The learning rates of the optimizers with a schedule. For one thread at a time."""

    def __init__(
        self, optimizers: Mapping[str, OptimizerSpec], applied_batches: Callable[[], int]
    ) -> None:
        self._tunings = {
            name: Tuning(spec) for name, spec in optimizers.items() if spec.schedule is not None
        }
        self._applied_batches = applied_batches
        self._has_ended = False

    def shown(self) -> str:
        """Returns the current rates, to be appended to a line of progress; "" if none changes.

        Warns, once, of a batch trained at a rate of 0: the schedule has ended.
        """
        if not self._tunings:
            return ""
        batches = self._applied_batches()
        rates = {name: tuning.rate_at(batches) for name, tuning in self._tunings.items()}
        # The last batch of a schedule leaves its rate at 0, for a next one that may not come.
        ended = [
            name
            for name, tuning in self._tunings.items()
            if not rates[name] and not tuning.rate_at(batches - 1)
        ]
        if ended and not self._has_ended:
            self._has_ended = True
            logger.warning(
                "the learning rate of %s is 0 after %d batches of all workers, by its schedule: nothing more "
                "is learnt there; raise optimizer.schedule.total_steps, or set end_factor above 0",
                ", ".join(ended),
                batches,
            )
        return " rates=" + ",".join(f"{name}:{rate:.4g}" for name, rate in rates.items())
