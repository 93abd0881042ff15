"""Latency of `ps-serve`, beside that of the Predictor in this process, for the same rows; time to load.

    python -m benchmarks.bench_serve                      # one JSON line per case
    python -m benchmarks.bench_serve --rows 10000000 --requests 5000    # 2 GB of disk, 3 of memory

One client asks for 1 and for 100 examples at a time, over HTTP (JSON) and gRPC, one request after the other.
The model is the CTR-DNN of the other benchmarks. Milliseconds are medians and 99th percentiles. `load` is the
time from Predictor.load to the first prediction, with kernels compiled and the files in the page cache.
"""

import argparse
import http.client
import json
import re
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
from threadpoolctl import threadpool_limits

from benchmarks.bench_table import all_keys
from benchmarks.bench_wire import push_id
from benchmarks.figures import say
from ctr_ps.protos.gradients import Gradients, SparseGrad
from ctr_ps.protos.store import SaveRequest
from ctr_ps.protos.v1 import open_inference_pb2 as messages
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.checkpoints.attachments import attachments_of
from ctr_ps.ps_worker.data.user_code.samples import Sample
from ctr_ps.ps_worker.job import override_job
from ctr_ps.ps_worker.job.model import declare, specs_of
from ctr_ps.ps_worker.predict.predictor import Predictor
from ctr_ps.ps_worker.run.plan import plan_of

