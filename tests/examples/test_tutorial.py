"""docs/tutorial.md: its commands and programs, in their order, as they stand on the page."""

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ctr_ps.ps_worker.cli import app as worker
from ctr_ps.ps_worker.extras.data_tools.cli import app as data
from ctr_ps.ps_worker.predict.checkpoint_cli import app as checkpoints
from ctr_ps.ps_worker.predict.inference import infer

PAGE = Path(__file__).parents[2] / "docs/tutorial.md"
COMMANDS = {"ps-data": data, "ps-worker": worker, "ps-ckpt": checkpoints}


def blocks() -> list[tuple[str, str]]:
    """Returns language and content of each code block of the page."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def run(command: str) -> str:
    name, *arguments = shlex.split(command)
    result = CliRunner().invoke(COMMANDS[name], arguments)
    assert result.exit_code == 0, f"{command}: {result.output} {result.exception!r}"
    return result.output


def test_page_can_be_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outputs: dict[str, str] = {}
    programs: list[str] = []
    for language, content in blocks():
        if language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(content, str(PAGE), "exec"), {})
            programs.append(printed.getvalue())
        else:
            outputs |= {line: run(line) for line in content.splitlines()}

    used = {" ".join(line.split()[:2]) for line in outputs}
    steps = ["data profile", "data init", "worker train", "worker infer", "ckpt export"]
    assert {f"ps-{step}" for step in steps} <= used
    best = next(output for output in outputs.values() if "best possible" in output)
    assert "auc=0.80" in best  # as the page says
    assert infer("model", ["clicks/part-00003.parquet"])["auc"] > 0.77
    assert len((tmp_path / "predictions.txt").read_text().splitlines()) == 5000
    probability, neighbours = programs
    assert 0 < float(probability.strip(" []\n")) < 1
    assert re.fullmatch(r"most like \w+: \['\w+', '\w+', '\w+'\]\n", neighbours)
