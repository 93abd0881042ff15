"""Training on a stream: each row once, from files, a topic, or half of each, whatever processes suffer.

CTR_PS_RANDOM_RUNS is the number of runs whose processes are killed at random moments.
"""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import redis

from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_worker.cluster.connect import connect
from ctr_ps.ps_worker.data.streams.stream_data import END
from tests.support.commands import generated
from tests.support.running_job import RunningJob, training
from tests.support.streams import Broker
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

RANDOM_RUNS = int(os.environ.get("CTR_PS_RANDOM_RUNS", "1"))
ROWS, BATCH = 12_000, 50
NUM_KILLS = 4
START_MS = 1_700_000_000_000
SAME = ("model_digest", "auc", "log_loss", "examples")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generated(tmp_path_factory.mktemp("data"), rows=ROWS, test_rows=1_000, files=4)


def messages_of(file: Path, seed: int) -> list[tuple[int, bytes]]:
    """Returns the lines of a file in messages of 1 to 70 rows, 100 ms apart."""
    random, lines, found = Random(seed), file.read_bytes().splitlines(), []
    while lines:
        number = random.randrange(1, 71)
        found.append((START_MS + 100 * len(found), b"\n".join(lines[:number])))
        lines = lines[number:]
    return found


@pytest.fixture(scope="module")
def topic(data: Path, broker: Broker) -> str:
    """The URL of a topic whose partition k has the rows of file k."""
    files = sorted((data / "train").glob("part-*"))
    broker.produce("clicks", {k: messages_of(file, k) for k, file in enumerate(files)})
    return f"kafka://{broker.address}/clicks?end=latest"


def settings_of(data: Path, folder: Path, **others: str) -> dict[str, str]:
    """Returns settings of a job; in those of `others` a double underscore is a dot."""
    return {
        "data.train": "[]",
        "data.format": "criteo",
        "data.test": f"{data}/test/part-*",
        "model.hidden": "[16]",
        "train.batch_size": str(BATCH),
        "train.log_every_s": "0.1",
        "strategy": "{mode='sync'}",
        "cluster.lease_s": "1.5",
        "cluster.on_worker_loss": "wait",
        "life": "{delete_threshold=0.3, max_unseen=3, decay=0.9}",
        "checkpoint.dir": str(folder / "checkpoints"),
        "checkpoint.every_steps": "25",
        "checkpoint.mode": "delta",
        "checkpoint.keep_last": "3",
        **{name.replace("__", "."): value for name, value in others.items()},
    }


def figures(job: RunningJob) -> dict[str, Any]:
    codes = job.wait()
    assert set(codes.values()) == {0}, f"{codes}\n{job.tails}"
    result = job.result()
    best = result["best"] and {name: result["best"][name] for name in ("epoch", "log_loss")}
    return {name: result[name] for name in SAME} | {"best": best}


def run(folder: Path, settings: dict[str, str], **options: Any) -> dict[str, Any]:
    with RunningJob(folder, training(settings), **options) as job:
        return figures(job)


