"""Requests over HTTP and gRPC, in this process: right answers, and the right status for wrong requests."""

import asyncio
import gzip
import io
import json
import os
import shutil
import ssl
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import grpc
import numpy as np
import pytest
from aiohttp.test_utils import TestClient, TestServer
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ctr_ps.protos.errors import CheckpointError, DataError
from ctr_ps.protos.limits import MAX_MESSAGE_BYTES
from ctr_ps.protos.metrics.metrics_port import Readers
from ctr_ps.protos.v1 import open_inference_pb2 as messages
from ctr_ps.protos.wire.security.credentials import Credentials, bind, server_context
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_worker.data.slot_values import SlotValues
from ctr_ps.ps_worker.extras.inference_server import http_service, served_model
from ctr_ps.ps_worker.extras.inference_server.grpc_service import GrpcService, tensors_in
from ctr_ps.ps_worker.extras.inference_server.http_service import (
    HEADER_LENGTH,
    RUNNER_OPTIONS,
    HttpService,
)
from ctr_ps.ps_worker.extras.inference_server.http_service import tensors_in as http_tensors_in
from ctr_ps.ps_worker.extras.inference_server.served_model import (
    Counts,
    RequestMetrics,
    ServedModel,
)
from ctr_ps.ps_worker.extras.inference_server.tensors import DTYPES, Tensor
from ctr_ps.ps_worker.predict.predictor import Predictor
from tests.ps_worker.conftest import OfParquet
from tests.ps_worker.extras.inference_server.conftest import (
    NUM_ROWS,
    Trained,
    grpc_request,
    json_request,
)
from tests.support.certificates import CertificateAuthority
from tests.support.checkpoints import alter_manifest

T = TypeVar("T")
TOKEN = "reader-0123456789"


@pytest.fixture
def model(folder: Path) -> Iterator[ServedModel]:
    served = ServedModel(str(folder), name="ctr", max_rows=100, threads=2)
    yield served
    served.close()


@asynccontextmanager
async def http_client(
    model: ServedModel, credentials: Credentials | None = None, *, is_ready: bool = True
) -> AsyncIterator[TestClient]:
    readers = Readers(credentials or Credentials())
    service = HttpService(model, RequestMetrics(model), lambda: is_ready, readers)
    server = TestServer(service.application())
    await server.start_server(**RUNNER_OPTIONS)
    async with TestClient(server) as client:
        yield client


@asynccontextmanager
async def grpc_channel(
    model: ServedModel, credentials: Credentials | None = None
) -> AsyncIterator[grpc.aio.Channel]:
    credentials = credentials or Credentials()
    server = GrpcService(model, RequestMetrics(model), lambda: True).server(credentials)
    port = bind(server, "127.0.0.1:0", credentials)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(None)


async def posted(model: ServedModel, path: str = "ctr/infer", **request: Any) -> tuple[int, Any]:
    """Posts over HTTP; returns the status, and what the JSON of the answer says."""
    async with http_client(model) as client:
        response = await client.post(f"/v2/models/{path}", **request)
        return response.status, await response.json()


async def call(channel: grpc.aio.Channel, name: str, request: Any, token: str = "") -> Any:
    answer = getattr(messages, f"{name}Response", None)
    method = channel.unary_unary(
        f"/inference.GRPCInferenceService/{name}",
        request_serializer=type(request).SerializeToString,
        response_deserializer=answer.FromString,
    )
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    return await method(request, metadata=metadata, timeout=30)


@pytest.fixture
def expected(trained: Trained) -> np.ndarray:
    predictor = Predictor.load(trained.folder / "epoch-1")
    return predictor.predict_samples(trained.samples[:NUM_ROWS])


async def test_answer_is_what_the_predictor_says_and_names_request_model_and_version(
    model: ServedModel, trained: Trained, expected: np.ndarray
) -> None:
    async with http_client(model) as client:
        response = await client.post("/v2/models/ctr/infer", json=json_request(trained))
        answer = await response.json()
        assert (response.status, answer["id"]) == (200, "42")
        assert (answer["model_name"], answer["model_version"]) == ("ctr", "epoch-1")
        (output,) = answer["outputs"]
        assert (output["name"], output["shape"]) == ("probability", [NUM_ROWS])
        assert np.array_equal(np.array(output["data"], np.float32), expected)
        of_version = "/v2/models/ctr/versions/epoch-1/infer"
        again = await client.post(of_version, json=json_request(trained))
        assert (await again.json())["outputs"] == answer["outputs"]
    async with grpc_channel(model) as channel:
        answer = await call(channel, "ModelInfer", grpc_request(trained))
    assert (answer.model_name, answer.model_version, answer.id) == ("ctr", "epoch-1", "42")
    assert [each.name for each in answer.outputs] == ["probability"]
    assert np.array_equal(np.frombuffer(answer.raw_output_contents[0], "<f4"), expected)


