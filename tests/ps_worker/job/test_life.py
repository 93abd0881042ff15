"""`[life]`: which table gets which."""

import json

import pytest

from ctr_ps.protos.errors import JobError
from ctr_ps.protos.spec import AdmissionSpec, ExpirySpec, StatisticsSpec
from ctr_ps.ps_worker.job import Job, override_job


def job(**life: object) -> Job:
    return override_job({"life": life}, [], source="job")


def test_rows_count_nothing_unless_somebody_asks() -> None:
    life = job(decay=0.5, evict="score").life.of_table("wide")

    assert life.statistics_spec() is None
    assert life.expiry_spec() is None


@pytest.mark.parametrize(
    "rule", ["delete_threshold", "max_unseen", "ttl_s", "max_rows", "max_bytes"]
)
def test_rule_has_rows_count_what_it_needs(rule: str) -> None:
    life = job(**{rule: 3}).life.of_table("wide")

    assert life.statistics_spec() == StatisticsSpec()
    assert life.expiry_spec() == ExpirySpec(**{rule: 3})


def test_statistics_alone_remove_nothing() -> None:
    life = job(statistics=True, decay=0.5, click_coeff=2).life.of_table("wide")

    assert life.statistics_spec() == StatisticsSpec(decay=0.5, click_coeff=2.0)
    assert life.expiry_spec() is None


def test_table_takes_what_it_does_not_say_from_all_tables() -> None:
    life = job(max_unseen=7, decay=0.9, tables={"wide": {"max_unseen": 0, "max_rows": 9}}).life

    assert life.of_table("wide").expiry_spec() == ExpirySpec(max_rows=9)
    assert life.of_table("wide").statistics_spec() == StatisticsSpec(decay=0.9)
    assert life.of_table("deep").expiry_spec() == ExpirySpec(max_unseen=7)


def test_admission_has_rows_count() -> None:
    life = job(admission={"policy": "count", "threshold": 3}).life.of_table("wide")

    assert life.admission.spec() == AdmissionSpec(policy="count", threshold=3.0)
    assert life.statistics_spec() == StatisticsSpec()
    assert life.expiry_spec() is None


def test_admission_of_a_table_takes_the_place_of_that_of_all() -> None:
    life = job(
        admission={"policy": "count", "threshold": 3},
        tables={
            "wide": {"admission": {}},
            "deep": {"admission": {"policy": "score", "table": "wide"}},
        },
    ).life

    assert life.of_table("wide").admission.spec() is None
    assert life.of_table("deep").admission.spec() == AdmissionSpec(policy="score", table="wide")
    assert life.of_table("third").admission.spec() == AdmissionSpec(threshold=3.0)
    assert life.scoring_tables(["wide", "deep", "third"]) == {"wide"}
    assert life.scoring_tables(["wide", "third"]) == set()


def test_stored_job_has_the_same_tables() -> None:
    """Defaults that are filled in for all tables are not for single ones, where they would count."""
    admission = {"policy": "count", "threshold": 3}
    first = job(max_unseen=7, admission=admission, tables={"wide": {"max_rows": 9}})

    again = override_job(json.loads(first.to_json()), [], source="job.json")

    assert again.life.of_table("wide") == first.life.of_table("wide")
    assert again == first


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("life.decay=0", r"life\.decay is 0.*greater than 0"),
        ("life.max_unseen=-1", r"life\.max_unseen is -1"),
        ("life.evict=fifo", r"life\.evict is 'fifo'.* known: lru, score"),
        ("life.admission.policy=rank", r"life\.admission\.policy is 'rank'.* known: all, count"),
        ("life.admission.treshold=3", r"unknown key 'life\.admission\.treshold', did you mean"),
        ("life.tables.wide.max_row=3", r"unknown key 'life\.tables\.wide\.max_row'"),
        (
            "life.admission.threshold=3",
            r'admission\.threshold is 3\.0, but with policy "all" .*: set',
        ),
        (
            "life.tables.wide.admission={counter='bloom'}",
            r"wide\.admission\.counter is 'bloom', but",
        ),
        ("life.admission=count", r"life\.admission is 'count', expected a table of keys"),
        ("life.tables.wide=3", r"life\.tables\.wide is 3, expected a table of keys"),
        ("life.max_row=3", r"unknown key 'life\.max_row', did you mean 'life\.max_rows'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(override: str, message: str) -> None:
    with pytest.raises(JobError, match=message):
        override_job({}, [override], source="job")
