"""A strategy is a job's [strategy] with attributes."""

import pytest

from protos.errors import UsageError
from ps_worker.fleet.strategy import DistributedStrategy
from ps_worker.job import override_job


def strategy_of(strategy: DistributedStrategy):
    return override_job({"strategy": strategy.section()}, [], source="test").strategy


def test_nothing_set_is_the_default_of_a_job() -> None:
    assert strategy_of(DistributedStrategy()) == override_job({}, [], source="test").strategy


def test_words_of_fleet_are_understood() -> None:
    strategy = DistributedStrategy()
    strategy.a_sync = True
    strategy.a_sync_configs = {"k_steps": 50}

    assert (strategy_of(strategy).mode, strategy_of(strategy).k_steps) == ("geo", 50)


def test_words_of_a_job_are_understood() -> None:
    strategy = DistributedStrategy(mode="bounded_staleness", max_staleness=3)

    assert strategy_of(strategy).mode == "bounded_staleness"
    assert strategy_of(strategy).max_staleness == 3


def test_misspelt_setting_is_refused_at_once() -> None:
    strategy = DistributedStrategy()

    with pytest.raises(UsageError, match="no 'a_sinc', did you mean 'a_sync'"):
        strategy.a_sinc = True
    with pytest.raises(UsageError, match="did you mean 'k_steps'"):
        DistributedStrategy(ksteps=1)