async def test_output_is_binary_or_not_as_it_says_itself(
    model: ServedModel, trained: Trained
) -> None:
    async with http_client(model) as client:
        for of_all, own, is_binary in ((True, False, False), (False, True, True)):
            output = {"name": "probability", "parameters": {"binary_data": own}}
            request = {
                **json_request(trained),
                "parameters": {"binary_data_output": of_all},
                "outputs": [output],
            }
            response = await client.post("/v2/models/ctr/infer", json=request)
            assert (HEADER_LENGTH in response.headers) is is_binary


@pytest.mark.parametrize("datatype", DTYPES)
def test_values_of_grpc_are_in_the_field_of_their_type(datatype: str) -> None:
    request = messages.ModelInferRequest(model_name="ctr")
    tensor = request.inputs.add(name="x", datatype=datatype, shape=[2])
    size = datatype.removeprefix("U").removeprefix("INT").removeprefix("FP")
    kind = datatype.removesuffix(size).lower()
    field = f"{kind}{size if size == '64' or kind == 'fp' else ''}_contents"
    values = [1, 100]
    if datatype == "BOOL":
        field, values = "bool_contents", [False, True]
    getattr(tensor.contents, field).extend(values)

    (found,) = tensors_in(request)

    assert list(found.values) == values
    assert found.values.dtype == DTYPES[datatype]


def tensors_of(samples: list[Any]) -> list[tuple[str, str, list[int], list[Any]]]:
    """Returns the tensors of rows of `of_parquet`, lists as short as they can be, with those of null."""
    tags = [[] if value == "" else value for _, _, (_, value) in samples]
    num_rows, width = len(samples), max(1, *map(len, tags))
    found: list[tuple[str, str, list[int], list[Any]]] = [
        ("is_mobile", "BOOL", [num_rows], [mobile for _, (mobile,), _ in samples]),
        ("user", "INT64", [num_rows], [user for _, _, (user, _) in samples]),
        (
            "tags",
            "BYTES",
            [num_rows, width],
            [t for row in tags for t in row + [""] * (width - len(row))],
        ),
    ]
    if any(value == "" for _, _, (_, value) in samples):
        lengths = [-1 if value == "" else len(value) for _, _, (_, value) in samples]
        found.append(("tags.lengths", "INT32", [num_rows], lengths))
    return found


def raw(datatype: str, values: list[Any]) -> bytes:
    if datatype != "BYTES":
        return np.array(values, DTYPES[datatype]).tobytes()
    return b"".join(struct.pack("<I", len(each)) + each.encode() for each in values)


async def asked(
    how: str, client: TestClient, channel: grpc.aio.Channel, samples: list[Any]
) -> list[float]:
    """Returns the predictions of rows that are sent over HTTP or gRPC, their values as bytes or not."""
    tensors = tensors_of(samples)
    if how.startswith("grpc"):
        request = messages.ModelInferRequest(model_name="ctr")
        fields = {"BOOL": "bool", "INT64": "int64", "INT32": "int", "BYTES": "bytes"}
        for name, datatype, shape, values in tensors:
            tensor = request.inputs.add(name=name, datatype=datatype, shape=shape)
            if how == "grpc raw":
                request.raw_input_contents.append(raw(datatype, values))
                continue
            items = [each.encode() for each in values] if datatype == "BYTES" else values
            getattr(tensor.contents, f"{fields[datatype]}_contents").extend(items)
        answer = await call(channel, "ModelInfer", request)
        return np.frombuffer(answer.raw_output_contents[0], "<f4").tolist()
    inputs, parts = [], []
    for name, datatype, shape, values in tensors:
        head: dict[str, Any] = {"name": name, "datatype": datatype, "shape": shape}
        if how == "json":
            head["data"] = values
        else:
            parts.append(raw(datatype, values))
            head["parameters"] = {"binary_data_size": len(parts[-1])}
        inputs.append(head)
    text = json.dumps({"inputs": inputs}).encode()
    headers = {HEADER_LENGTH: str(len(text))} if parts else {}
    response = await client.post(
        "/v2/models/ctr/infer", data=b"".join([text, *parts]), headers=headers
    )
    return (await response.json())["outputs"][0]["data"]


