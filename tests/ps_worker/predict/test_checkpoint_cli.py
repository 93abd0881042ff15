"""The commands of `ps-ckpt`."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from ctr_ps.protos.spec import StatisticsSpec
from ctr_ps.protos.store import SaveRequest
from ctr_ps.ps_server.checkpoint.publish import write_latest
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.table.rows.statistics import scores_of
from ctr_ps.ps_worker.predict import checkpoint_cli
from tests.support.checkpoints import fake_counting_model
from tests.support.commands import in_this_process
from tests.support.stores import in_process, push_id, random_gradients, trained_chain


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    return in_this_process("ps-ckpt", checkpoint_cli.main, monkeypatch, capsys)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two checkpoints; the second is the latest."""
    fake_counting_model(1).save(tmp_path / "epoch-1", 2, clock=lambda: 0.0)
    fake_counting_model(2).save(tmp_path / "epoch-2")
    write_latest(tmp_path, "epoch-2")
    return tmp_path


def test_inspect_shows_what_is_there(run, root: Path) -> None:
    done = run("inspect", root / "epoch-1", "--top", "2")

    assert done.code == 0, done.err
    assert "created      1970-01-01T00:00:00+00:00" in done.out
    for text in ("exact", "bloom", "mlp", "key of exact", "show 50% 90% 99% 100%", "job.toml"):
        assert text in done.out


def test_inspect_as_json_has_every_figure(run, root: Path) -> None:
    found = json.loads(run("inspect", root, "--json", "--top", "1").out)

    checkpoint = Checkpoint.open(root / "epoch-2")
    assert found["checkpoint"] == str(root / "epoch-2")
    assert found["digest"] == checkpoint.model_digest
    assert [table["table"] for table in found["tables"]] == ["bloom", "exact"]
    assert [len(table["top"]) for table in found["tables"]] == [1, 1]
    assert [block["block"] for block in found["blocks"]] == ["mlp"]
    data = root / "epoch-2" / checkpoint.manifest.data_folder
    sizes = [path.stat().st_size for path in data.rglob("*") if path.is_file()]
    assert (found["files"], found["bytes"]) == (len(sizes), sum(sizes))


def test_inspect_of_a_delta_tells_it_from_its_chain(run, tmp_path: Path) -> None:
    trained_chain(tmp_path, 2)
    links = Checkpoint.open(tmp_path / "2").chain
    sizes = [
        [
            path.stat().st_size
            for path in tmp_path.glob(f"{link.name}/data-*/**/*")
            if path.is_file()
        ]
        for link in links
    ]

    shown = run("inspect", tmp_path / "2").out
    found = json.loads(run("inspect", tmp_path / "2", "--json").out)
    full = run("inspect", tmp_path / "0").out

    everything = [size for own in sizes for size in own]
    assert "chain        0 <- 1 <- 2\n" in shown
    assert (
        f"files        {len(sizes[-1])} of the delta, {len(everything)} of the chain\n"
        f"bytes        {sum(sizes[-1])} of the delta, {sum(everything)} of the chain\n"
    ) in shown
    assert "digest" not in shown
    assert all(text in shown for text in ("rows of delta", "bytes of delta"))
    assert found["chain"] == ["0", "1", "2"]
    assert (found["files"], found["bytes"]) == (len(sizes[-1]), sum(sizes[-1]))
    assert (found["chain_files"], found["chain_bytes"]) == (len(everything), sum(everything))
    deep = found["tables"][0]
    assert deep["own_rows"] == np.unique(random_gradients(2).sparse["deep"].keys).size
    assert deep["rows"] > deep["own_rows"]
    assert "chain" not in full
    assert "of delta" not in full


def test_verify_of_a_delta_counts_what_it_reads(run, tmp_path: Path) -> None:
    trained_chain(tmp_path, 1)
    sizes = [path.stat().st_size for path in tmp_path.glob("*/data-*/**/*") if path.is_file()]

    done = run("verify", tmp_path / "1")

    assert f" files={len(sizes)} bytes={sum(sizes)} digest=" in done.out


def test_verify_says_that_all_is_whole(run, root: Path) -> None:
    done = run("verify", root)

    assert done.code == 0
    digest = Checkpoint.open(root).model_digest
    assert done.out.startswith(f"whole: {root}/epoch-2 files=")
    assert done.out.endswith(f"digest={digest}\n")


def test_verify_of_an_altered_checkpoint_ends_with_5_and_the_file(run, root: Path) -> None:
    path = next(root.glob("epoch-2/data-*/attachments/job.toml"))
    path.write_bytes(path.read_bytes().upper())

    done = run("verify", root)

    assert done.code == 5
    assert done.err.startswith("error: ")
    assert "job.toml was altered" in done.err


def test_verify_all_has_a_line_for_each_checkpoint(run, tmp_path: Path) -> None:
    trained_chain(tmp_path, 2)
    fake_counting_model(1).save(tmp_path / "alone")
    (tmp_path / "notes").mkdir()
    whole = run("verify", tmp_path, "--all")
    assert (whole.code, whole.err) == (0, "")
    assert whole.out == "0 full whole\n1 delta whole\n2 delta whole\nalone full whole\n"

    [altered] = tmp_path.glob("1/data-*/attachments/note")
    altered.write_bytes(b"2")
    (tmp_path / "alone" / "MANIFEST.json").write_text("{")
    done = run("verify", tmp_path, "--all")

    lines = done.out.splitlines()
    assert done.code == 5
    assert "damaged or incomplete checkpoints: 1, 2, alone" in done.err
    assert lines[0] == "0 full whole"
    for name, line in zip("12", lines[1:3], strict=True):
        assert line.startswith(f"{name} delta {altered} was altered")
    assert lines[3].startswith(f"alone - {tmp_path}/alone/MANIFEST.json")


