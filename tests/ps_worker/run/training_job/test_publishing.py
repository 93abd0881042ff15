"""The gate before publishing: the rule, the rows that it compares on, and a stream that goes bad."""

import itertools
import json
import logging
import math
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.metrics import ClickMetrics
from ctr_ps.protos.errors import CheckpointError, JobError
from ctr_ps.ps_server.checkpoint.files.manifest import PUBLISHED
from ctr_ps.ps_server.checkpoint.publish import best_in, write_best
from ctr_ps.ps_worker.checkpoints import saver
from ctr_ps.ps_worker.checkpoints.notices import Channel
from ctr_ps.ps_worker.data.streams import stream_data
from ctr_ps.ps_worker.job.sections import PublishSection
from ctr_ps.ps_worker.predict import checkpoint_cli
from ctr_ps.ps_worker.predict.predictor import Predictor
from ctr_ps.ps_worker.run.training_job import publishing
from ctr_ps.ps_worker.run.training_job.publishing import Gate, RowSample, why_held
from tests.support.processes import free_port
from tests.support.streams import MemorySource
from tests.support.training import job_of, random_batches, train_together

WINDOW_S = 10
ROWS = 400  # of a window


def metrics_of(probability: float) -> ClickMetrics:
    """Of 1 click in 4, all predicted at `probability`."""
    metrics = ClickMetrics()
    metrics.add(np.float32([1, 0, 0, 0]), np.full(4, probability, np.float32))
    return metrics


# The click rate has an entropy of 0.5623; log losses of 0.25, 0.5 and 0.9 are 0.5623, 0.6931, 1.7533.
RIGHT, HALF, WRONG = metrics_of(0.25), metrics_of(0.5), metrics_of(0.9)


@pytest.mark.parametrize(
    ("limits", "window", "live", "served", "reason"),
    [
        ({"max_log_loss": 0.69}, RIGHT, None, None, ""),
        ({"max_log_loss": 0.7}, HALF, None, None, ""),
        (
            {"max_log_loss": 0.69},
            HALF,
            None,
            None,
            "it has a log loss of 0.69315, expected at most",
        ),
        ({"max_ne": 1.24}, HALF, None, None, ""),
        (
            {"max_ne": 1.23},
            HALF,
            None,
            None,
            r"it has a normalized entropy of 1\.2326., expected at most 1\.23",
        ),
        ({"max_ne": 5}, ClickMetrics(), None, None, "it has a normalized entropy of nan"),
        (
            {"max_ne": 1.1, "margin": 9},
            RIGHT,
            RIGHT,
            HALF,
            "the served model has a normalized entropy of 1.2326",
        ),
        ({"margin": 0.01}, HALF, HALF, HALF, ""),
        ({"margin": 0.01}, HALF, RIGHT, WRONG, ""),
        ({"margin": 0.24}, HALF, HALF, RIGHT, ""),
        (
            {"margin": 0.23},
            RIGHT,
            HALF,
            RIGHT,
            r"on 4 rows it has .* 1\.2326. and the served model 1\.0",
        ),
        (
            {"margin": 9},
            RIGHT,
            ClickMetrics(),
            ClickMetrics(),
            "worker 0 has read no rows of the pass",
        ),
        # Nothing is served yet.
        ({"margin": 0.23}, WRONG, None, None, r"entropy of 3\.\d+, expected at most 1"),
        ({"margin": 0.23}, RIGHT, None, None, ""),
        ({"margin": 0.23}, ClickMetrics(), None, None, "a normalized entropy of nan"),
        ({"margin": 0.23, "max_ne": 2}, HALF, None, None, ""),
        # Without a margin the other model is for people.
        ({"max_ne": 1.1}, RIGHT, WRONG, WRONG, ""),
        ({"max_ne": 1.1}, RIGHT, ClickMetrics(), ClickMetrics(), ""),
        ({"margin": 9}, None, RIGHT, RIGHT, "unknown, as worker 0 was replaced"),
    ],
)
def test_rule(
    limits: dict[str, float],
    window: ClickMetrics | None,
    live: ClickMetrics | None,
    served: ClickMetrics | None,
    reason: str,
) -> None:
    both = (live, served) if live and served else None

    found = why_held(PublishSection(**limits), window, both)

    assert re.search(reason, found) if reason else not found


