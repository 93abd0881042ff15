"""The validations of a run so far: which one is the best, and whether training is to stop."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from protos.store import Numbers
from ps_worker.checkpoints.run_state import Validation
from ps_worker.run.plan import Plan
from ps_worker.training.evaluation.early_stopping import EarlyStopping


class Validations:
    """Validations in their order; each worker has those since its start, worker 0 a resumed run's as well.

    For one thread.
    """

    def __init__(self, plan: Plan) -> None:
        """There are none yet."""
        settings = plan.job.valid
        self._is_on = bool(plan.valid_files)
        self._rule = EarlyStopping(metric=settings.metric, patience=settings.patience)
        self._best: Validation | None = None
        self._all: list[Validation] = []

    def __iter__(self) -> Iterator[Validation]:
        return iter(self._all)

    @property
    def best(self) -> Validation | None:
        """The best validation so far; None: none, or it was of a resumed run and this is not worker 0."""
        return self._best

    @property
    def is_over(self) -> bool:
        """Whether training is to stop, as validations get no better."""
        return self._is_on and self._rule.is_over

    def is_better(self, validation: Validation) -> bool:
        """Whether a validation is better than all before it."""
        return self._rule.is_better(**_compared(validation))

    def add(self, validation: Validation) -> None:
        """Counts a validation."""
        if self.is_better(validation):
            self._best = validation
        self._rule = self._rule.after(**_compared(validation))
        self._all.append(validation)

    def told_of(self, validations: Sequence[Validation]) -> Numbers:
        """Returns what worker 0 tells the others of a resumed run's validations, for `resume`: float64[3].

        Of none it is what leaves a maximum with those of another worker as they are.
        """
        rule = self._rule
        for each in validations:
            rule = rule.after(**_compared(each))
        return np.array([len(validations), rule.best, rule.waits], np.float64)

    def resume(self, told: Numbers, validations: Sequence[Validation]) -> None:
        """Goes on from a resumed run's validations.

        Args:
            told: See `told_of`.
            validations: Known on worker 0: those told of, and perhaps later ones.
        """
        number, best, waits = told.tolist()
        for each in validations[: int(number)]:
            self.add(each)
        self._rule = replace(self._rule, best=best, waits=int(waits))

    def as_dicts(self) -> list[dict[str, Any]]:
        """Returns the validations for a summary."""
        return [asdict(each) for each in self._all]


def _compared(validation: Validation) -> dict[str, float]:
    """Returns the figures that tell which of two validations is better; nan is never better."""
    auc, log_loss = validation.auc, validation.log_loss
    return {
        "auc": math.nan if auc is None else auc,
        "log_loss": math.nan if log_loss is None else log_loss,
    }