SIZES = (1, 100)
ROWS_A_PUSH = 1_000_000
DISTINCT = 50
"""Requests that differ; their rows stay in caches, as those of a popular page do."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the table")
    parser.add_argument("--requests", type=int, default=2_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-serve-") as name, threadpool_limits(1):
        url = str(Path(name) / "model")
        save_model(url, options.rows)
        for _ in range(2):  # the first compiles
            start = time.perf_counter()
            predictor = Predictor.load(url)
            predictor.predict_samples(samples_of(predictor, 1, seed=0))
            load_s = time.perf_counter() - start
        say("serve", case="load", rows=options.rows, ms=round(1e3 * load_s))
        with served(url) as (at_http, at_grpc):
            for size in SIZES:
                requests = [samples_of(predictor, size, seed) for seed in range(DISTINCT)]
                cases = {
                    "predictor": of_predictor(predictor, requests),
                    "http json": of_http(at_http, predictor, requests),
                    "grpc": of_grpc(at_grpc, predictor, requests),
                }
                for case, ask in cases.items():
                    seconds = timed(ask, options.requests)
                    p50, p99 = 1e3 * np.quantile(seconds, [0.5, 0.99])
                    say(
                        "serve",
                        case=case,
                        examples=size,
                        p50_ms=round(float(p50), 3),
                        p99_ms=round(float(p99), 3),
                    )


def save_model(url: str, rows: int) -> None:
    """Saves a model with `rows` rows."""
    job = override_job({}, ["model.dim=10", "model.hidden=[400, 400, 400]"], source="benchmark")
    plan = plan_of(job)
    store = ParameterStore()
    declare(store, specs_of(plan.model, job))
    (table,) = plan.model.tables
    for number, keys in enumerate(np.split(all_keys(rows), range(ROWS_A_PUSH, rows, ROWS_A_PUSH))):
        grad = SparseGrad(keys, np.ones((keys.size, table.dim), np.float32), examples=1)
        push = push_id(number, incarnation=1)
        store.push_grad(Gradients(sparse={table.name: grad}), push).result()
    store.save(SaveRequest(url=url, attachments=attachments_of(job, plan.schema)))


def timed(ask: Callable[[int], object], num_requests: int) -> list[float]:
    """Returns the seconds of each request, after some that do not count."""
    seconds = []
    for number in range(num_requests + DISTINCT):
        start = time.perf_counter()
        ask(number % DISTINCT)
        seconds.append(time.perf_counter() - start)
    return seconds[DISTINCT:]


def samples_of(predictor: Predictor, size: int, seed: int) -> list[Sample]:
    """Returns examples of random numbers and texts."""
    rng, schema = np.random.default_rng(seed), predictor.schema
    return [
        (
            None,
            rng.random(len(schema.dense)).round(3).tolist(),
            [f"{value:08x}" for value in rng.integers(0, 2**32, len(schema.slots))],
        )
        for _ in range(size)
    ]


@contextmanager
def served(url: str, reload_s: float = 0.0) -> Iterator[tuple[str, str]]:
    """Runs ps-serve, which looks for newer models every so many seconds; lends host:port of HTTP and gRPC."""
    program = "from ctr_ps.ps_worker.extras.inference_server.cli import main; main()"
    command = [sys.executable, "-c", program, url, "--http", "0", "--grpc", "0"]
    command += ["--reload-every", str(reload_s)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    found: dict[str, str] = {}
    try:
        assert process.stderr is not None
        while len(found) < 2:
            line = process.stderr.readline()
            if not line:
                raise SystemExit("ps-serve has ended")
            if said := re.search(r"(HTTP|gRPC) at (\S+)", line):
                found[said[1]] = said[2]
        yield found["HTTP"], found["gRPC"]
    finally:
        process.terminate()
        process.wait(30)


def of_predictor(predictor: Predictor, requests: list[list[Sample]]) -> Callable[[int], object]:
    """Asks in this process."""
    return lambda number: predictor.predict_samples(requests[number])


def of_http(
    endpoint: str, predictor: Predictor, requests: list[list[Sample]]
) -> Callable[[int], object]:
    """Asks over HTTP, with bodies that are made before."""
    bodies = [json.dumps({"inputs": inputs_of(predictor, each)}).encode() for each in requests]
    connection = http.client.HTTPConnection(endpoint)

    def ask(number: int) -> bytes:
        connection.request("POST", "/v2/models/ctr/infer", bodies[number])
        response = connection.getresponse()
        content = response.read()
        assert response.status == 200, content
        return content

    return ask


def inputs_of(predictor: Predictor, samples: list[Sample]) -> list[dict[str, object]]:
    """Returns the tensors of a request, as JSON."""
    schema, size = predictor.schema, [len(samples)]
    numbers = [
        {
            "name": each.name,
            "datatype": "FP32",
            "shape": size,
            "data": [row[1][i] for row in samples],
        }
        for i, each in enumerate(schema.dense)
    ]
    texts = [
        {"name": each, "datatype": "BYTES", "shape": size, "data": [row[2][i] for row in samples]}
        for i, each in enumerate(schema.slots)
    ]
    return numbers + texts


def of_grpc(
    endpoint: str, predictor: Predictor, requests: list[list[Sample]]
) -> Callable[[int], object]:
    """Asks over gRPC, with messages that are made before."""
    made = []
    for samples in requests:
        request = messages.ModelInferRequest(model_name="ctr")
        for tensor in inputs_of(predictor, samples):
            request.inputs.add(
                name=tensor["name"], datatype=tensor["datatype"], shape=tensor["shape"]
            )
            request.raw_input_contents.append(raw_of(tensor["datatype"], tensor["data"]))
        made.append(request)
    method = grpc.insecure_channel(endpoint).unary_unary(
        "/inference.GRPCInferenceService/ModelInfer",
        request_serializer=messages.ModelInferRequest.SerializeToString,
        response_deserializer=messages.ModelInferResponse.FromString,
    )
    return lambda number: method(made[number], timeout=30)


def raw_of(datatype: object, values: object) -> bytes:
    """Returns values as the bytes of a tensor."""
    assert isinstance(values, list)
    if datatype == "FP32":
        return np.array(values, "<f4").tobytes()
    return b"".join(struct.pack("<I", len(text)) + text.encode() for text in values)


if __name__ == "__main__":
    main()
