"""docs/fleet.md leaves nothing out, and its code runs."""

import re
from pathlib import Path

import numpy as np
import pytest

from ctr_ps.ps_worker import fleet
from ctr_ps.ps_worker.fleet import metrics, optimizer, util

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/fleet.md").read_text()
CODE = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
NAMED_OTHERWISE = {"DistributedOptimizer", "RoleMaker"}  # only for annotations


def test_code_runs_in_its_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRAINING_ROLE", raising=False)
    monkeypatch.chdir(tmp_path)
    Path("criteo").mkdir()
    row = "\t".join(["{label}", *("1" for _ in range(13)), *("{label}" for _ in range(26))])
    for part in range(2):
        rows = "".join(row.format(label=number % 2) + "\n" for number in range(100))
        Path(f"criteo/part-{part}").write_text(rows)
    names = {"__name__": "script"}

    for code in CODE:
        if "init_worker" in code and "fleet.init()" not in code:
            fleet.init()
        exec(compile(code, "docs/fleet.md", "exec"), names)

    assert Path("output/epoch-1/MANIFEST.json").is_file()
    assert np.isfinite(names["step"].loss)


def test_every_public_name_is_there() -> None:
    words = set(re.findall(r"\w+", PAGE))

    assert set(fleet.__all__) - NAMED_OTHERWISE <= words
    assert set(optimizer.__all__) - {"Optimizer", "require_optimizer"} <= words
    for module in (metrics, util):
        own = {name for name, value in vars(module).items() if _is_own(module, name, value)}
        assert own <= words


def _is_own(module: object, name: str, value: object) -> bool:
    return not name.startswith("_") and getattr(value, "__module__", "") == module.__name__


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#]+)[^)]*\)", PAGE))
def test_links_lead_somewhere(link: str) -> None:
    assert (ROOT / "docs" / link).exists()