def test_passes_held_are_those_in_a_row(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    progress = SimpleNamespace(held=None, on_batch=None)
    run: Any = SimpleNamespace(is_first=True, is_repeating=False, progress=progress)
    job: Any = SimpleNamespace(
        publish=PublishSection(max_ne=1.1, sample_rows=0),
        checkpoint=SimpleNamespace(dir=str(tmp_path)),
    )
    metrics: Any = SimpleNamespace(write=lambda *_: None)
    gate, held = Gate(job, run, metrics), []

    for number, window in enumerate([HALF, HALF, RIGHT, HALF], 1):
        gate.window = window
        gate.passes(number)
        held.append(progress.held)

    assert held == [1, 2, 0, 1]
    told = [each.getMessage() for each in caplog.records if "not published" in each.msg]
    assert [re.findall(r"epoch-\d|held=\d", each)[:2] for each in told] == [
        ["epoch-1", "held=1"],
        ["epoch-2", "held=2"],
        ["epoch-4", "held=1"],
    ]


@given(sizes=st.lists(st.integers(1, 12), max_size=60), limit=st.integers(1, 40))
def test_sample_is_bounded_and_of_all_of_the_pass(sizes: list[int], limit: int) -> None:
    sample = RowSample(limit)
    for number, size in enumerate(sizes):
        (batch,) = random_batches(1, size, seed=number)
        sample.add(batch, np.full(size, number / 100, np.float32))

    numbers = [round(float(p[0]) * 100) for _, p in sample.kept]
    assert sum(batch.size for batch, _ in sample.kept) <= max([limit, *sizes[:1]])
    assert [batch.size for batch, _ in sample.kept] == [sizes[k] for k in numbers]
    steps = {later - earlier for earlier, later in itertools.pairwise(numbers)}
    assert len(steps) <= 1, "not evenly"
    if sizes:
        assert numbers[0] == 0
        assert len(sizes) <= numbers[-1] + (max(steps) if steps else len(sizes))
    for (kept, _), number in zip(sample.kept, numbers, strict=True):
        (batch,) = random_batches(1, sizes[number], seed=number)
        assert kept.offsets.size == kept.size * kept.num_slots + 1
        assert kept.keys.size == kept.offsets[-1]
        for row in range(kept.size):
            assert keys_of(kept, row) == keys_of(batch, row)
            assert (kept.labels[row], *kept.dense[row]) == (batch.labels[row], *batch.dense[row])


def keys_of(batch: Batch, row: int) -> list[list[int]]:
    slots = range(row * batch.num_slots, (row + 1) * batch.num_slots)
    return [batch.keys[batch.offsets[k] : batch.offsets[k + 1]].tolist() for k in slots]


def window_of(
    number: int, *, is_flipped: bool = False, share: float = 1.0
) -> list[tuple[int, bytes]]:
    """Returns one message a row: users with an even number click 9 times in 10, others once; or flipped.

    Of the clicks a `share` is left.
    """
    random, found = Random(number), []
    for row in range(ROWS):
        user = random.randrange(20)
        is_clicked = ((random.random() < 0.9) == (user % 2 == 0)) != is_flipped
        is_clicked = is_clicked and random.random() < share
        line = {"click": int(is_clicked), "user": f"u{user}", "item": f"i{user // 2}"}
        at_ms = (number - 1) * 1000 * WINDOW_S + row * 1000 * WINDOW_S // ROWS
        found.append((at_ms, json.dumps(line).encode()))
    return found


def run_of(
    folder: Path,
    windows: Sequence[Sequence[tuple[int, bytes]]],
    *settings: str,
    resume: bool = False,
    num_workers: int = 1,
    only_worker: int | None = None,
) -> list[dict[str, Any]]:
    """Trains on windows of a stream with a fast learner; returns the lines of kind "publish"."""
    folder.mkdir(exist_ok=True)
    schema = folder / "schema.toml"
    schema.write_text('label = "click"\nslots = ["user", "item"]\ndense = []\nhash_version = 1\n')
    rows = list(itertools.chain(*windows))
    messages = {f"clicks/{k}": rows[k::num_workers] for k in range(num_workers)}
    if only_worker is not None:
        messages = {f"clicks/{only_worker}": rows}
    job = job_of(
        "model.name=lr",
        "data.stream=kafka://broker:9092/clicks?end=latest",
        f"data.schema={schema}",
        f"data.pass_every={WINDOW_S} s",
        "train.batch_size=10",
        "train.base_rate=0.5",
        "strategy.mode=sync",
        "optimizer.sparse={name='sgd', learning_rate=2.0}",
        "optimizer.dense={name='sgd', learning_rate=0.1}",
        f"checkpoint.dir={folder}/saved",
        "checkpoint.keep_last=1",
        "checkpoint.mode=delta",
        "checkpoint.full_every=3",
        f"checkpoint.resume={json.dumps(resume)}",
        f"run.dir={folder}/run",
        *settings,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_data, "open_source", lambda _: MemorySource(messages))
        train_together(job, num_workers)
    lines = map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "publish"]


