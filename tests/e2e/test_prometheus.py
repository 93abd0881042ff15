"""A real Prometheus scrapes a real cluster, and each query of the dashboard returns data."""

import json
import math
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ctr_ps.ps_worker.extras.data_tools.generate import generate
from tests.support.commands import COMMANDS, ROOT
from tests.support.needs import is_missing
from tests.support.processes import free_port, started

DASHBOARD = ROOT / "deploy/monitoring/grafana/dashboard.json"
TOKEN = "a-token-of-this-test"
LIMIT_S = 120.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(is_missing("prometheus"), reason="needs prometheus, as Debian's package"),
]


@dataclass
class Scraped:
    """A cluster that trains, and the Prometheus that scrapes it."""

    url: str
    endpoints: dict[str, list[str]]

    def query(self, text: str) -> list[dict[str, Any]]:
        url = f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': text})}"
        with urllib.request.urlopen(url, timeout=10) as response:
            return list(json.load(response)["data"]["result"])

    def first(self, text: str) -> list[dict[str, Any]]:
        """Returns the samples of a query once there are some that are numbers."""
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            found = [each for each in self.query(text) if math.isfinite(float(each["value"][1]))]
            if found:
                return found
            time.sleep(0.5)
        raise AssertionError(f"no data: {text}")


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    folder = tmp_path_factory.mktemp("scraped")
    generate(folder / "data", rows=60_000, test_rows=100, files=4, test_files=1, seed=1)
    settings = [
        'data.train=["data/train/part-*"]',
        'data.schema="data/schema.toml"',
        'strategy.mode="async"',
        "train.epochs=1000",
        'checkpoint.dir="model"',
        "checkpoint.every_steps=200",
    ]
    (folder / "job.toml").write_text('model = "fm"\n')
    sizes = ["--server-num=2", "--worker-num=2", "--durability=log"]
    overrides = [f"--set={setting}" for setting in settings]
    environment = {**os.environ, "CTR_PS_METRICS": "0", "CTR_PS_TOKEN": TOKEN}
    old = Path.cwd()
    with ExitStack() as stack:
        os.chdir(folder)
        stack.callback(os.chdir, old)
        stack.enter_context(
            started([COMMANDS / "ps-launch", *sizes, folder / "job.toml", *overrides], environment)
        )
        endpoints = {
            "ctr-ps-server": [endpoint_in(folder / f"log/pserver.{each}.log") for each in (0, 1)],
            "ctr-ps-worker": [endpoint_in(folder / f"log/trainer.{each}.log") for each in (0, 1)],
        }
        (folder / "prometheus.json").write_text(json.dumps(configuration(endpoints)))
        with free_port() as port:
            pass
        stack.enter_context(
            started(
                [
                    "prometheus",
                    f"--config.file={folder}/prometheus.json",
                    f"--storage.tsdb.path={folder}/tsdb",
                    f"--web.listen-address=127.0.0.1:{port}",
                ]
            )
        )
        found = Scraped(f"http://127.0.0.1:{port}", endpoints)
        wait_until_ready(found.url)
        yield found


def endpoint_in(log: Path) -> str:
    """Returns host:port of the port for metrics, as a process's log says."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        if log.exists() and (
            found := re.search(r"metrics at http://(\S+)/metrics", log.read_text())
        ):
            return found[1]
        time.sleep(0.1)
    raise AssertionError(f"{log} names no port: {log.read_text() if log.exists() else ''}")


def configuration(endpoints: dict[str, list[str]]) -> dict[str, Any]:
    return {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ROOT / "deploy/monitoring/alerts.yml")],
        "scrape_configs": [
            {
                "job_name": job,
                "authorization": {"credentials": TOKEN},
                "static_configs": [{"targets": targets}],
            }
            for job, targets in endpoints.items()
        ],
    }


def wait_until_ready(url: str) -> None:
    end = time.monotonic() + LIMIT_S
    while True:
        try:
            urllib.request.urlopen(f"{url}/-/ready", timeout=5).close()
        except urllib.error.URLError:
            assert time.monotonic() < end
            time.sleep(0.1)
        else:
            return


def queries() -> list[str]:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    found = [target["expr"] for panel in panels for target in panel["targets"]]
    # The cluster trains on files, and nothing serves its model.
    return [each for each in found if "_stream_" not in each and "ctr_serve_" not in each]


def test_processes_are_up(scraped: Scraped) -> None:
    for job, endpoints in scraped.endpoints.items():
        scraped.first(f'count(up{{job="{job}"}} == 1) == {len(endpoints)}')
        found = {each["metric"]["instance"] for each in scraped.query(f'up{{job="{job}"}} == 1')}
        assert found == set(endpoints)


@pytest.mark.parametrize("query", queries())
def test_query_of_the_dashboard_returns_data(scraped: Scraped, query: str) -> None:
    assert scraped.first(query.replace("$__rate_interval", "10s"))


def test_figures_of_servers_and_workers_agree(scraped: Scraped) -> None:
    """Each server counts the batches of all workers, a little after they were computed."""
    scraped.first("ctr_ps_batches_total > 100")
    batches = [float(each["value"][1]) for each in scraped.query("ctr_ps_batches_total")]
    (steps,) = scraped.query("sum(ctr_worker_steps_total)")

    assert len(batches) == 2
    assert all(each == pytest.approx(float(steps["value"][1]), rel=0.5) for each in batches)


def test_rules_are_evaluated_without_an_error(scraped: Scraped) -> None:
    with urllib.request.urlopen(f"{scraped.url}/api/v1/rules", timeout=10) as response:
        (group,) = json.load(response)["data"]["groups"]

    assert len(group["rules"]) == 15
    assert [rule.get("lastError", "") for rule in group["rules"]] == [""] * 15


def test_without_the_token_nothing_is_shown(scraped: Scraped) -> None:
    for endpoint in scraped.endpoints["ctr-ps-server"] + scraped.endpoints["ctr-ps-worker"]:
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=10)
        assert refused.value.code == 401
        refused.value.close()
