"""Errors of a job begin with the place that has to change."""

import json
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
        ("\ntrain = 3", "job.toml: train is 3, expected a table"),
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

    assert (job.train.batch_size, job.train.epochs) == (128, 2)


def test_paths_in_the_home_folder_are_there_wherever_they_are_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    path = tmp_path / "job.toml"
    path.write_text('[data]\ntrain = ["~/a", "~/b"]\nschema = "~/s.toml"\n[run]\ndir = "~"\n')

    job = load_job(path, ["checkpoint.dir=~/model", "model.name=~/my.py:Net"])

    assert job.data.train == ("/home/me/a", "/home/me/b")
    assert (job.data.schema_source, job.run.dir) == ("/home/me/s.toml", "/home/me")
    assert (job.checkpoint.dir, job.model.name) == ("/home/me/model", "/home/me/my.py:Net")


def test_numeric_folder_name_stays_text() -> None:
    assert override_job({}, ["checkpoint.dir=20261121"], source="job").checkpoint.dir == "20261121"


@pytest.mark.parametrize("name", ["ctr_dnn", "models/my_model.py:MyModel"])
def test_model_alone_is_short_for_its_name(name: str, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(f'model = "{name}"\n\n[train]\nepochs = 2\n')
    plain = override_job({"model": {"name": name}, "train": {"epochs": 2}}, [], source="job")

    assert load_job(path) == plain
    assert override_job({}, [f"model={name}", "train.epochs=2"], source="job") == plain
    assert override_job({}, [f"model.name={name}", "train.epochs=2"], source="job") == plain
    assert load_job(path, ["model.dim=4"]).model.options == {"dim": 4}
    assert load_job(path, ["model.dim=4"]).model.name == name


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.batch_sise=3", "unknown key 'train.batch_sise', did you mean 'train.batch_size'"),
        ("trian.batch_size=3", "unknown key 'trian', did you mean 'train'"),
        ("train.batchsize=3", "unknown key 'train.batchsize', did you mean 'train.batch_size'"),
        ("data.batch_size=3", "unknown key 'data.batch_size', did you mean 'train.batch_size'"),
        ("data.seeds=3", "unknown key 'data.seeds', did you mean 'train.seed'"),
        (
            "train.learning_rate=0.1",
            "unknown key 'train.learning_rate', did you mean 'optimizer.sparse.learning_rate' or "
            "'optimizer.dense.learning_rate'",
        ),
        (
            "learning_rate=0.1",
            "section.key=value.*did you mean 'optimizer.sparse.learning_rate' or",
        ),
        ("batch_size=3", "section.key=value.*did you mean 'train.batch_size'"),
        (
            "strategy.k_steps=9",
            "unknown key 'strategy.k_steps', did you mean 'strategy.geo.k_steps'",
        ),
        (
            "strategy.max_delay_ms=9",
            "did you mean 'strategy.async.max_delay_ms' or 'strategy.bounded_staleness.max_delay_ms'",
        ),
        ("strategy.geo.k_step=9", "did you mean 'strategy.geo.k_steps'"),
        ("strategy.a_sinc=true", "did you mean 'strategy.a_sync'"),
        ("life.tables.wide.decays=1", "did you mean 'life.tables.wide.decay'"),
        ("cluster.colour=red", "'cluster.colour': [cluster] has connect_timeout_s, rpc_timeout_s"),
        ("data.shema=criteo", "did you mean 'data.schema'"),
        (
            "data.test=",
            "--set data.test=: data.test is '': an empty text is not a name; for none, write []",
        ),
        ('data.test=["a", ""]', "data.test is .*: an empty text is not a name"),
        ("train.batch_size=many", "train.batch_size is 'many'"),
        ("train.batch_size=0", "train.batch_size is 0"),
        ("strategy.mode=asink", "strategy.mode is 'asink', did you mean 'async'"),
        ("strategy.async=true", "strategy.async is True, expected a table of keys"),
        ("train=3", "--set train=3: expected section.key=value"),
        ("train=fast", "--set train=fast: expected section.key=value"),
        ("model=3", "--set model=3: expected section.key=value"),
        ("train.epochs", "expected section.key=value"),
        ("optimizer.sparse=3", "optimizer.sparse"),
        ("model.top=inf", "model.top is inf: inf cannot be saved with the model"),
        ("model.tops=[1.5, nan]", "model.tops .*nan cannot be saved with the model"),
        ("model.day=1979-05-27", "model.day .*cannot be saved with the model"),
        ("model.top=\udce9", r"model.top is '\\udce9': expected text that can be written as UTF-8"),
        ("data.train=caf\udce9.tsv", r"data.train is 'caf\\udce9.tsv': expected text that"),
    ],
)
def test_wrong_override_is_refused_by_name(override: str, message: str) -> None:
    with pytest.raises(JobError, match=message.replace("[", r"\[")):
        override_job({}, [override], source="job")


def test_missing_file_and_bad_toml_are_named(tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("[data]\n[train\n")

    with pytest.raises(JobError, match="cannot read job"):
        load_job(tmp_path / "none.toml")
    with pytest.raises(JobError, match=r"bad\.toml: not TOML: .*line 2"):
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
