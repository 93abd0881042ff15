"""Modes and their settings, from the job file to the checkpoint and back."""

import json
from typing import Any, get_args

import pytest

from ctr_ps.protos.errors import JobError
from ctr_ps.protos.role import Members
from ctr_ps.ps_worker.job import Job, override_job
from ctr_ps.ps_worker.job.strategy import SETTINGS, Mode
from ctr_ps.ps_worker.run.plan import terms_of

MODES = get_args(Mode)
TABLES = {
    "async": {"max_merge_var_num": 2, "max_delay_ms": 5.0},
    "geo": {"k_steps": 7},
    "bounded_staleness": {"max_staleness": 3, "send_queue_size": 9},
}


def job_of(*overrides: str, **strategy: Any) -> Job:
    return override_job({"strategy": strategy}, overrides, source="job.toml")


def test_every_table_is_of_a_mode() -> None:
    assert SETTINGS.keys() <= set(MODES)
    assert SETTINGS.keys() == TABLES.keys()


@pytest.mark.parametrize("mode", MODES)
def test_tables_of_all_modes_go_with_every_mode(mode: str) -> None:
    job = job_of(mode=mode, **TABLES)

    assert job.strategy.async_.max_merge_var_num == 2
    assert job.strategy.geo.k_steps == 7
    assert job.strategy.bounded_staleness.max_staleness == 3
    assert job.strategy.bounded_staleness.max_merge_var_num == 1, "not of async"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("table", "setting", "value"),
    [
        ("geo", "k_steps", 0),
        ("geo", "max_replica_mb", 0),
        ("bounded_staleness", "max_staleness", -1),
        ("async", "send_queue_size", 0),
        ("async", "max_delay_ms", "soon"),
    ],
)
def test_value_out_of_range_is_refused_by_name_in_every_mode(
    mode: str, table: str, setting: str, value: object
) -> None:
    with pytest.raises(JobError, match=rf"strategy\.{table}\.{setting} is {value!r}: "):
        job_of(mode=mode, **{table: {setting: value}})


def test_worker_may_be_in_step_with_the_slowest() -> None:
    job = job_of(mode="bounded_staleness", bounded_staleness={"max_staleness": 0})

    assert job.strategy.bounded_staleness.max_staleness == 0


@pytest.mark.parametrize("mode", MODES)
def test_job_is_written_with_the_settings_of_its_mode_alone(mode: str) -> None:
    job = job_of(mode=mode, **TABLES)

    written = json.loads(job.to_json())

    assert written["strategy"].keys() == {"mode", *({mode} & TABLES.keys())}
    if mode in SETTINGS:  # those at their defaults, too: a later release may have others
        assert written["strategy"][mode].keys() == SETTINGS[mode].model_fields.keys()
    again = override_job(written, [], source="checkpoint")
    assert again.strategy.settings == job.strategy.settings
    assert again.to_json() == job.to_json()


@pytest.mark.parametrize("stored", MODES)
@pytest.mark.parametrize("asked", MODES)
def test_stored_job_takes_another_mode(stored: str, asked: str) -> None:
    written = json.loads(job_of(mode=stored).to_json())

    job = override_job(written, [f"strategy.mode={asked}"], source="checkpoint")

    assert job == job_of(mode=asked)


@pytest.mark.parametrize("mode", MODES)
def test_workers_agree_on_the_settings_of_their_mode_alone(mode: str) -> None:
    def terms(**tables: Any) -> dict[str, str]:
        return terms_of(job_of(mode=mode, **tables), Members(2, 0))

    assert terms() != terms(**{mode: TABLES[mode]}) if mode in TABLES else True
    others = {table: values for table, values in TABLES.items() if table != mode}
    assert terms() == terms(**others)


def test_term_of_a_setting_has_its_key() -> None:
    terms = terms_of(job_of(mode="geo", geo={"k_steps": 7}), Members(2, 0))

    assert terms["strategy.geo.k_steps"] == "7"
    assert terms["strategy.mode"] == '"geo"'
