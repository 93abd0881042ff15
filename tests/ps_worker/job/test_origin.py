"""Errors of a job begin with the place that has to change."""

from pathlib import Path

import pytest

from ctr_ps.protos.errors import JobError
from ctr_ps.ps_worker.job import Job, load_job, override_job
from ctr_ps.ps_worker.job.job import Origin


def faults_of(text: str, *overrides: str, folder: Path) -> list[str]:
    """Returns the lines of the error that a job file gives, without the folder."""
    path = folder / "job.toml"
    path.write_text(text)
    with pytest.raises(JobError) as caught:
        load_job(path, overrides)
    return str(caught.value).replace(f"{folder}/", "").splitlines()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[train]\n\nbatch_sise = 1", "job.toml: unknown key 'train.batch_sise'"),
        ("[train]\n\nepochs = 0", "job.toml: train.epochs is 0: "),
        ("\ntrain = { seed = 1, epochs = 0 }", "job.toml: train.epochs is 0: "),
        ("\ntrain = 3", "job.toml: train is 3: "),
        ("[data]\ntrain = [\n'a',\n3.5,\n[]]", "job.toml: data.train.2 is []: "),
        ("[strategy]\n\nmode = 'asink'", "job.toml: strategy.mode is 'asink', did you mean"),
        ("[strategy.geo]\nk_steps = 0", "job.toml: strategy.geo.k_steps is 0: "),
        (
            "[strategy]\na_sync = true\n[strategy.a_sync_configs]\nsend_wait_times = 1",
            "job.toml: strategy.a_sync_configs.send_wait_times is unknown",
        ),
        (
            "[strategy]\na_sync = true\n[strategy.a_sync_configs]\nsend_queue_size = 0",
            "job.toml: strategy.a_sync_configs.send_queue_size is 0: ",
        ),
        (
            "[strategy]\na_sync = false\nmode = 'async'",
            "job.toml: strategy.a_sync is False, but mode is 'async'",
        ),
        (
            "[optimizer.sparse]\nname = 'sgd'\nlearning_rate = 'fast'",
            "job.toml: optimizer.sparse.learning_rate is 'fast': ",
        ),
    ],
)
def test_fault_of_a_file_begins_with_its_path_and_names_the_key(
    text: str, fault: str, tmp_path: Path
) -> None:
    (line,) = faults_of(text, folder=tmp_path)

    assert line.startswith(fault)


def test_every_fault_has_a_line_of_its_own(tmp_path: Path) -> None:
    faults = faults_of("[train]\nepochs = 0\nseed = -1", "train.batch_size=0", folder=tmp_path)

    assert [fault.partition(": ")[0] for fault in faults] == [
        "--set train.batch_size=0",
        "job.toml",
        "job.toml",
    ]


def test_fault_of_an_override_begins_with_it(tmp_path: Path) -> None:
    (fault,) = faults_of("[train]\nepochs = 1", "train.epochs=0", folder=tmp_path)

    assert fault.startswith("--set train.epochs=0: train.epochs is 0: ")


@pytest.mark.parametrize(
    ("overrides", "key", "place"),
    [
        ((), "data.train", "job.toml"),
        ((), "data.train.1", "job.toml"),
        (("data.test=x",), "data.train", "job.toml"),
        (("data.test=x",), "data.schema", "job.toml"),
        (("data.train=x",), "data.train", "--set data.train=x"),
        (("data.train=x", "data.train=y"), "data.train", "--set data.train=y"),
        (("data={test='x'}",), "data.train", "--set data={test='x'}"),
        (("train.seed=1",), "train.epochs", "job.toml"),
        (
            ("optimizer.dense.beta1=2",),
            "optimizer.dense",
            "job.toml, --set optimizer.dense.beta1=2",
        ),
        (
            ("optimizer.dense.beta1=2", "optimizer.dense=adam", "optimizer.dense.beta2=2"),
            "optimizer.dense",
            "--set optimizer.dense=adam, --set optimizer.dense.beta2=2",
        ),
        (("optimizer.dense=adam",), "optimizer.dense.name", "--set optimizer.dense=adam"),
        ((" data.train = x",), "data.train", "--set  data.train = x"),
    ],
)
def test_place_is_where_the_key_was_written(
    overrides: tuple[str, ...], key: str, place: str
) -> None:
    origin = Origin(source="job.toml", overrides=overrides)

    assert origin.of(key.split(".")) == place


def test_job_tells_where_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("[strategy]\na_sync = true\n[strategy.a_sync_configs]\nk_steps = 9\n")
    job = load_job(path, ["train.epochs=2"])

    assert str(job.error("data.train", "no such file")) == f"{path}: data.train: no such file"
    assert job.place_of("train.epochs") == "--set train.epochs=2"
    assert job.place_of("strategy.mode") == str(path)
    assert job.place_of("strategy.geo.k_steps") == str(path)


def test_place_is_no_part_of_a_job(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("[train]\nepochs = 2\n")

    assert load_job(path) == override_job({}, ["train.epochs=2"], source="elsewhere")
    assert Job() == override_job({}, [], source="elsewhere")
    assert str(path) not in load_job(path).to_json()


def test_job_of_no_file_has_a_place_too() -> None:
    assert Job().place_of("data.train") == "job"
    assert (
        override_job({}, [], source="job of a script").place_of("data.train") == "job of a script"
    )