class Reader(logging.Handler):
    """Loads the folder as readers do, whenever a checkpoint was saved."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        # name of each checkpoint, of what a reader took then, and its predictions of two users
        self.seen: list[tuple[str, str, tuple[float, float]]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if not record.getMessage().startswith("saved checkpoint="):
            return
        saved = str(record.args[0]).rpartition("/")[2]  # type: ignore[index]
        try:
            model = Predictor.load(self.folder)
        except CheckpointError:
            self.seen.append((saved, "", (math.nan, math.nan)))
            return
        found = model.predict_samples([(0, [], [["u0"], ["i0"]]), (0, [], [["u1"], ["i0"]])])
        self.seen.append((saved, model.url.rpartition("/")[2], (float(found[0]), float(found[1]))))


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    handler, logger = Reader(tmp_path / "saved"), logging.getLogger("ctr_ps")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


GATE = ("publish.max_ne=0.9", "publish.margin=0.02")
BAD = (4, 5, 6)


def test_stream_that_goes_bad_leaves_readers_the_good_model(
    tmp_path: Path, reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    """The third bad window looks good to a model that has learnt its labels, and not to the served one."""
    windows = [window_of(number, is_flipped=number in BAD) for number in range(1, 11)]

    lines = run_of(tmp_path, windows, *GATE, "publish.sample_rows=200")

    published = [line["epoch"] for line in lines if line["is_published"]]
    assert published[:3] == [1, 2, 3]
    assert published[3:] == list(range(published[3], 11))
    assert 7 < published[3] <= 10, "the model that has learnt wrong labels is behind the served one"
    seen = [(int(saved[6:]), int(taken[6:])) for saved, taken, _ in reader.seen]
    served = [max(each for each in published if each <= number) for number in range(1, 11)]
    assert seen == list(enumerate(served, start=1))
    assert all(even > 0.6 and odd < 0.4 for _, _, (even, odd) in reader.seen)
    assert {"PUBLISHED", "LATEST"} < {each.name for each in (tmp_path / "saved").iterdir()}

    bad = lines[BAD[2] - 1]
    assert bad["sample_normalized_entropy"] < 0.9 < 1.2 < bad["served_normalized_entropy"]
    assert (bad["served"], bad["epoch"]) == ("epoch-3", 6)
    assert 100 <= bad["sample_rows"] <= 200
    assert "publish.margin = 0.02 more" in lines[7]["reason"]
    warned = [each for each in caplog.messages if each.startswith("not published")]
    assert len(warned) == 10 - len(published)
    assert re.search(
        r"checkpoint=epoch-4 served=epoch-3 held=1 passes in a row: it has a normalized entropy of 1\.\d+, "
        r"expected at most 0\.9; `ps-ckpt publish \S+/saved epoch-4`",
        warned[0],
    )
    assert "held=3 passes" in warned[2]


def test_pass_is_compared_with_what_the_one_before_has_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(*arguments: str) -> None:
        time.sleep(0.2)  # what is slow is the storage
        write_best(*arguments)

    monkeypatch.setattr(saver, "write_best", slowly)

    lines = run_of(tmp_path, [window_of(number) for number in (1, 2, 3)], *GATE)

    assert [line["served"] for line in lines] == ["", "epoch-1", "epoch-2"]


def test_killed_between_save_and_publication_readers_stay(
    tmp_path: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = [window_of(number) for number in range(1, 5)]
    folder = tmp_path / "saved"
    run_of(tmp_path, windows[:1], *GATE)

    with monkeypatch.context() as patch:
        patch.setattr(saver, "write_best", fails)
        with pytest.raises(CheckpointError, match="killed here"):
            run_of(tmp_path, windows[:2], *GATE, resume=True)
    assert (best_in(folder, PUBLISHED), latest(folder)) == ("epoch-1", "epoch-2")
    assert Predictor.load(folder).url == f"{folder}/epoch-1"
    told: list[str] = []
    monkeypatch.setattr(Channel, "tell", lambda _, name: told.append(name))
    notify = "publish.notify=redis://127.0.0.1:1/told"
    lines = run_of(tmp_path, windows[:3], *GATE, notify, resume=True)
    checkpoint_cli.publish(str(folder), "epoch-3")

    assert told == ["epoch-2", "epoch-3", "epoch-3"]
    assert [line["epoch"] for line in lines] == [1, 2, 3]
    assert lines[2]["served"] == "epoch-2", "it had passed"
    assert best_in(folder, PUBLISHED) == "epoch-3"
    assert not (folder / "PUBLISHING").exists()


def fails(folder: str, name: str, file: str) -> None:
    if file == PUBLISHED:
        raise CheckpointError("killed here")
    write_best(folder, name, file)


def latest(folder: Path) -> str:
    return (folder / "LATEST").read_text().strip()


def test_nothing_is_published_before_a_pass_has_passed(tmp_path: Path, reader: Reader) -> None:
    windows = [window_of(number) for number in range(1, 4)]

    run_of(tmp_path, windows, "publish.max_ne=0.65", "checkpoint.full_every=1")

    taken = [taken for _, taken, _ in reader.seen]
    assert taken[0] == ""
    assert taken[-1] == "epoch-3"
    reader.seen.clear()
    run_of(
        tmp_path,
        windows[:1],
        *GATE,
        "publish.max_log_loss=0.01",
        "checkpoint.overwrite=true",
        "run.overwrite=true",
    )

    assert [taken for _, taken, _ in reader.seen] == [""], "the names are of another run now"


def test_without_a_gate_readers_take_each_checkpoint(tmp_path: Path, reader: Reader) -> None:
    windows = [window_of(number, is_flipped=number == 2) for number in range(1, 4)]
    run_of(tmp_path, windows[:2], *GATE)
    run_of(tmp_path, windows[:2], *GATE, resume=True)  # nothing is left to train
    assert [taken for _, taken, _ in reader.seen] == ["epoch-1", "epoch-1"]

    lines = run_of(tmp_path, windows, resume=True)

    assert reader.seen[-1][:2] == ("epoch-3", "epoch-3")
    assert len(lines) == 2
    assert not (tmp_path / "saved/PUBLISHED").exists()


def test_checkpoint_published_by_hand_is_what_the_next_is_compared_with(tmp_path: Path) -> None:
    windows = [window_of(number, is_flipped=number > 1) for number in range(1, 5)]
    run_of(tmp_path, windows[:3], *GATE)
    write_best(tmp_path / "saved", "epoch-3", PUBLISHED)

    lines = run_of(tmp_path, windows, *GATE, resume=True)

    assert [line["is_published"] for line in lines] == [True, False, False, True]
    assert lines[-1]["served"] == "epoch-3"


def test_figures_are_of_all_workers_and_the_sample_of_the_first(
    tmp_path: Path, reader: Reader
) -> None:
    windows = [window_of(1), window_of(2)]

    keep = ("publish.max_ne=0.9", "checkpoint.keep_last=9")
    lines = run_of(tmp_path, windows, *keep, num_workers=2)

    records = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    passes = [record for record in records if record["kind"] == "pass"]
    assert [each["examples"] for each in passes] == [ROWS, ROWS]
    assert [each["until"] for each in passes] == ["1970-01-01T00:00:10", "1970-01-01T00:00:20"]
    assert len(reader.seen) == 2
    loss = passes[0]["log_loss"]
    too_low = f"publish.max_log_loss={loss - 1e-9}"
    held = run_of(tmp_path / "again", windows[:1], too_low, num_workers=2)
    assert f"it has a log loss of {loss:.5f}, expected" in held[0]["reason"]
    assert [line["sample_rows"] for line in lines] == [0, ROWS // 2]
    # The served model, asked as a reader asks it, of the rows of worker 0.
    rows = [json.loads(value) for _, value in windows[1][::2]]
    asked = [(0, [], [[row["user"]], [row["item"]]]) for row in rows]
    labels = np.float32([row["click"] for row in rows])
    predicted = Predictor.load(tmp_path / "saved/epoch-1").predict_samples(asked)
    assert lines[1]["served_log_loss"] == pytest.approx(log_loss(labels, predicted), rel=1e-5)
    assert lines[1]["served_auc"] == pytest.approx(roc_auc_score(labels, predicted), abs=1e-3)
    assert lines[1]["served_calibration"] == pytest.approx(predicted.sum() / labels.sum(), rel=1e-5)
    assert lines[1]["sample_log_loss"] < lines[1]["served_log_loss"], "it goes on learning"


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["data.negative_rate=0.3"],
        ["data.negative_rate=0.3", "data.negative_correction=weight"],
        ["train.delay=fnw"],
        ["train.delay=fnc"],
        ["train.delay=fnw", "data.negative_rate=0.3"],
    ],
)
def test_both_models_are_compared_as_training_predicts(tmp_path: Path, settings: list[str]) -> None:
    """A model that no longer learns is the served one."""
    gate = ["publish.max_ne=9", "publish.margin=1e-4"]
    windows = [
        window_of(number, share=0.2) for number in (1, 2)
    ]  # delayed: at most 1/2 of the rows
    run_of(tmp_path, windows[:1], *gate, *settings)
    still = "optimizer.sparse={name='sgd', learning_rate=1e-30}"
    dense = "optimizer.dense={name='sgd', learning_rate=1e-30}"

    line = run_of(tmp_path, windows, *gate, *settings, still, dense, resume=True)[-1]

    assert line["epoch"] == 2
    assert line["sample_normalized_entropy"] == pytest.approx(
        line["served_normalized_entropy"], rel=1e-5
    )
    assert line["is_published"]


@pytest.mark.parametrize("has_margin", [True, False])
def test_published_checkpoint_that_was_removed_is_named(
    has_margin: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a margin nothing is published any more, until a person says what."""
    gate = GATE if has_margin else GATE[:1]
    windows = [window_of(1), window_of(2)]
    run_of(tmp_path, windows[:1], *gate)
    (tmp_path / "saved/PUBLISHED").write_text("mine\n")

    line = run_of(tmp_path, windows, *gate, resume=True)[-1]

    why = "it cannot be compared with 'mine', which is served: "
    assert (line["served"], line["is_published"]) == ("mine", not has_margin)
    assert (why in line["reason"]) == has_margin
    assert re.search(f"{why}.*PUBLISHED names 'mine', which is not a checkpoint", caplog.text)
    published = (tmp_path / "saved/PUBLISHED").read_text()
    assert published == ("mine\n" if has_margin else "epoch-2\n")


