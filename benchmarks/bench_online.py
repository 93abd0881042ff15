"""Seconds from an event to its being served: Redis, 2 servers, 2 workers and `ps-serve`, on this machine.

    python -m benchmarks.bench_online                                      # one JSON line
    python -m benchmarks.bench_online --rows-per-s 20000 --every-s 30 --seconds 300

A served model knows all events up to the time of its worker that is furthest behind. An event counts from its
time in Redis until a model with it is served. Beside this, single rows are asked for over HTTP, by turns of
the server that switches and of one that keeps its first model. Pairs of figures are p50 and p99.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import redis

from benchmarks.background import meanwhile
from benchmarks.bench_serve import of_http, samples_of, served
from benchmarks.bench_train import free_ports
from benchmarks.figures import say
from ctr_ps.ps_worker.extras.data_tools.generate import generate
from ctr_ps.ps_worker.predict.predictor import Predictor

MESSAGE_ROWS, LIMIT_S = 50, 120.0
Seen = tuple[float, float]  # when a model was first served, and up to when it knows events, in s
JOB = """
model = "fm"
data = {{stream = "redis://127.0.0.1:{port}/events-0,events-1", format = "criteo", pass_every = "10 min"}}
train.batch_size = 500
strategy.mode = "async"
checkpoint = {{dir = "{folder}/model", every_s = {every_s}, mode = "delta", full_every = {full_every}}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows-per-s", type=int, default=5_000)
    parser.add_argument("--every-s", type=float, default=3.0, help="seconds between deltas")
    parser.add_argument("--full-every", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    (port,), seen = free_ports(1), list[Seen]()
    took: tuple[list[float], list[float]] = ([], [])  # ms of requests, with switches and without
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-online-")))
        generate(folder / "data", rows=200_000, test_rows=1000, files=1, test_files=1, seed=1)
        start(stack, "redis-server", "--port", str(port), "--save", "", "--dir", str(folder))
        lines = next((folder / "data/train").iterdir()).read_bytes().splitlines()
        stack.enter_context(
            meanwhile(lambda is_over: produce(port, lines, options.rows_per_s, is_over))
        )
        (folder / "job.toml").write_text(JOB.format(port=port, folder=folder, **vars(options)))
        launch = [f"{Path(sys.executable).parent}/ps-launch", "--server-num=2", "--worker-num=2"]
        start(stack, *launch, f"--log-dir={folder}/log", str(folder / "job.toml"))
        model, end = folder / "model", time.monotonic() + LIMIT_S
        while not (model / "LATEST").exists():
            assert time.monotonic() < end, f"no checkpoint in {LIMIT_S:g} s"
            time.sleep(0.1)
        predictor = Predictor.load(model)
        requests = [samples_of(predictor, 1, seed) for seed in range(50)]
        ends = [stack.enter_context(served(str(model), reload_s))[0] for reload_s in (1.0, 0.0)]
        stack.enter_context(meanwhile(lambda is_over: watch(ends[0], model, seen, is_over)))
        asks = [of_http(each, predictor, requests) for each in ends]
        end = time.monotonic() + options.seconds
        for number in itertools.takewhile(lambda _: time.monotonic() < end, itertools.count()):
            begin = time.perf_counter()
            asks[number % 2](number % len(requests))
            took[number % 2].append(1e3 * (time.perf_counter() - begin))
            time.sleep(0.002)
    # Events are evenly distributed between the newest ones of two models in a row.
    pairs = itertools.pairwise(seen)
    waits = [now - np.linspace(before, newest, 100) for (_, before), (now, newest) in pairs]
    names = ("event_to_served_s", "request_ms", "request_without_switches_ms")
    found = zip(names, (np.concatenate(waits), *took), strict=True)
    figures = {name: np.quantile(each, [0.5, 0.99]).round(2).tolist() for name, each in found}
    say("online", **vars(options), switches=len(waits), **figures)


def start(stack: ExitStack, *command: str) -> None:
    """Runs a command until the stack ends."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stack.callback(process.wait, LIMIT_S)
    stack.callback(process.terminate)


def produce(port: int, lines: list[bytes], rows_per_s: int, is_over: threading.Event) -> None:
    """Adds messages of rows, by turns to both keys, as many as it is time for."""
    client = redis.Redis(port=port, retry=redis.retry.Retry(redis.backoff.ConstantBackoff(1), 9))
    begin = time.monotonic()
    for number in itertools.count():
        if is_over.wait(max(begin + number * MESSAGE_ROWS / rows_per_s - time.monotonic(), 0.0)):
            return
        first = number * MESSAGE_ROWS % (len(lines) - MESSAGE_ROWS)
        value = b"\n".join(lines[first : first + MESSAGE_ROWS])
        client.xadd(f"events-{number % 2}", {"value": value}, maxlen=100_000)


def watch(endpoint: str, folder: Path, seen: list[Seen], is_over: threading.Event) -> None:
    last = ""
    while not is_over.wait(0.05):
        with urllib.request.urlopen(f"http://{endpoint}/v2/models/ctr") as response:
            (version,) = json.load(response)["versions"]
        if version != last:
            now, last = time.time(), version
            workers = json.loads((folder / version / "MANIFEST.json").read_bytes())["workers"]
            times = [json.loads(each["position"])["time_ms"] for each in workers.values()]
            seen.append((now, min(times) / 1000))


if __name__ == "__main__":
    main()
