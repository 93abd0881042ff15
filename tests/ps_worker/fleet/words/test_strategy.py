"""A strategy is a job's [strategy] with attributes."""

import pytest

from ctr_ps.protos.errors import UsageError
from ctr_ps.ps_worker.fleet.words.strategy import DistributedStrategy
from ctr_ps.ps_worker.job import override_job


def strategy_of(strategy: DistributedStrategy):
    return override_job({"strategy": strategy.section()}, [], source="test").strategy


def test_nothing_set_is_the_default_of_a_job() -> None:
    assert strategy_of(DistributedStrategy()) == override_job({}, [], source="test").strategy


def test_words_of_fleet_are_understood() -> None:
    strategy = DistributedStrategy()
    strategy.a_sync = True
    strategy.a_sync_configs = {"k_steps": 50}

    assert (strategy_of(strategy).mode, strategy_of(strategy).geo.k_steps) == ("geo", 50)


def test_words_of_a_job_are_understood() -> None:
    strategy = DistributedStrategy(mode="bounded_staleness")
    strategy.bounded_staleness = {"max_staleness": 3}
    strategy.async_ = {"send_queue_size": 2}

    assert strategy_of(strategy).mode == "bounded_staleness"
    assert strategy_of(strategy).bounded_staleness.max_staleness == 3
    assert strategy_of(strategy).async_.send_queue_size == 2


def test_misspelt_setting_is_refused_at_once() -> None:
    strategy = DistributedStrategy()

    with pytest.raises(UsageError, match="no 'a_sinc', did you mean 'a_sync'"):
        strategy.a_sinc = True
    with pytest.raises(UsageError, match=r"no 'k_steps', set geo = {'k_steps': 9}"):
        DistributedStrategy(k_steps=9)
    with pytest.raises(UsageError, match=r"set async_ or bounded_staleness = {'max_delay_ms': 9}"):
        strategy.maxdelay_ms = 9


def test_name_that_is_like_no_other_suggests_none() -> None:
    names = (
        "it has mode, async_, geo, bounded_staleness, a_sync, a_sync_configs; leave out Paddle's"
    )

    for name in ("turbo", "amp", "recompute_configs"):
        with pytest.raises(UsageError, match=f"no '{name}': {names}"):
            setattr(DistributedStrategy(), name, True)


def test_wrong_option_of_a_sync_configs_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match=r"strategy\.a_sync_configs.*did you mean 'k_steps'"):
        DistributedStrategy().a_sync_configs = {"k_step": 9}


def test_launch_barrier_says_what_happens_anyway(caplog: pytest.LogCaptureFixture) -> None:
    for wanted in (True, False):
        strategy = DistributedStrategy(a_sync=True, a_sync_configs={"launch_barrier": wanted})
        assert strategy_of(strategy).mode == "async"
        assert ("launch_barrier is False, ignored" in caplog.text) is not wanted