def test_worker_without_rows_is_why_a_margin_holds(tmp_path: Path) -> None:
    windows = [window_of(1), window_of(2)]

    lines = run_of(tmp_path, windows, *GATE, num_workers=2, only_worker=1)

    assert [line["is_published"] for line in lines] == [True, False]
    assert "worker 0 has read no rows of the pass" in lines[1]["reason"]


def test_files_of_the_served_model_are_mapped_only_while_it_predicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, set[str]] = {"in": set(), "after": set()}

    def noted(when: str) -> None:
        lines = Path("/proc/self/maps").read_text().splitlines()
        found[when] |= {line.split()[-1] for line in lines if f"{tmp_path}/saved" in line}

    def noting(when: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted_call(*arguments: Any, **options: Any) -> Any:
            noted(when)
            return call(*arguments, **options)

        return noted_call

    monkeypatch.setattr(publishing.Run, "evaluate", noting("in", publishing.Run.evaluate))
    monkeypatch.setattr(saver.Saver, "save", noting("after", saver.Saver.save))
    run_of(tmp_path, [window_of(1), window_of(2), window_of(3)], *GATE)

    assert found["in"]
    assert not found["after"]


def test_held_passes_can_be_published_until_two_more_have_ended(tmp_path: Path) -> None:
    """However many checkpoints come within a pass."""
    windows = [window_of(number, is_flipped=number > 1) for number in range(1, 6)]

    lines = run_of(tmp_path, windows, *GATE, "checkpoint.every_steps=5", "checkpoint.full_every=1")

    assert [line["is_published"] for line in lines[:3]] == [True, False, False]
    ends = {each.parent.name for each in (tmp_path / "saved").glob("epoch-*/MANIFEST.json")}
    assert {"epoch-1", "epoch-4", "epoch-5"} <= ends
    assert "epoch-2" not in ends


@pytest.mark.parametrize("is_gated", [True, False])
def test_channel_is_told_of_each_checkpoint_that_readers_may_take(
    is_gated: bool, tmp_path: Path, redis_port: int
) -> None:
    windows = [window_of(number, is_flipped=number == 3) for number in range(1, 4)]
    with redis.Redis(port=redis_port).pubsub(ignore_subscribe_messages=True) as listener:
        listener.subscribe(f"told-{is_gated}")
        listener.get_message(timeout=10)
        url = f"redis://127.0.0.1:{redis_port}/told-{is_gated}"

        run_of(tmp_path, windows, *(GATE if is_gated else ()), f"publish.notify={url}")

        told = []
        while message := listener.get_message(timeout=1):
            told.append(message["data"].decode())
    assert told == (["epoch-1", "epoch-2"] if is_gated else ["epoch-1", "epoch-2", "epoch-3"])


def test_channel_that_is_none_or_away_costs_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(JobError, match=r"publish\.notify: .*is no channel"):
        run_of(tmp_path, [window_of(1)], "publish.notify=kafka://broker/clicks")
    assert not any((tmp_path / "saved").iterdir())
    with free_port() as port:
        run_of(tmp_path, [window_of(1)], f"publish.notify=redis://127.0.0.1:{port}/told")
    assert "readers hear nothing of checkpoint=epoch-1" in caplog.text
    assert Predictor.load(tmp_path / "saved").url.endswith("epoch-1")


def test_served_model_that_cannot_be_read_holds(tmp_path: Path) -> None:
    windows = [window_of(1), window_of(2)]
    run_of(tmp_path, windows[:1], *GATE)
    (file,) = (tmp_path / "saved/epoch-1").glob("data-*/*dense*")
    copy = tmp_path / "saved/mine"
    shutil.copytree(tmp_path / "saved/epoch-1", copy)
    (copy / file.parent.name / file.name).write_bytes(b"")
    write_best(tmp_path / "saved", "mine", PUBLISHED)

    line = run_of(tmp_path, windows, *GATE, resume=True)[-1]

    assert not line["is_published"]
    assert "cannot be compared with 'mine', which is served: " in line["reason"]
    assert best_in(tmp_path / "saved", PUBLISHED) == "mine"


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (
            ["checkpoint.dir=x"],
            r"publish\.max_ne.*a gate needs a stream, checkpoints and a limit",
        ),
        (
            ["data.stream=kafka://b/c"],
            r"publish\.max_ne.*set data\.stream, checkpoint\.dir",
        ),
        (
            ["publish.max_ne=0", "publish.sample_rows=9"],
            r"publish\.sample_rows.*a gate needs a stream, checkpoints and a limit",
        ),
        (
            ["checkpoint.dir=x", "data.stream=kafka://b/c", "data.pass_every="],
            r"publish\.max_ne.*one without an end: set data\.pass_every",
        ),
        (
            ["checkpoint.dir=x", "data.stream=kafka://b/c", "checkpoint.every_epochs=0"],
            r"publish\.max_ne.*no pass ends with a checkpoint: set checkpoint\.every_epochs = 1",
        ),
        (
            [
                "checkpoint.dir=x",
                "data.stream=kafka://b/c",
                "publish.margin=1",
                "publish.sample_rows=0",
            ],
            r"publish\.sample_rows.*set sample_rows above 0",
        ),
        (
            ["publish.max_ne=0", "publish.notify=redis://host/channel"],
            r"publish\.notify.*nothing is saved: set checkpoint\.dir",
        ),
        (
            [
                "checkpoint.dir=x",
                "data.stream=kafka://b/c",
                "data.valid=v",
                "valid.final_model=best",
            ],
            r"valid\.final_model.*\[publish\] says what is published",
        ),
    ],
)
def test_gate_without_use_is_refused(settings: list[str], match: str) -> None:
    with pytest.raises(JobError, match=match):
        job_of("publish.max_ne=0.9", *settings)