def test_verify_all_reads_what_deltas_share_once(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained_chain(tmp_path, 2)
    verified = []
    monkeypatch.setattr(Checkpoint, "verify_own", lambda link: verified.append(link.name))

    run("verify", tmp_path, "--all")

    assert verified == ["0", "1", "2"]


def test_verify_all_wants_a_folder_of_checkpoints(run, root: Path) -> None:
    done = run("verify", root / "epoch-1", "--all")

    assert done.code == 5
    assert f"no checkpoint in {root}/epoch-1: give a folder of checkpoints" in done.err


def test_published_checkpoint_is_what_readers_take(run, root: Path) -> None:
    first = run("publish", root, "epoch-1")
    taken = Checkpoint.open(root).url
    second, third = run("publish", root, "epoch-2"), run("publish", root, "epoch-3")

    assert first.out == f"published: {root}/epoch-1\n"
    assert taken == f"{root}/epoch-1"
    assert second.out == f"published: {root}/epoch-2\n"
    assert third.code == 5
    assert "no checkpoint" in third.err
    assert Checkpoint.open(root).url == f"{root}/epoch-2"


def test_compact_writes_a_full_checkpoint(run, tmp_path: Path) -> None:
    store = in_process()
    for sequence, base in enumerate(["", str(tmp_path / "0")]):
        store.push_grad(random_gradients(sequence), push_id(sequence=sequence)).result()
        store.save(SaveRequest(url=str(tmp_path / str(sequence)), base=base))

    done = run("compact", tmp_path / "1", tmp_path / "compacted")

    rows = sum(table.rows for table in store.status().tables.values())
    assert done.out == f"{tmp_path}/compacted rows={rows}\n"
    assert Checkpoint.open(tmp_path / "compacted").model_digest == store.digest()
    assert run("verify", tmp_path / "1").out.endswith(f"digest={store.digest()}\n")


def test_export_writes_the_tables_asked_for(run, root: Path, tmp_path: Path) -> None:
    everything = run("export", root, tmp_path / "all")
    one = run("export", root, tmp_path / "one", "--table", "exact", "--state")
    none = run("export", root, tmp_path / "none", "--table", "deep")

    assert everything.out.split() == [
        f"{tmp_path}/all/{name}.parquet" for name in ("bloom", "exact")
    ]
    assert one.out.split() == [f"{tmp_path}/one/exact.parquet"]
    assert pq.read_schema(tmp_path / "one" / "exact.parquet").names[:3] == [
        "key",
        "weights",
        "state",
    ]
    again = run("export", root, tmp_path / "all")

    assert (none.code, again.code) == (2, 2)
    assert "has no table 'deep', only bloom, exact" in none.err
    assert "bloom.parquet exists" in again.err
    assert not (tmp_path / "none").exists()


def test_export_writes_a_checkpoint_to_predict_with(run, root: Path, tmp_path: Path) -> None:
    settings = ("--kind", "inference", "--dtype", "float16", "--min-score", "1e-30")
    done = run("export", root, tmp_path / "exported", *settings)

    manifest = Checkpoint.open(tmp_path / "exported").manifest
    latest = Checkpoint.open(root)
    rows = sum(map(latest.manifest.num_rows, ("bloom", "exact")))
    scores = np.concatenate(
        [
            scores_of(shard.statistics, StatisticsSpec())
            for name, spec in latest.tables.items()
            for _, shard in latest.read_shards(name, range(spec.num_shards))
        ]
    )
    kept = int((scores >= 1e-30).sum())
    assert 0 < kept < rows
    assert done.out == f"{tmp_path}/exported rows={kept} left_out={rows - kept}\n"
    everything = run("export", root, tmp_path / "everything", "--kind", "inference")
    assert everything.out == f"{tmp_path}/everything rows={int((scores >= 0).sum())}\n"
    assert manifest.kind == "inference"
    assert {entry.dtype for entry in manifest.files_of_table("exact")} == {"float16"}
    for wrong in (["--kind", "inference", "--state"], ["--dtype", "float16"]):
        assert run("export", root, tmp_path / "other", *wrong).code == 2


def test_scores_of_rows_without_statistics_are_no_option(run, tmp_path: Path) -> None:
    trained_chain(tmp_path, 0)
    arguments = ("export", tmp_path / "0", tmp_path / "served", "--kind", "inference")

    done = run(*arguments, "--min-score", "0.5")

    assert done.code == 2
    assert done.err.startswith("error: --min-score is 0.5, but table 'deep' keeps no statistics")
    assert not (tmp_path / "served").exists()


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--kind", "inference", "--min-score", "-1"], "--min-score"),
        (["--format", "csv"], "csv"),
        (["--format", "npy"], "npy needs --values and --slot"),
        (["--values", "x"], "--values and --slot belong together"),
        (["--slot", "ad"], "--values and --slot belong together"),
        (["--values", "x", "--slot", "ad", "--state"], "leave out --state"),
        (["--values", "x", "--slot", "ad", "--kind", "inference"], "need --kind tables"),
    ],
)
def test_wrong_arguments_end_with_2(run, root: Path, arguments: list[str], fault: str) -> None:
    done = run("export", root, root / "out", *arguments)

    assert (done.code, fault in done.err) == (2, True), done.err
    assert not (root / "out").exists()
    assert run("compact", root).code == 2
