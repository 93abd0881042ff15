"""Each alert fires when its fault is there, and none for a healthy cluster: promtool's tests of rules."""

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.needs import is_missing

RULES = Path(__file__).parents[3] / "deploy/monitoring/alerts.yml"

CALLS = 'rpc_server_call_duration_seconds_count{rpc_method="p",rpc_response_status_code="%s"}'

HEALTHY = {
    'up{job="ctr-ps-server",instance="a"}': "1x60",
    'ctr_ps_workers{state="lost"}': "0x60",
    'ctr_ps_workers{state="present"}': "2x60",
    "ctr_ps_silence_max_seconds": "1x60",
    "ctr_ps_lease_seconds": "30x60",
    "ctr_ps_batches_total": "0+600x60",
    'ctr_ps_overload_refusals_total{instance="a"}': "0x60",
    CALLS % "OK": "0+900x60",
    'ctr_ps_push_staleness_bucket{le="4"}': "0+600x60",
    'ctr_ps_push_staleness_bucket{le="1024"}': "0+600x60",
    'ctr_ps_push_staleness_bucket{le="+Inf"}': "0+600x60",
    'ctr_ps_update_log_waiting_records{instance="a"}': "3x60",
    'ctr_ps_update_log_size_bytes{instance="a"}': "1e9x60",
    'ctr_ps_table_imbalance_ratio{table="t"}': "0.2x60",
    'ctr_ps_table_rows{table="t"}': "2e6x60",
    'ctr_ps_save_running{instance="a"}': "0x60",
    'ctr_worker_recent_calibration{instance="a"}': "1.1x60",
    'ctr_worker_publish_held{instance="a"}': "0x60",
    'ctr_worker_stream_lag_messages{instance="a",partition="0"}': "40x60",
    'ctr_serve_newest_row_age_seconds{instance="s"}': "8x60",
}
"""A sample a minute, for an hour."""

FAULTS: Mapping[str, tuple[float, Mapping[str, str]]] = {
    "CtrPsServerDown": (1.0, {'up{job="ctr-ps-server",instance="a"}': "0x60"}),
    "CtrPsWorkerLost": (0.0, {'ctr_ps_workers{state="lost"}': "1x60"}),
    "CtrPsWorkerSilent": (0.25, {"ctr_ps_silence_max_seconds": "16x60"}),
    "CtrPsTrainingStalled": (11.0, {"ctr_ps_batches_total": "600x60"}),
    "CtrPsOverloaded": (6.0, {'ctr_ps_overload_refusals_total{instance="a"}': "0+1x60"}),
    "CtrPsCallsFail": (6.0, {CALLS % "INTERNAL": "0+10x60"}),
    "CtrPsStaleGradients": (11.0, {'ctr_ps_push_staleness_bucket{le="4"}': "0+60x60"}),
    "CtrPsUpdateLogLags": (1.0, {'ctr_ps_update_log_waiting_records{instance="a"}': "1100x60"}),
    "CtrPsUpdateLogLarge": (10.0, {'ctr_ps_update_log_size_bytes{instance="a"}': "5.2e10x60"}),
    "CtrPsShardsUneven": (10.0, {'ctr_ps_table_imbalance_ratio{table="t"}': "1.1x60"}),
    "CtrPsSaveHangs": (30.0, {'ctr_ps_save_running{instance="a"}': "1x60"}),
    "CtrPsMiscalibrated": (15.0, {'ctr_worker_recent_calibration{instance="a"}': "0.45x60"}),
    "CtrPsPublishHeld": (0.0, {'ctr_worker_publish_held{instance="a"}': "1x60"}),
    "CtrPsStreamLags": (
        11.0,
        {'ctr_worker_stream_lag_messages{instance="a",partition="0"}': "1100+1x60"},
    ),
    "CtrPsServedModelOld": (5.0, {'ctr_serve_newest_row_age_seconds{instance="s"}': "3700x60"}),
}
"""Each alert's minutes from the first sample of its fault, a rate's being a minute later, and that fault."""

