"""The optimizers of a script are those of the servers."""

import pytest

from protos.errors import UsageError
from ps_server.optimizers.registry import OPTIMIZERS
from ps_worker.fleet import optimizer

ADDS_ONLY = "sum"  # of metrics and deltas, no optimizer to train with


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - {ADDS_ONLY}))
def test_every_optimizer_has_its_class(name: str) -> None:
    assert OPTIMIZERS[name].hyper in vars(optimizer).values()


def test_arguments_are_hyper_parameters_and_the_rate_comes_first() -> None:
    chosen = optimizer.choice_of(optimizer.Adam(0.01, epsilon=1e-6))

    assert chosen == {
        "name": "adam",
        "learning_rate": 0.01,
        "beta1": 0.9,
        "beta2": 0.999,
        "epsilon": 1e-6,
    }


@pytest.mark.parametrize("wrong", [0.02, "adam", optimizer.Adam, (0.001, 0.9, 0.999, 1e-8)])
def test_what_is_no_optimizer_is_refused(wrong: object) -> None:
    with pytest.raises(UsageError, match=r"is no optimizer: write fleet\.optimizer\."):
        optimizer.choice_of(wrong)