@pytest.mark.parametrize("how", ["json", "binary", "grpc", "grpc raw"])
async def test_row_is_answered_alike_whatever_stands_beside_it(
    how: str, of_parquet: OfParquet
) -> None:
    """And as a row of a file: lists of any length, none, a missing one, numbers and booleans."""
    expected = Predictor.load(of_parquet.model).predict(of_parquet.data)
    model = ServedModel(str(of_parquet.model), name="ctr", max_rows=100, threads=1)
    rng = np.random.default_rng(3)

    async with http_client(model) as client, grpc_channel(model) as channel:
        for size in (1, 1, 1, 1, 1, 1, 2, 3, 8, 60):
            rows = rng.integers(0, len(expected), size)
            found = await asked(how, client, channel, [of_parquet.samples[i] for i in rows])
            np.testing.assert_allclose(found, expected[rows], rtol=1e-6)
    model.close()


def with_tasks(model: ServedModel, predictions: np.ndarray) -> served_model.Current:
    """Returns the model as one of two tasks, which predicts these [N, 2]."""
    predictor = SimpleNamespace(
        url="memory://another",
        schema=model.current.predictor.schema,
        tasks=("click", "bought"),
        slot_values=SlotValues(),
        predict_samples=lambda samples: predictions,
    )
    return replace(model.current, predictor=cast(Predictor, predictor), version="of-tasks")


async def test_each_task_is_an_output_of_its_own(model: ServedModel, trained: Trained) -> None:
    tensors = tensors_in(grpc_request(trained))
    predictions = np.arange(2 * NUM_ROWS, dtype=np.float32).reshape(NUM_ROWS, 2)
    current = with_tasks(model, predictions)

    async def outputs(*asked: str) -> dict[str, list[float]]:
        found = await model.infer(current, lambda: served_model.Request(tensors, asked))
        return {each.name: values.tolist() for each, values in found}

    click, bought = predictions.T.tolist()
    assert await outputs() == {"click": click, "bought": bought}
    assert await outputs("bought") == {"bought": bought}


async def test_metadata_names_the_columns(model: ServedModel) -> None:
    async with http_client(model) as client:
        found = await (await client.get("/v2/models/ctr")).json()
    async with grpc_channel(model) as channel:
        same = await call(channel, "ModelMetadata", messages.ModelMetadataRequest(name="ctr"))
    assert found["inputs"][0] == {"name": "I1", "datatype": "FP32", "shape": [-1]}
    assert found["inputs"][13] == {"name": "C1", "datatype": "BYTES", "shape": [-1, -1]}
    assert found["versions"] == list(same.versions) == ["epoch-1"]
    assert [each["name"] for each in found["inputs"]] == [each.name for each in same.inputs]
    assert [each["name"] for each in found["outputs"]] == [each.name for each in same.outputs]


def without(request: dict[str, Any], name: str) -> dict[str, Any]:
    return {**request, "inputs": [each for each in request["inputs"] if each["name"] != name]}


def with_tensor(request: dict[str, Any], tensor: dict[str, Any]) -> dict[str, Any]:
    return {**request, "inputs": [*without(request, tensor["name"])["inputs"], tensor]}


