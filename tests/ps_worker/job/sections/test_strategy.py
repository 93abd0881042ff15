"""Modes and their settings, from the job file to the checkpoint and back."""

import json
from typing import Any, get_args

import pytest

from protos.errors import JobError
from ps_worker.job import Job, override_job, stored_job
from ps_worker.job.sections.strategy import SETTINGS, Mode, StrategySection

MODES = get_args(Mode)
ALL_SETTINGS = sorted(StrategySection.model_fields.keys() - {"mode"})
DEFAULTS = {name: StrategySection.model_fields[name].default for name in ALL_SETTINGS}


def job_of(*overrides: str, **strategy: Any) -> Job:
    return override_job({"strategy": strategy}, overrides, source="job.toml")


def test_every_mode_has_its_settings_and_every_setting_its_modes() -> None:
    assert tuple(SETTINGS) == MODES
    assert sorted(set().union(*SETTINGS.values())) == ALL_SETTINGS


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("setting", ALL_SETTINGS)
def test_setting_counts_as_given_even_at_its_default(mode: str, setting: str) -> None:
    given = {"mode": mode, setting: DEFAULTS[setting]}

    if setting in SETTINGS[mode]:
        assert getattr(job_of(**given).strategy, setting) == DEFAULTS[setting]
    else:
        with pytest.raises(JobError, match=rf"strategy\.{setting} is .*, but mode is \"{mode}\""):
            job_of(**given)


def test_setting_without_use_says_both_ways_out() -> None:
    with pytest.raises(JobError) as caught:
        job_of(k_steps=100)

    assert str(caught.value) == (
        'job.toml: strategy.k_steps is 100, but mode is "async": set strategy.mode = "geo", or remove '
        "k_steps"
    )


def test_all_settings_without_use_are_named_at_once() -> None:
    with pytest.raises(JobError) as caught:
        job_of("strategy.mode=sync", max_delay_ms=5, send_queue_size=4)

    for setting in ("max_delay_ms", "send_queue_size"):
        assert f'set strategy.mode = "async" or "bounded_staleness", or remove {setting}' in str(
            caught.value
        )


@pytest.mark.parametrize(
    ("mode", "setting", "value"),
    [
        ("geo", "k_steps", 0),
        ("geo", "max_replica_mb", 0),
        ("bounded_staleness", "max_staleness", -1),
        ("async", "send_queue_size", 0),
        ("async", "max_delay_ms", "soon"),
    ],
)
def test_value_out_of_range_is_refused_by_name(mode: str, setting: str, value: object) -> None:
    with pytest.raises(JobError, match=rf"strategy\.{setting} is {value!r}: "):
        job_of(mode=mode, **{setting: value})


def test_worker_may_be_in_step_with_the_slowest() -> None:
    assert job_of(mode="bounded_staleness", max_staleness=0).strategy.max_staleness == 0


@pytest.mark.parametrize("mode", MODES)
def test_job_is_written_with_the_settings_of_its_mode_alone(mode: str) -> None:
    job = job_of(mode=mode)

    written = json.loads(job.to_json())

    assert written["strategy"].keys() == {"mode", *SETTINGS[mode]}
    assert override_job(written, [], source="checkpoint") == job
    assert stored_job(written, [], source="checkpoint") == job


@pytest.mark.parametrize("stored", MODES)
@pytest.mark.parametrize("asked", MODES)
def test_stored_job_takes_another_mode(stored: str, asked: str) -> None:
    written = json.loads(job_of(mode=stored).to_json())

    job = stored_job(written, [f"strategy.mode={asked}"], source="checkpoint")

    assert job == job_of(mode=asked)


def test_stored_settings_of_both_modes_stay() -> None:
    written = json.loads(job_of(mode="async", max_delay_ms=5).to_json())

    job = stored_job(written, ["strategy.mode=bounded_staleness"], source="checkpoint")

    assert job.strategy.max_delay_ms == 5


def test_job_stored_with_all_defaults_filled_in_loads() -> None:
    written = {"strategy": {"mode": "sync", **DEFAULTS}}

    assert stored_job(written, [], source="checkpoint") == job_of(mode="sync")


def test_override_without_use_is_refused_over_a_stored_job_too() -> None:
    written = json.loads(job_of(mode="async").to_json())

    with pytest.raises(JobError, match=r"strategy\.k_steps is 7, but mode is \"async\""):
        stored_job(written, ["strategy.k_steps=7"], source="checkpoint")


def test_unknown_mode_over_a_stored_job_is_refused_by_name() -> None:
    written = json.loads(job_of(mode="async").to_json())

    with pytest.raises(JobError, match=r"strategy\.mode is 'asink', did you mean 'async'"):
        stored_job(written, ["strategy.mode=asink"], source="checkpoint")
