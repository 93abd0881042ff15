"""Benchmarks of training: a peer that fails costs no figure but its own."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench_train, report
from benchmarks.peers import PeerError, paddle_cases, peer_folder, run_peer, torch_cases

WORKS = """
import json, sys
print("a line before")
print(json.dumps({"examples_per_s": 1000, "auc": 0.79, "arguments": sys.argv[1:]}))
"""


def peer_of(folder: Path, program: str) -> Path:
    (folder / "run_peer.py").write_text(program)
    return folder


def test_result_of_a_peer_is_its_last_line(tmp_path: Path) -> None:
    found = run_peer(peer_of(tmp_path, WORKS), ["--batch", "512"])

    assert found == {"examples_per_s": 1000.0, "auc": 0.79}


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("raise SystemExit('not enough rows: 5 > 4')", "exit code 1: not enough rows: 5 > 4"),
        ("print('done')", "printed 'done', no result"),
        ("print('{}')", "printed '{}', no result"),
        ("", "printed '', no result"),
    ],
)
def test_peer_without_a_result_says_why(tmp_path: Path, program: str, message: str) -> None:
    with pytest.raises(PeerError, match=message):
        run_peer(peer_of(tmp_path, program), [])


def test_folder_without_a_peer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"no run_peer\.py in the folder"):
        peer_folder(str(tmp_path))


@pytest.mark.parametrize(
    ("cases", "expected"),
    [
        (
            paddle_cases,
            {
                "peer_async_2x2": "--servers 2 --workers 2 --mode async --optimizer sgd --batch 512 "
                "--reader inmemory --steps 300",
                "peer_geo_2x2": "--servers 2 --workers 2 --mode geo --optimizer sgd --batch 512 "
                "--reader feed --steps 300",
            },
        ),
        (
            torch_cases,
            {
                "peer_torch_2": "--batch 512 --threads 2 --dtype float32 --steps 300",
                "peer_torch_2_bfloat16": "--batch 512 --threads 2 --dtype bfloat16 --steps 300",
            },
        ),
    ],
)
def test_peers_are_asked_for_their_cases(
    cases: Callable[[Path], dict[str, Any]], expected: dict[str, str], tmp_path: Path
) -> None:
    program = "import sys; raise SystemExit(' '.join(sys.argv[1:]))"
    for name, run in cases(peer_of(tmp_path, program)).items():
        with pytest.raises(PeerError, match=f": {expected[name]}$"):
            run(512, 1000)


def test_a_peer_that_fails_is_reported_and_the_others_stay(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(bench_train.ceiling, "measure", lambda *_: 500.0)
    calls = []

    def fails(batch_size: int) -> dict[str, Any]:
        calls.append(batch_size)
        raise PeerError("not enough rows")

    cases = {
        "in_process_2": lambda _: {"examples_per_s": 1200.0, "auc": 0.7},
        "peer_geo_2x2": fails,
        "peer_torch_2": lambda _: {"examples_per_s": 800.0, "auc": 0.7},
    }
    bench_train.report(4096, *bench_train.measure(4096, cases, rounds=3))

    lines = {line["case"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
    assert lines.keys() == {"ceiling", *cases}
    assert lines["in_process_2"]["of_plain_torch"] == 1.5
    assert lines["in_process_2"]["of_ceiling"] == 2.4
    assert lines["peer_geo_2x2"]["error"] == "not enough rows"
    assert calls == [4096]  # not in the rounds that follow
    table = report.train_table(list(lines.values()))
    assert "| in process, 2 threads | 1,200 (240%) |" in table
    assert "| PaddlePaddle 3.0, 2 x 2, geo, k = 100 | failed |" in table
    assert table.endswith("PaddlePaddle 3.0, 2 x 2, geo, k = 100, B=4096, failed: not enough rows")
