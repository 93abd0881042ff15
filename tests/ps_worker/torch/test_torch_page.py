"""The code of docs/torch.md runs."""

import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")

PAGE = (Path(__file__).parents[3] / "docs/torch.md").read_text()


def test_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRAINING_ROLE", raising=False)
    monkeypatch.chdir(tmp_path)
    first, *others = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    names = {"__name__": "script"}

    exec(compile(first, "docs/torch.md", "exec"), names)
    assert names["tables"].version == 20
    for code in others:  # which go on from its checkpoint
        exec(compile(code, "docs/torch.md", "exec"), names)

    assert names["tables"].version == 20