@pytest.mark.parametrize(
    ("path", "change", "status", "why"),
    [
        ("other/infer", lambda request: request, 404, "no model 'other' here"),
        ("ctr/versions/9/infer", lambda request: request, 404, "version '9' of 'ctr' is not"),
        ("ctr/nothing", lambda request: request, 404, "Not Found"),
        ("ctr/infer", lambda request: without(request, "C3"), 400, "missing: C3"),
        ("ctr/infer", lambda request: [request], 400, "is list, expected a JSON object"),
        ("ctr/infer", lambda request: {"inputs": 5}, 400, "'inputs' is int, expected a list"),
        ("ctr/infer", lambda request: {"inputs": [{}]}, 400, "'name' is missing in an input"),
        ("ctr/infer", lambda request: {"inputs": [5]}, 400, "an input is int, expected an object"),
        (
            "ctr/infer",
            lambda request: {"inputs": [{"name": "x" * 10_000}]},
            400,
            "'datatype' is missing in tensor 'xxx",
        ),
        (
            "ctr/infer",
            lambda request: with_tensor(request, {"name": "C1", "datatype": "BYTES", "shape": [1]}),
            400,
            "'data' is missing in tensor 'C1', which has ['datatype', 'name', 'shape']",
        ),
        (
            "ctr/infer",
            lambda request: with_tensor(
                request,
                {"name": "C1", "datatype": "INT64", "shape": [NUM_ROWS], "data": [1] * NUM_ROWS},
            ),
            400,
            "slot 1 ('C1') has 1, but the model was trained on text",
        ),
        ("ctr/infer", lambda request: {**request, "parameters": 5}, 400, "'parameters' is int"),
        ("ctr/infer", lambda request: {**request, "outputs": [{"name": "x"}]}, 404, "no output"),
    ],
)
async def test_wrong_requests_are_told_what_is_wrong(
    model: ServedModel,
    trained: Trained,
    path: str,
    change: Callable[[dict[str, Any]], Any],
    status: int,
    why: str,
) -> None:
    found, answer = await posted(model, path, json=change(json_request(trained)))

    assert (found, why in answer["error"]) == (status, True)


def tensor_of(shape: list[Any], data: Any) -> list[Tensor]:
    head = {"inputs": [{"name": "C1", "datatype": "BYTES", "shape": shape, "data": data}]}
    return http_tensors_in(head, b"")


@pytest.mark.parametrize(
    ("shape", "data"),
    [
        ([2, 2], [["a", "b"], ["c", "d"]]),
        ([2, 2], ["a", "b", "c", "d"]),
        ([4], ["a", "b", "c", "d"]),
        ([2, 2, 1], [[["a"], ["b"]], [["c"], ["d"]]]),
        ([4, 1], [["a"], ["b"], ["c"], ["d"]]),
    ],
)
def test_values_are_flat_or_nested_as_the_shape(shape: list[Any], data: Any) -> None:
    (tensor,) = tensor_of(shape, data)

    assert tensor.values == [b"a", b"b", b"c", b"d"]


@pytest.mark.parametrize(
    ("shape", "data"),
    [
        ([2, 2], [["a"], ["b", "c", "d"]]),
        ([2, 2], [["a", "b", "c", "d"]]),
        ([2, 2], [["a", "b"], "c", "d"]),
        ([2, 2], [[["a"], ["b"]], [["c"], ["d"]]]),
        ([4], [["a", "b"], ["c", "d"]]),
        ([2, 1], [["a"], [["b"]]]),
        ([], [["a"]]),
        ([0], [[]]),
        (["2", 1], [["a"], ["b"]]),
    ],
)
def test_values_that_are_nested_otherwise_are_refused(shape: list[Any], data: Any) -> None:
    with pytest.raises(DataError, match="tensor 'C1' has 'data' that does not fit shape"):
        tensor_of(shape, data)


@pytest.mark.parametrize(
    ("content", "length", "why"),
    [
        (b"{", None, "not JSON"),
        (b"[" * 100_000, None, "not JSON"),
        (b'{"id": ' + b"9" * 5_000 + b"}", None, "not JSON"),
        (b'{"id": 5}', None, "'id' is int, expected text"),
        (b"{}", "9" * 5_000, "expected a number of bytes"),
        (b"\xff\xfe{}", None, "not JSON"),
        (b"{}", "5", "is 5, but the request has 2 bytes"),
        (b"{}", "-1", "expected a number of bytes"),
        (b"{}abc", "2", "3 bytes after the last binary tensor belong to no tensor"),
        (
            b'{"inputs": [{"name": "a", "datatype": "FP32", "shape": [1], '
            b'"parameters": {"binary_data_size": 9}}]}',
            None,
            "binary_data_size 9, but only 0 bytes of the body are left",
        ),
    ],
)
async def test_bodies_that_are_not_of_the_protocol_are_refused(
    model: ServedModel, content: bytes, length: str | None, why: str
) -> None:
    headers = {} if length is None else {HEADER_LENGTH: length}

    status, answer = await posted(model, data=content, headers=headers)

    assert (status, why in answer["error"]) == (400, True)


