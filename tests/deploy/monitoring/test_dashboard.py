"""Panels of the dashboard; tests/e2e/test_prometheus.py asks their queries of a real Prometheus."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

DASHBOARD = Path(__file__).parents[3] / "deploy/monitoring/grafana/dashboard.json"
PANELS = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
UNITS = {
    "_seconds": "s",
    "_seconds_bucket": "s",
    "_seconds_sum": "s",
    "_bytes": "bytes",
    "_bytes_total": "Bps",
}
"""Of what is shown of a metric whose name ends so."""


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: str(panel["title"]))
def test_unit_is_that_of_the_metric(panel: dict[str, Any]) -> None:
    (name, *_) = re.findall(r"\b(?:ctr|rpc_server|process)_\w+", panel["targets"][0]["expr"]) or [
        "up"
    ]
    known = [unit for end, unit in UNITS.items() if name.endswith(end)]

    assert panel["fieldConfig"]["defaults"]["unit"] in (known or ["short", "percentunit", "reqps"])
