import json
from pathlib import Path

import pytest

from protos.errors import JobError
from ps_worker.job import load_job, override_job

EXAMPLES = sorted(Path("examples").glob("*.toml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_is_a_valid_job(path: Path) -> None:
    assert load_job(path).model.name == "ctr_dnn"


def test_override_is_parsed_to_the_type_of_its_key() -> None:
    job = override_job(
        {},
        [
            "train.batch_size=64",
            "data.train=rows/part-[0-4].tsv.gz",
            "data.test='a b.tsv'",
            "model.hidden=[8, 4]",
            "strategy.mode=sync",
        ],
        source="job",
    )

    assert job.train.batch_size == 64
    assert job.data.train == ("rows/part-[0-4].tsv.gz",)
    assert job.data.test == ("a b.tsv",)
    assert job.model.options == {"hidden": [8, 4]}
    assert job.strategy.mode == "sync"


def test_override_wins_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("[train]\nbatch_size = 10\nepochs = 3\n")

    job = load_job(path, ["train.batch_size=20"])

    assert (job.train.batch_size, job.train.epochs) == (20, 3)


def test_table_replaces_a_section() -> None:
    job = override_job(
        {"train": {"batch_size": 10, "epochs": 3}}, ["train={ epochs = 2 }"], source="job"
    )

    assert (job.train.batch_size, job.train.epochs) == (512, 2)


def test_numeric_folder_name_stays_text() -> None:
    assert override_job({}, ["checkpoint.dir=20261121"], source="job").checkpoint.dir == "20261121"


def test_optimizer_may_be_a_name_or_a_table() -> None:
    by_name = override_job({"optimizer": {"sparse": "sgd"}}, [], source="job")
    by_table = override_job(
        {"optimizer": {"sparse": {"name": "sgd", "learning_rate": 1}}}, [], source="job"
    )

    assert by_name.optimizer.sparse.spec().params == {}
    assert by_table.optimizer.sparse.spec().params == {"learning_rate": 1.0}


def test_parameter_can_be_set_on_an_optimizer_given_by_name() -> None:
    job = override_job(
        {"optimizer": {"dense": "adam"}}, ["optimizer.dense.learning_rate=0.01"], source="job"
    )

    assert job.optimizer.dense.spec().name == "adam"
    assert job.optimizer.dense.spec().params == {"learning_rate": 0.01}


def test_override_of_an_optimizer_replaces_its_parameters() -> None:
    job = load_job(Path("examples/ctr_dnn.toml"), ["optimizer.sparse=sgd"])

    assert job.optimizer.sparse.spec().params == {}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.batch_sise=3", "unknown key 'train.batch_sise', did you mean 'train.batch_size'"),
        ("trian.batch_size=3", "unknown key 'trian', did you mean 'train'"),
        ("data.shema=criteo", "did you mean 'data.schema'"),
        ("train.batch_size=many", "train.batch_size is 'many'"),
        ("train.batch_size=0", "train.batch_size is 0"),
        ("strategy.mode=asink", "strategy.mode is 'asink', did you mean 'async'"),
        ("strategy.async=true", "did you mean 'strategy.a_sync'"),
        ("train=3", "expected section.key=value"),
        ("train.epochs", "expected section.key=value"),
        ("optimizer.sparse=3", "optimizer.sparse"),
    ],
)
def test_wrong_override_is_refused_by_name(override: str, message: str) -> None:
    with pytest.raises(JobError, match=message.replace("[", r"\[")):
        override_job({}, [override], source="job")


def test_parameter_without_a_name_is_of_the_default_optimizer() -> None:
    job = override_job({}, ["optimizer.sparse.learning_rate=0.5"], source="job")

    assert job.optimizer.sparse.spec().name == "adagrad"


@pytest.mark.parametrize("value", ["fast", "'1'", "true", "nan", "inf", "[1]"])
def test_hyper_parameter_that_is_no_number_is_refused(value: str) -> None:
    with pytest.raises(JobError, match=r"optimizer\.sparse\.learning_rate is .*number"):
        override_job({}, [f"optimizer.sparse.learning_rate={value}"], source="job")


def test_missing_file_and_bad_toml_are_named(tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("[data]\n[train\n")

    with pytest.raises(JobError, match="cannot read job"):
        load_job(tmp_path / "none.toml")
    with pytest.raises(JobError, match=r"bad\.toml:2: not TOML: "):
        load_job(bad)


def test_bad_toml_without_a_line_is_named(tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_bytes(b"[data]\ntrain = '\xff'\n")

    with pytest.raises(JobError, match=r"bad\.toml: not TOML: "):
        load_job(bad)


def test_job_survives_json() -> None:
    job = load_job(Path("examples/ctr_dnn.toml"))

    assert override_job(json.loads(job.to_json()), [], source="checkpoint") == job


def test_limit_without_an_end_is_refused() -> None:
    with pytest.raises(JobError, match=r"cluster\.wait_timeout_s is inf"):
        override_job({}, ["cluster.wait_timeout_s=inf"], source="job")