async def test_request_has_up_to_sixteen_mib_and_four_of_json(
    model: ServedModel, trained: Trained
) -> None:
    """Beyond, a body is not read, or not parsed; what follows the JSON is told by its length alone."""
    content = json.dumps(json_request(trained)).encode()
    json_bytes = http_service.MAX_JSON_BYTES
    cases = [
        (json_bytes, None, 200),
        (json_bytes + 1, None, 413),
        (MAX_MESSAGE_BYTES - 1, json_bytes, 400),
        (MAX_MESSAGE_BYTES - 1, json_bytes + 1, 413),
        (MAX_MESSAGE_BYTES + 1, json_bytes, 413),
    ]

    async with http_client(model) as client:
        for size, length, status in cases:
            response = await client.post(
                "/v2/models/ctr/infer",
                data=io.BytesIO(content.ljust(size)),
                headers={} if length is None else {HEADER_LENGTH: str(length)},
            )
            assert response.status == status, (size, length)


@pytest.mark.parametrize(
    ("encoding", "content", "status", "why"),
    [
        ("gzip", gzip.compress(b"{}"), 400, "Content-Encoding is 'gzip': send the body unencoded"),
        ("identity", b" " * (MAX_MESSAGE_BYTES + 1), 413, "a request has up to 16 MiB"),
    ],
    ids=["compressed", "large"],
)
async def test_body_that_is_compressed_or_too_large_is_refused(
    model: ServedModel, encoding: str, content: bytes, status: int, why: str
) -> None:
    headers = {"Content-Encoding": encoding}

    found, answer = await posted(model, data=io.BytesIO(content), headers=headers)

    assert (found, why in answer["error"]) == (status, True)


async def test_request_that_is_no_http_is_refused_without_a_traceback(
    model: ServedModel, caplog: pytest.LogCaptureFixture
) -> None:
    content = b"POST /v2 HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"

    async with http_client(model) as client:
        reader, writer = await asyncio.open_connection(client.host, client.port)
        writer.write(content)
        assert b" 400 " in await reader.readline()
        writer.close()
    assert not [each for each in caplog.records if each.exc_info]


async def test_statuses_of_grpc_are_those_of_the_error(
    model: ServedModel, trained: Trained
) -> None:
    unknown, wrong = grpc_request(trained), grpc_request(trained)
    unknown.model_name = "other"
    del wrong.raw_input_contents[-1]

    async with grpc_channel(model) as channel:
        for request, code in (
            (unknown, grpc.StatusCode.NOT_FOUND),
            (wrong, grpc.StatusCode.INVALID_ARGUMENT),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(channel, "ModelInfer", request)
            assert refused.value.code() is code


async def test_whoever_has_no_token_may_only_ask_whether_it_is_ready(
    model: ServedModel, trained: Trained, tmp_path: Path
) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"reader {TOKEN}\n")
    credentials = Credentials(token_file=str(file))

    async with http_client(model, credentials) as client:
        assert (await client.get("/v2/health/ready")).status == 200
        assert (await client.get("/v2/models/ctr/ready")).status == 401
        for headers, status in (
            ({}, 401),
            ({"Authorization": "Bearer wrong-0123456789"}, 401),
            ({"Authorization": f"Bearer {TOKEN}"}, 200),
        ):
            for path in ("/v2", "/v2/models/ctr"):
                assert (await client.get(path, headers=headers)).status == status
            response = await client.post(
                "/v2/models/ctr/infer", json=json_request(trained), headers=headers
            )
            assert response.status == status
    async with grpc_channel(model, credentials) as channel:
        await call(channel, "ServerReady", messages.ServerReadyRequest())
        for name, request in (
            ("ServerMetadata", messages.ServerMetadataRequest()),
            ("ModelMetadata", messages.ModelMetadataRequest(name="ctr")),
            ("ModelReady", messages.ModelReadyRequest(name="ctr")),
            ("ModelInfer", grpc_request(trained)),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(channel, name, request)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        await call(channel, "ModelInfer", grpc_request(trained), TOKEN)


async def test_certificate_of_a_reader_is_enough_over_http(
    model: ServedModel, tmp_path: Path
) -> None:
    authority = CertificateAuthority(tmp_path)
    own = authority.credentials("server")

    def tls(common_name: str) -> ssl.SSLContext:
        caller = authority.credentials(common_name, common_name=common_name)
        context = ssl.create_default_context(cafile=str(authority.ca))
        context.load_cert_chain(caller.certificate, caller.key)
        return context

    service = HttpService(model, RequestMetrics(model), lambda: True, Readers(own))
    server = TestServer(service.application())
    await server.start_server(ssl=server_context(own))
    async with TestClient(server) as client:
        for name, is_reader in (("ctr-ps-reader.ranking", True), ("somebody", False)):
            response = await client.get("/v2/models/ctr", ssl=tls(name))
            assert response.ok is is_reader


async def test_one_that_ends_is_live_and_not_ready(model: ServedModel) -> None:
    async def health_of(channel: grpc.aio.Channel) -> int:
        request = health_pb2.HealthCheckRequest(service="inference.GRPCInferenceService")
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=30)
        return int(answer.status)

    in_grpc = GrpcService(model, RequestMetrics(model), lambda: False)
    server = in_grpc.server(Credentials())
    port = bind(server, "127.0.0.1:0", Credentials())
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        assert await health_of(channel) == health_pb2.HealthCheckResponse.SERVING
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        in_grpc.tell_end()
        assert await health_of(channel) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await watch.code() == grpc.StatusCode.UNAVAILABLE  # it does not put the end off
        ready = await call(channel, "ServerReady", messages.ServerReadyRequest())
        assert not ready.ready
        request = messages.ModelReadyRequest(name="ctr")
        assert not (await call(channel, "ModelReady", request)).ready
    await server.stop(None)
    async with http_client(model, is_ready=False) as client:
        assert (await client.get("/v2/health/live")).status == 200
        assert (await client.get("/v2/health/ready")).status == 503
        assert (await client.get("/v2/models/ctr/ready")).status == 503