NEARLY: Mapping[str, str] = {
    "ctr_ps_silence_max_seconds": "14x60",
    CALLS % "CANCELLED": "0+90x60",
    CALLS % "INTERNAL": "0+8x60",
    'ctr_ps_push_staleness_bucket{le="4"}': "0+580x60",
    'ctr_ps_update_log_waiting_records{instance="a"}': "950x60",
    'ctr_ps_update_log_size_bytes{instance="a"}': "4.8e10x60",
    'ctr_ps_table_imbalance_ratio{table="t"}': "0.95x60",
    'ctr_worker_recent_calibration{instance="a"}': "1.9x60",
    'ctr_worker_recent_calibration{instance="b"}': "0.55x60",
    'ctr_worker_stream_lag_messages{instance="b",partition="1"}': "9e6-1e5x60",
    'ctr_serve_newest_row_age_seconds{instance="s"}': "3500x60",
}
"""Figures a little within what is no fault yet."""

pytestmark = pytest.mark.skipif(
    is_missing("promtool"), reason="needs promtool, of Debian's prometheus"
)


def firing(series: Mapping[str, str], tmp_path: Path, *, after_m: float = 50.0) -> set[str]:
    """Returns the alerts that fire after so many minutes of such series."""
    document: dict[str, Any] = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "15s",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": name, "values": values} for name, values in series.items()
                ],
                "promql_expr_test": [
                    {
                        "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                        "eval_time": f"{60 * after_m:.0f}s",
                        "exp_samples": [{"labels": "nothing", "value": -1}],
                    }
                ],
            }
        ],
    }
    path = tmp_path / "test.yml"
    path.write_text(json.dumps(document))  # JSON is YAML
    done = subprocess.run(
        ["promtool", "test", "rules", path], capture_output=True, text=True, check=False, timeout=60
    )
    # The expectation never holds, so that promtool shows what there is.
    assert "got:" in done.stdout + done.stderr, done.stdout + done.stderr
    return set(re.findall(r'alertname="(\w+)"', (done.stdout + done.stderr).partition("got:")[2]))


def test_nothing_fires_in_a_healthy_cluster(tmp_path: Path) -> None:
    assert firing(HEALTHY, tmp_path) == set()


@pytest.mark.parametrize("alert", FAULTS)
def test_alert_fires_alone_when_its_fault_is_there(alert: str, tmp_path: Path) -> None:
    assert firing({**HEALTHY, **FAULTS[alert][1]}, tmp_path) == {alert}


@pytest.mark.parametrize("alert", FAULTS)
def test_alert_waits_whether_its_fault_stays(alert: str, tmp_path: Path) -> None:
    begins_m, fault = FAULTS[alert]
    series = {**HEALTHY, **fault}

    assert alert in firing(series, tmp_path, after_m=begins_m + 0.25)
    if begins_m:
        assert alert not in firing(series, tmp_path, after_m=begins_m - 0.25)


def test_nothing_fires_a_little_within_the_limits(tmp_path: Path) -> None:
    assert firing({**HEALTHY, **NEARLY}, tmp_path) == set()


def test_predictions_of_too_many_clicks_are_as_bad_as_of_too_few(tmp_path: Path) -> None:
    too_many = {'ctr_worker_recent_calibration{instance="a"}': "2.1x60"}

    assert firing({**HEALTHY, **too_many}, tmp_path) == {"CtrPsMiscalibrated"}


def test_each_alert_has_a_fault_here() -> None:
    assert re.findall(r"- alert: (\w+)", RULES.read_text(encoding="utf-8")) == [*FAULTS]


def test_each_alert_says_what_to_do() -> None:
    text = RULES.read_text(encoding="utf-8")

    assert text.count("summary:") == text.count("action:") == len(FAULTS)
