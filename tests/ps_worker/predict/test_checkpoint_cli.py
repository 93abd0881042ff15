"""`ps-ckpt export`, and that the command has the commands for checkpoints alone, too."""

from pathlib import Path

import numpy as np
import pytest

from ctr_ps.protos.spec import StatisticsSpec
from ctr_ps.ps_server.checkpoint.publish import write_latest
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.table.rows.statistics import scores_of
from ctr_ps.ps_worker.predict import checkpoint_cli
from tests.support.checkpoints import fake_counting_model
from tests.support.commands import in_this_process
from tests.support.stores import trained_chain


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    return in_this_process("ps-ckpt", checkpoint_cli.main, monkeypatch, capsys)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two checkpoints; the second is the latest."""
    fake_counting_model(1).save(tmp_path / "epoch-1", 2)
    fake_counting_model(2).save(tmp_path / "epoch-2")
    write_latest(tmp_path, "epoch-2")
    return tmp_path


def test_export_writes_the_tables_asked_for(run, root: Path, tmp_path: Path) -> None:
    everything = run("export", root, tmp_path / "all")
    one = run("export", root, tmp_path / "one", "--table", "exact", "--format", "text", "--state")
    none = run("export", root, tmp_path / "none", "--table", "deep")

    assert everything.out.split() == [
        f"{tmp_path}/all/{name}.parquet" for name in ("bloom", "exact")
    ]
    assert one.out.split() == [f"{tmp_path}/one/exact.tsv"]
    assert (tmp_path / "one" / "exact.tsv").read_text().startswith("key\tweights\tstate\tshow\t")
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
    assert done.err.startswith("error: --min-score 0.5: table 'deep' keeps no statistics")
    assert not (tmp_path / "served").exists()


def test_command_has_those_for_checkpoints_alone(run, root: Path) -> None:
    assert run("verify", root).out.startswith("whole: ")
    assert all(name in run("--help").out for name in ("inspect", "diff", "export", "compact"))


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--kind", "inference", "--min-score", "-1"], "--min-score"),
        (["--format", "csv"], "csv"),
        (["--format", "npy"], "npy needs --values and --slot"),
        (["--values", "x"], "--values and --slot belong together"),
        (["--slot", "ad"], "--values and --slot belong together"),
        (["--values", "x", "--slot", "ad", "--format", "text"], "parquet, npy, word2vec"),
        (["--values", "x", "--slot", "ad", "--state"], "without --state"),
        (["--values", "x", "--slot", "ad", "--kind", "inference"], "need --kind tables"),
    ],
)
def test_wrong_arguments_end_with_2(run, root: Path, arguments: list[str], fault: str) -> None:
    done = run("export", root, root / "out", *arguments)

    assert (done.code, fault in done.err) == (2, True), done.err
    assert not (root / "out").exists()
