"""Modes and their settings, from the job file to the checkpoint and back."""

import json
from typing import Any, get_args

import pytest

from ctr_ps.protos.errors import JobError
from ctr_ps.protos.role import Members
from ctr_ps.ps_worker.job import Job, override_job
from ctr_ps.ps_worker.job.sections import TrainSection
from ctr_ps.ps_worker.job.strategy import (
    IGNORED,
    SETTINGS,
    FleetWordError,
    Mode,
    aliases_of,
    translated,
)
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


def test_workers_agree_on_all_settings_of_training_but_how_often_they_log() -> None:
    terms = terms_of(Job(), Members(2, 0))

    assert {f"train.{key}" for key in TrainSection.model_fields} - terms.keys() == {
        "train.log_every_s"
    }


def test_term_of_a_setting_has_its_key() -> None:
    terms = terms_of(job_of(mode="geo", geo={"k_steps": 7}), Members(2, 0))

    assert terms["strategy.geo.k_steps"] == "7"
    assert terms["strategy.mode"] == '"geo"'


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({}, {}),
        ({"mode": "geo", "geo": {"k_steps": 3}}, {"mode": "geo", "geo": {"k_steps": 3}}),
        ({"a_sync": False}, {"mode": "sync"}),
        ({"a_sync": True}, {"mode": "async"}),
        ({"a_sync": True, "a_sync_configs": {"k_steps": -1}}, {"mode": "async"}),
        ({"a_sync": True, "a_sync_configs": {"k_steps": 0}}, {"mode": "async"}),
        (
            {"a_sync": True, "a_sync_configs": {"k_steps": 9}},
            {"mode": "geo", "geo": {"k_steps": 9}},
        ),
        ({"a_sync_configs": {"k_steps": 9}}, {"mode": "geo", "geo": {"k_steps": 9}}),
        ({"a_sync": False, "a_sync_configs": {"k_steps": 0}}, {"mode": "sync"}),
        (
            {"a_sync": True, "a_sync_configs": {"max_merge_var_num": 2, "send_queue_size": 3}},
            {"mode": "async", "async": {"max_merge_var_num": 2, "send_queue_size": 3}},
        ),
        (
            {
                "a_sync_configs": {"send_queue_size": 3},
                "async": {"max_delay_ms": 5},
                "geo": {"k_steps": 2},
            },
            {
                "mode": "async",
                "async": {"max_delay_ms": 5, "send_queue_size": 3},
                "geo": {"k_steps": 2},
            },
        ),
        ({"a_sync": True, "mode": "half_async"}, {"mode": "half_async"}),
        ({"a_sync": False, "mode": "sync"}, {"mode": "sync"}),
        ({"mode": "sync", "a_sync_configs": {"k_steps": 0}}, {"mode": "sync"}),
        (
            {"mode": "bounded_staleness", "a_sync_configs": {"send_queue_size": 2}},
            {"mode": "bounded_staleness", "bounded_staleness": {"send_queue_size": 2}},
        ),
    ],
    ids=str,
)
def test_words_mean_what_they_mean_in_fleet(
    words: dict[str, Any], expected: dict[str, Any]
) -> None:
    before = str(words)

    assert translated(words) == expected
    assert str(words) == before


