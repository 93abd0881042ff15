"""What an evaluation says about a model that has diverged."""

import numpy as np
import pytest

from protos.errors import GradientError
from protos.store import Store
from ps_server.store import ParameterStore
from ps_worker.job.specs import declare
from ps_worker.training.evaluation.evaluator import evaluate
from tests.support.training import job, random_batches, small_model


class DivergedStore:
    """A store whose dense parameters are not numbers."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str):
        return getattr(self._store, name)

    def pull_dense(self, into, *, at=None):
        answer = self._store.pull_dense(into, at=at)
        for vector in into.values():
            vector[:] = np.nan
        return answer


def test_model_that_has_diverged_is_an_error_of_ours() -> None:
    model, store = small_model(), ParameterStore()
    declare(store, model, job("async"))

    with pytest.raises(GradientError, match="diverged; lower the learning rate"):
        evaluate(DivergedStore(store), model, random_batches(1, 8, seed=1), batch_size=8)