@pytest.fixture(scope="module")
def undisturbed(data: Path, topic: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("undisturbed")
    return run(folder, settings_of(data, folder, data__stream=topic, **passes_of(data)))


def passes_of(data: Path) -> dict[str, str]:
    """Returns settings of nine passes with a validation after each."""
    return {"data__pass_every": "1 s", "data__valid": f"{data}/test/part-*"}


@pytest.mark.parametrize("seed", range(RANDOM_RUNS))
def test_processes_killed_at_random_moments_train_each_row_once(
    seed: int, data: Path, topic: str, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    random, killed = Random(seed), []
    settings = settings_of(data, tmp_path, data__stream=topic, **passes_of(data))
    with RunningJob(tmp_path, training(settings)) as job:
        job.wait_for_steps()
        for _ in range(NUM_KILLS):
            time.sleep(random.uniform(0, 2.0))  # the moment is what is at random
            if not job.are_all_running:
                break
            names = random.sample([*job.servers, *job.workers], random.choice([1, 1, 2, 4]))
            killed.append(names)
            for name in names:
                job.kill(name)
            for name in names:
                job.start(name)

        assert undisturbed == figures(job), f"seed {seed}: {killed}"


@pytest.mark.parametrize("rule", ["fail", "wait"])
def test_a_job_that_is_told_to_end_saves_its_last_step(
    rule: str, data: Path, topic: str, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    others = {"checkpoint__every_steps": "0", "cluster__on_worker_loss": rule, **passes_of(data)}
    settings = settings_of(data, tmp_path, data__stream=topic, **others)
    with RunningJob(tmp_path, training(settings), update_logs=rule == "wait") as job:
        job.wait_for_steps()
        time.sleep(Random(0).uniform(0, 1.0))  # the moment is what is at random
        codes = terminated(job)
    assert codes == {"worker.0": 143, "worker.1": 143}, job.tails
    assert "ended by SIGTERM" in job.log("worker.0")
    saved = json.loads(newest(tmp_path / "checkpoints").read_text())
    done = sum(rows_behind(data, each["partitions"]) for each in saved["workers"].values())

    found = run(tmp_path / "again", {**settings, "checkpoint.resume": "true"})

    assert 0 < done < ROWS
    assert found == {**undisturbed, "examples": ROWS - done}


def terminated(job: RunningJob) -> dict[str, int]:
    """Tells all workers to end, and returns their exit codes."""
    for name in job.workers:
        job.processes[name].terminate()
    return job.wait(*job.workers, limit_s=10)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_job_that_is_told_to_end_in_a_lull_saves_once(
    mode: str, data: Path, redis_port: int, tmp_path: Path
) -> None:
    client, name = redis.Redis(port=redis_port), f"told-{mode}"
    rows = sorted((data / "train").glob("part-*"))[0].read_bytes().splitlines()
    add(client, f"{name}-1", rows[:330])
    settings = settings_of(
        data,
        tmp_path,
        data__stream=f"redis://127.0.0.1:{redis_port}/{name}-0,{name}-1",
        data__pass_every="1 h",
        checkpoint__every_steps="0",
        checkpoint__resume="true",
        cluster__on_worker_loss="fail",
        strategy=f"{{mode='{mode}'}}",
    )
    for number in range(2):
        with RunningJob(tmp_path / str(number), training(settings), update_logs=False) as job:
            wait_until(lambda job=job, number=number: examples(job) == 330 * (1 - number), 60)
            job.wait_for("worker.1", "worker 1 reads")
            start = time.monotonic()
            terminated(job)
            assert time.monotonic() - start < 4.0, job.tails
        (saved,) = (tmp_path / "checkpoints").glob("*/MANIFEST.json")
        workers = json.loads(saved.read_text())["workers"].values()
        assert sum(json.loads(each["position"])["rows"] for each in workers) == 330


def test_readers_have_a_whole_published_model_while_worker_0_is_killed(
    data: Path, topic: str, tmp_path: Path
) -> None:
    gate = {"publish": "{max_ne=9, margin=9}", "run.dir": str(tmp_path / "run")}
    settings = settings_of(data, tmp_path, data__stream=topic, data__pass_every="1 s") | gate
    folder, random, seen = tmp_path / "checkpoints", Random(0), list[str]()
    with RunningJob(tmp_path, training(settings)) as job:
        job.wait_for("worker.0", "PUBLISHED names checkpoint=")
        for _ in range(3):
            job.kill("worker.0")
            seen.append(Path(Checkpoint.open(folder).url).name)
            job.start("worker.0")
            time.sleep(random.uniform(0.5, 2.0))  # the moment is what is at random
        figures(job)

    lines = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    judged = [each for each in lines if each["kind"] == "publish"]
    passed = {f"epoch-{each['epoch']}" for each in judged if each["is_published"]}
    assert {*seen, Path(Checkpoint.open(folder).url).name} <= passed
    held = [each["reason"] for each in judged if not each["is_published"]]
    assert all("was replaced" in each or "has read no rows" in each for each in held), held


def test_a_topic_files_and_half_of_each_make_the_same_model(
    data: Path, broker: Broker, topic: str, tmp_path: Path
) -> None:
    """One pass, so that no batch is cut short, and rates that no first rows decide."""
    same = {"data__pass_every": "", "train__base_rate": "0.2", "life": "{}"}
    files = sorted((data / "train").glob("part-*"))
    # Each worker has half of the rows of both files: as many as whole batches.
    lines = [file.read_bytes().splitlines(keepends=True) for file in files[:2]]
    half = len(lines[0]) // 2 // BATCH * BATCH
    for number, each in enumerate(lines):
        (tmp_path / f"whole-{number}.tsv").write_bytes(b"".join(each))
        (tmp_path / f"half-{number}.tsv").write_bytes(b"".join(each[:half]))
        (tmp_path / f"rest-{number}.tsv").write_bytes(b"".join(each[half:]))
    for name in ("whole", "rest"):
        of_partition = {k: messages_of(tmp_path / f"{name}-{k}.tsv", k) for k in range(2)}
        broker.produce(f"{name}-clicks", of_partition)

    def stream(name: str) -> str:
        return f"kafka://{broker.address}/{name}-clicks?end=latest"

    found = {}
    for name, of_data in {
        "files": {"data__train": f"{tmp_path}/whole-*.tsv"},
        "topic": {"data__stream": stream("whole")},
        "both": {"data__train": f"{tmp_path}/half-*.tsv", "data__stream": stream("rest")},
    }.items():
        folder = tmp_path / name
        own = {**same, **of_data}
        if name == "files":
            del own["data__pass_every"]
        found[name] = run(folder, settings_of(data, folder, **own))

    assert found["topic"] == found["files"]
    assert found["both"] == found["files"]


@pytest.mark.parametrize("number", [1, 3])
def test_another_number_of_workers_goes_on_where_each_partition_was(
    number: int, data: Path, topic: str, tmp_path: Path
) -> None:
    settings = settings_of(
        data, tmp_path, data__stream=topic, data__pass_every="10 s", strategy="{mode='async'}"
    )
    with RunningJob(tmp_path, training(settings), update_logs=False) as job:
        job.wait_for("worker.0", r"saved checkpoint=.*step-25 ")
        for name in (*job.workers, *job.servers):
            job.kill(name)
    saved = json.loads(newest(tmp_path / "checkpoints").read_text())
    done = sum(rows_behind(data, each["partitions"]) for each in saved["workers"].values())

    found = run(tmp_path / "again", {**settings, "checkpoint.resume": "true"}, num_workers=number)

    assert 0 < done < ROWS
    assert found["examples"] == ROWS - done


def newest(folder: Path) -> Path:
    return folder / (folder / "LATEST").read_text().strip() / "MANIFEST.json"


def rows_behind(data: Path, positions: dict[str, str]) -> int:
    """Returns the number of rows before positions in the partitions of `topic`."""
    files, found = sorted((data / "train").glob("part-*")), 0
    for name, position in positions.items():
        if name.startswith(END):
            continue
        number = int(name.rpartition("/")[2])
        sizes = [value.count(b"\n") + 1 for _, value in messages_of(files[number], number)]
        offset, _, rows = position.partition(" +")
        if offset:
            whole = int(offset) if rows else int(offset) + 1
            found += sum(sizes[:whole]) + int(rows or 0)
    return found


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_worker_without_messages_holds_nobody_back(
    mode: str, data: Path, redis_port: int, tmp_path: Path
) -> None:
    """The partition of worker 0 is empty until all of the other is trained; then its rows are."""
    client = redis.Redis(port=redis_port)
    first, second = f"{mode}-0", f"{mode}-1"
    rows = sorted((data / "train").glob("part-*"))[0].read_bytes().splitlines()
    add(client, second, rows[:2000])
    settings = settings_of(
        data,
        tmp_path,
        data__stream=f"redis://127.0.0.1:{redis_port}/{first},{second}",
        data__pass_every="1 h",
        checkpoint__every_steps="0",
        strategy=f"{{mode='{mode}'}}",
    )
    with RunningJob(tmp_path, training(settings)) as job:
        wait_until(lambda: examples(job) >= 2000, 90)
        add(client, first, rows[2000:2500])
        wait_until(lambda: examples(job) >= 2500, 30)
        time.sleep(1.0)  # for the empty batches after the last rows
        steps = steps_of(job)
        time.sleep(2.0)  # in which nothing may happen

        assert examples(job) == 2500
        assert steps_of(job) == steps, "workers without messages take steps"


def add(client: Any, key: str, rows: Sequence[bytes]) -> None:
    pipe = client.pipeline()
    for row in rows:
        pipe.xadd(key, {"value": row})
    pipe.execute()


def status(job: RunningJob) -> Any:
    with connect(job.endpoints) as client:
        return client.status()


def examples(job: RunningJob) -> int:
    return int(status(job).num_examples)


def steps_of(job: RunningJob) -> int:
    return int(status(job).version)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("number", [0, 1])
def test_last_events_before_a_lull_are_saved_whichever_worker_has_read_them(
    number: int, mode: str, data: Path, redis_port: int, tmp_path: Path
) -> None:
    """Without another message, and long before the pass ends; worker 0 saves, and reads partition 0."""
    client = redis.Redis(port=redis_port)
    name = f"lull-{mode}-{number}"
    url = f"redis://127.0.0.1:{redis_port}/{name}-0,{name}-1"
    rows = sorted((data / "train").glob("part-*"))[0].read_bytes().splitlines()
    settings = settings_of(
        data,
        tmp_path,
        data__stream=url,
        data__pass_every="1 h",
        strategy=f"{{mode='{mode}'}}",
        checkpoint__every_steps="0",
        checkpoint__every_s="1",
        checkpoint__keep_last="0",
    )
    folder = tmp_path / "checkpoints"

    def rows_saved() -> int:
        if not (folder / "LATEST").exists():
            return 0
        workers = json.loads(newest(folder).read_text())["workers"]
        return sum(json.loads(each["position"])["rows"] for each in workers.values())

    with RunningJob(tmp_path, training(settings)) as job:
        for total in (300, 600):
            add(client, f"{name}-{number}", rows[total - 300 : total])
            wait_until(lambda total=total: rows_saved() == total, 30)
        saved = len(list(folder.glob("*/MANIFEST.json")))
        steps = steps_of(job)
        time.sleep(3.5)  # in which nothing comes, so that nothing may be saved
        assert len(list(folder.glob("*/MANIFEST.json"))) <= saved + 1
        assert steps_of(job) <= steps + 2