@pytest.mark.parametrize("name", IGNORED)
def test_word_without_an_effect_is_accepted_in_every_mode_and_said(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    for mode in MODES:
        job = override_job({"strategy": {"mode": mode}}, [], source="job")

        assert (
            override_job({"strategy": {"mode": mode, name: IGNORED[name]}}, [], source="job") == job
        )
        assert translated({"mode": mode, "a_sync_configs": {name: IGNORED[name]}}) == {"mode": mode}
        assert not caplog.messages

        assert translated({"mode": mode, "a_sync_configs": {name: 7}}) == {"mode": mode}
        assert translated({"mode": mode, name: 8}) == {"mode": mode}
        first, second = caplog.messages
        assert f"strategy.a_sync_configs.{name} is 7, ignored" in first
        assert f"strategy.{name} is 8, ignored" in second
        caplog.clear()


@pytest.mark.parametrize(
    ("words", "key", "message"),
    [
        ({"a_sync": "half"}, "a_sync", "is 'half', expected true or false"),
        ({"a_sync": True, "mode": "sync"}, "a_sync", "is True, but mode is 'sync'"),
        ({"a_sync": False, "mode": "geo"}, "a_sync", "is False, but mode is 'geo'"),
        ({"a_sync_configs": 3}, "a_sync_configs", "is 3, expected options by name"),
        ({"a_sync_configs": {"k_step": 3}}, "a_sync_configs.k_step", "did you mean 'k_steps'"),
        ({"a_sync_configs": {"k_steps": "3"}}, "a_sync_configs.k_steps", "expected a whole number"),
        ({"a_sync_configs": {"k_steps": True}}, "a_sync_configs.k_steps", "a whole number"),
        (
            {"mode": "geo", "a_sync_configs": {"k_steps": 0}},
            "a_sync_configs.k_steps",
            "is 0, but mode is 'geo'",
        ),
        (
            {"mode": "async", "a_sync_configs": {"k_steps": 5}},
            "a_sync_configs.k_steps",
            "is 5, but mode 'async' does not use it",
        ),
        (
            {"a_sync_configs": {"k_steps": 5, "max_merge_var_num": 2}},
            "a_sync_configs.max_merge_var_num",
            "is 2, but mode 'geo' does not use it: remove it",
        ),
        (
            {"a_sync": False, "a_sync_configs": {"send_queue_size": 2}},
            "a_sync_configs.send_queue_size",
            "is 2, but mode 'sync' does not use it: remove it",
        ),
        (
            {"async": {"send_queue_size": 1}, "a_sync_configs": {"send_queue_size": 2}},
            "a_sync_configs.send_queue_size",
            "is given as strategy.async.send_queue_size too",
        ),
        (
            {"a_sync_configs": {"use_ps_gpu": 1}},
            "a_sync_configs.use_ps_gpu",
            "is unknown, known: k_steps, max_merge_var_num, send_queue_size, independent_recv_thread",
        ),
    ],
    ids=str,
)
def test_word_that_cannot_be_translated_is_refused(
    words: dict[str, Any], key: str, message: str
) -> None:
    with pytest.raises(FleetWordError) as caught:
        translated(words)

    assert ".".join(caught.value.key) == f"strategy.{key}"
    assert str(caught.value).startswith(f"strategy.{key} ")
    assert message in str(caught.value)


def test_unknown_mode_is_left_to_the_job() -> None:
    words = {"mode": "asink", "a_sync_configs": {"max_merge_var_num": 2}}

    with pytest.raises(JobError, match=r"strategy\.mode is 'asink', did you mean 'async'"):
        override_job({"strategy": words}, [], source="job")


def test_job_in_fleets_words_is_the_job_in_ours() -> None:
    fleet = override_job(
        {"strategy": {"a_sync": True}}, ["strategy.a_sync_configs.k_steps=7"], source="job"
    )
    ours = override_job({"strategy": {"mode": "geo", "geo": {"k_steps": 7}}}, [], source="job")

    assert fleet == ours
    assert fleet.to_json() == ours.to_json()


def test_wrong_value_is_told_where_it_was_written() -> None:
    with pytest.raises(JobError, match=r"strategy\.a_sync_configs\.send_queue_size is 0: "):
        override_job({"strategy": {"a_sync_configs": {"send_queue_size": 0}}}, [], source="job")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({}, {}),
        ({"a_sync": True}, {"mode": "a_sync"}),
        ({"a_sync": True, "mode": "geo"}, {}),
        ({"a_sync_configs": {"k_steps": 1}}, {"geo.k_steps": "a_sync_configs.k_steps"}),
    ],
    ids=str,
)
def test_translated_word_is_found_where_it_was_written(
    words: dict[str, Any], expected: dict[str, str]
) -> None:
    found = aliases_of(words, translated(words).get("mode", ""))
    aliases = {".".join(name): ".".join(written) for name, written in found.items()}

    assert aliases == {
        f"strategy.{name}": f"strategy.{written}" for name, written in expected.items()
    }


@pytest.mark.parametrize("mode", ["sync", "half_async"])
def test_table_of_a_mode_without_settings_is_refused(mode: str) -> None:
    fault = f"strategy.{mode} does not exist: mode '{mode}' has no settings; modes with settings are .* geo"
    with pytest.raises(FleetWordError, match=fault):
        translated({"mode": mode, mode: {"wire_dtype": "bfloat16"}})