async def test_body_that_does_not_come_gives_its_place_back(
    model: ServedModel, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_model, "MAX_WAITING", 1)
    monkeypatch.setattr(http_service, "BODY_LIMIT_S", 0.2)

    async with http_client(model) as client:
        reader, writer = await asyncio.open_connection(client.host, client.port)
        writer.write(
            b"POST /v2/models/ctr/infer HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\n{"
        )
        answer = await reader.readuntil(b"}")
        writer.close()
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"the request body did not arrive within 0.2 s" in answer
        response = await client.post("/v2/models/ctr/infer", json=json_request(trained))
        assert response.status == 200


async def test_too_many_requests_are_refused_with_the_time_to_come_again(
    model: ServedModel, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_model, "MAX_WAITING", 0)

    async with http_client(model) as client:
        response = await client.post("/v2/models/ctr/infer", json=json_request(trained))
        assert (response.status, response.headers["Retry-After"]) == (503, "1")
    async with grpc_channel(model) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(channel, "ModelInfer", grpc_request(trained))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_newer_checkpoint_is_served_once_it_is_whole(
    model: ServedModel, trained: Trained, folder: Path
) -> None:
    assert not model.reload(), "nothing newer"
    trained.publish(2, folder)

    assert model.reload()

    assert (model.current.version, model.counts.reloads) == ("epoch-2", 1)
    assert not model.reload()


def test_damaged_checkpoint_is_told_once_and_the_one_before_goes_on(
    model: ServedModel, trained: Trained, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained.publish(2, folder)
    (data,) = (folder / "epoch-2").glob("data-*")
    rows = max(filter(Path.is_file, data.rglob("*")), key=lambda file: file.stat().st_size)
    content = bytearray(rows.read_bytes())
    content[len(content) // 2] ^= 1  # which only checksums tell
    rows.write_bytes(content)

    assert not model.reload()
    assert not model.reload()

    assert model.current.version == "epoch-1"
    assert model.counts.failed_reloads == 1
    assert sum("still serving version=epoch-1" in each for each in caplog.messages) == 1
    shutil.rmtree(folder / "epoch-2")
    trained.publish(3, folder)
    assert model.reload()


@pytest.mark.parametrize("fault", [MemoryError(), TypeError("odd"), KeyError("dense")])
def test_newer_model_that_cannot_predict_a_row_is_not_served(
    model: ServedModel,
    trained: Trained,
    folder: Path,
    fault: Exception,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(*_: object) -> None:
        raise fault

    trained.publish(2, folder)
    with monkeypatch.context() as patched:
        patched.setattr(served_model.Predictor, "predict_samples", fails)
        assert not model.reload()
        assert not model.reload()

    assert (model.current.version, model.counts.failed_reloads) == ("epoch-1", 1)
    assert sum(repr(fault) in each for each in caplog.messages) == 1
    assert model.reload()


def test_checkpoint_that_would_be_read_beside_its_arrays_is_not_served(
    model: ServedModel, trained: Trained, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With right checksums, which anybody can write."""
    trained.publish(2, folder)
    alter_manifest(folder / "epoch-2", lambda document: document["tables"][0].update(num_shards=0))

    assert not model.reload()

    assert model.current.version == "epoch-1"
    assert "has 0 shards, expected a power of two" in caplog.text


async def test_mapped_files_that_change_are_an_error_of_the_server(
    trained: Trained, folder: Path, expected: np.ndarray
) -> None:
    served = ServedModel(str(folder), name="ctr", max_rows=100, threads=1, maps=True)
    request = grpc_request(trained)

    def decoded() -> served_model.Request:
        return served_model.Request(tensors_in(request), [])

    outputs = await served.infer(served.current, decoded)
    assert np.array_equal(outputs[0][1], expected)
    for file in folder.glob("epoch-1/data-*/table.*"):
        os.truncate(file, 100)
    with pytest.raises(CheckpointError, match="was changed while it was mapped"):
        await served.infer(served.current, decoded)
    served.close()


def test_storage_that_is_away_again_is_told_again(
    model: ServedModel, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (1, 2):
        folder.rename(folder.with_name("away"))
        assert not model.reload()
        assert not model.reload()
        assert model.counts.failed_reloads == number
        folder.with_name("away").rename(folder)
        assert not model.reload()
    assert sum("still serving version=epoch-1" in each for each in caplog.messages) == 2


def test_fault_that_comes_again_after_a_newer_model_is_told_again(
    model: ServedModel, trained: Trained, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(url: str) -> None:
        raise OSError("the storage is away")

    for epoch in (2, 3):
        trained.publish(epoch, folder)
        with monkeypatch.context() as patched:
            patched.setattr(Checkpoint, "open", away)
            assert not model.reload()
        assert model.reload()

    assert (model.counts.reloads, model.counts.failed_reloads) == (2, 2)


def test_newer_model_that_takes_or_gives_other_tensors_is_not_served(
    model: ServedModel, trained: Trained, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = with_tasks(model, np.empty((0, 2), np.float32))
    trained.publish(2, folder)
    with monkeypatch.context() as patched:
        patched.setattr(model, "_load", lambda *_: other)

        assert not model.reload()

    assert (model.current.version, model.counts.failed_reloads) == ("epoch-1", 1)
    assert model.reload()


async def test_request_for_a_version_is_answered_by_it_though_a_newer_one_comes(
    model: ServedModel, trained: Trained, folder: Path, expected: np.ndarray
) -> None:
    request = grpc_request(trained)

    current = model.meant("ctr", "epoch-1")
    trained.publish(2, folder)
    assert model.reload()
    outputs = await model.infer(current, lambda: served_model.Request(tensors_in(request), []))
    assert np.array_equal(outputs[0][1], expected)


async def test_fault_while_looking_for_a_newer_model_does_not_end_the_looking(
    model: ServedModel, trained: Trained, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = iter([RuntimeError("once"), MemoryError("twice")])
    reload = model.reload

    def sometimes() -> bool:
        for fault in faults:
            raise fault
        return reload()

    monkeypatch.setattr(model, "reload", sometimes)
    trained.publish(2, folder)

    looking = asyncio.create_task(model.reload_every(0.001))
    while model.counts.reloads == 0:
        assert not looking.done()
        await asyncio.sleep(0.001)
    looking.cancel()
    assert model.counts.failed_reloads == 2


async def test_faults_and_calls_given_up_are_no_successes(
    model: ServedModel, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = RequestMetrics(model)

    async def fails(*_: object) -> None:
        raise RuntimeError("a fault")

    async def waits(*_: object) -> None:
        await asyncio.Event().wait()

    def statuses() -> set[str]:
        return {
            each.labels["status"]
            for family in metrics.collect()
            for each in family.samples
            if each.labels.get("method") == "ModelInfer"
        }

    server = GrpcService(model, metrics, lambda: True).server(Credentials())
    port = bind(server, "127.0.0.1:0", Credentials())
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for infer in (fails, waits):
            monkeypatch.setattr(model, "infer", infer)
            with pytest.raises((grpc.aio.AioRpcError, TimeoutError)):
                await asyncio.wait_for(call(channel, "ModelInfer", grpc_request(trained)), 1)
        while len(statuses()) < 2:
            await asyncio.sleep(0.01)
    await server.stop(None)
    assert statuses() == {"UNKNOWN", "CANCELLED"}


async def test_method_that_a_path_has_not_is_told_those_that_it_has(model: ServedModel) -> None:
    async with http_client(model) as client:
        response = await client.post("/v2")
        assert (response.status, response.headers["Allow"]) == (405, "GET,HEAD")


async def test_metrics_tell_requests_rows_and_the_version(
    model: ServedModel, trained: Trained
) -> None:
    metrics = RequestMetrics(model)

    service = HttpService(model, metrics, lambda: True, Readers(Credentials()))
    async with TestClient(TestServer(service.application())) as client:
        await client.post("/v2/models/ctr/infer", json=json_request(trained))
        await client.get("/v2/models/other")
        await client.get("/wp-login.php")
    samples = {
        (each.name, *sorted(each.labels.values())): each.value
        for family in metrics.collect()
        for each in family.samples
    }
    count = "ctr_serve_request_duration_seconds_count"
    assert samples[count, "200", "ModelInfer", "http"] == 1
    assert samples[count, "404", "ModelMetadata", "http"] == 1
    assert samples[count, "404", "http", "unknown"] == 1
    assert samples["ctr_serve_rows_total",] == NUM_ROWS
    assert samples["ctr_serve_model_info", "ctr", "epoch-1"] == 1


def test_page_and_metrics_show_each_figure_under_its_name(model: ServedModel) -> None:
    metrics = RequestMetrics(model)
    model.counts = Counts(rows=70, reloads=5, failed_reloads=3)
    metrics.ended("http", "ModelInfer", "200", 0.02)

    with model.place():
        status = metrics.status()

    samples = {
        (each.name, each.labels.get("le")): each.value
        for family in metrics.collect()
        for each in family.samples
    }
    name = "ctr_serve_request_duration_seconds"
    assert samples[f"{name}_sum", None] == 0.02
    assert [samples[f"{name}_bucket", le] for le in ("0.01", "0.025", "+Inf")] == [0, 1, 1]

    figures = {**status.figures}
    figures.pop("seconds since the model was loaded")
    assert figures == {
        "version": "epoch-1",
        "rows": 70,
        "reloads": 5,
        "reloads that failed": 3,
        "requests waiting": 1,
    }
    series = {each.name: each.value for each in status.series}
    assert series == {"requests a second": 1, "rows a second": 70}
    assert "ctr_serve_newest_row_age_seconds" not in {name for name, _ in samples}, "of files"


@pytest.mark.parametrize(
    ("workers", "age"),
    [
        # (age in seconds, pass, whether it had no more to read)
        ([(90, 2, False), (40, 2, False)], 90),
        ([(90, 2, True), (40, 2, False)], 40),
        ([(90, 1, False), (40, 2, False)], 40),
        ([(90, 2, False), (40, 2, True)], 90),
        ([(90, 2, True), (40, 1, True)], 40),
        ([(90, 2, True), (10_000_000, 2, False), (40, 2, True)], 10_000_000),
        ([(-60, 1, False)], 0),
    ],
)
def test_age_of_the_newest_row_is_that_of_the_worker_furthest_behind(
    workers: list[tuple[int, int, bool]],
    age: int,
    model: ServedModel,
    trained: Trained,
    folder: Path,
) -> None:
    """One without more to read is not behind, however old its last row is."""
    trained.publish(2, folder)
    now = time.time()

    def read_from_a_stream(document: dict[str, Any]) -> None:
        worker = document["workers"]["0"]
        document["workers"] = {
            str(number): worker
            | {
                "position": json.dumps(
                    {
                        "epoch": epoch,
                        "rows": 7,
                        "before_ms": None,
                        "time_ms": int(1000 * (now - age)),
                        "is_idle": is_idle,
                    }
                ),
                "partitions": {f"clicks/{number}": "7"},
            }
            for number, (age, epoch, is_idle) in enumerate(workers)
        }
        document["workers"]["7"] = worker  # which has no partition

    alter_manifest(folder / "epoch-2", read_from_a_stream)
    metrics = RequestMetrics(model)
    assert model.reload()

    figures = {**metrics.status().figures}
    (found,) = [
        sample.value
        for family in metrics.collect()
        for sample in family.samples
        if sample.name == "ctr_serve_newest_row_age_seconds"
    ]
    assert age <= found <= age + time.time() - now + 0.001
    assert age <= figures["seconds since the newest row"] <= age + 1 + time.time() - now
