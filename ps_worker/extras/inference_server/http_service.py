"""The protocol over HTTP: JSON, with the extension for binary tensors.

GET  /v2, /v2/health/live, /v2/health/ready
GET  /v2/models/NAME[/versions/VERSION][/ready]
POST /v2/models/NAME[/versions/VERSION]/infer
"""

import asyncio
import contextlib
import json
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from math import isfinite
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from ctr_ps.protos.errors import CtrPsError, DataError, OverloadedError
from ctr_ps.protos.limits import MAX_MESSAGE_BYTES
from ctr_ps.protos.metrics.metrics_port import Readers
from ctr_ps.protos.runtime.environment import memory_error_of, own_version
from ctr_ps.ps_worker.extras.inference_server.served_model import (
    Current,
    Request,
    RequestMetrics,
    ServedModel,
    UnknownModelError,
)
from ctr_ps.ps_worker.extras.inference_server.tensors import (
    EXTENSIONS,
    Tensor,
    raw_of,
    tensor_of_raw,
    tensor_of_values,
)

HEADER_LENGTH = "Inference-Header-Content-Length"
"""Header with the length of the JSON before binary tensors."""

MAX_ERROR_CHARACTERS = 2_000

BODY_LIMIT_S = 10.0  # seconds in which the body of a request has to come: 16 MiB at 14 Mbit/s

_CLIENT_FAULTS = (HttpProcessingError, web.RequestPayloadError)


def _is_no_client_fault(record: logging.LogRecord) -> bool:
    """Whether an event of aiohttp is worth a line: a client has been told its fault."""
    return not (record.exc_info and isinstance(record.exc_info[1], _CLIENT_FAULTS))


_aiohttp_logger = logging.getLogger(f"{__name__}.aiohttp")
_aiohttp_logger.addFilter(_is_no_client_fault)

RUNNER_OPTIONS: Mapping[str, Any] = {
    "access_log": None,
    "auto_decompress": False,  # bodies come as they are
    "logger": _aiohttp_logger,
}
"""With which an application's runner is made."""

MAX_JSON_BYTES = 4 * 2**20
"""Of a request: while JSON is parsed, a second at most, nobody is answered. Numbers may be binary tensors."""

_SIZE = (
    f"a request has up to {MAX_MESSAGE_BYTES // 2**20} MiB, its JSON up to {MAX_JSON_BYTES // 2**20} MiB: "
    f"send more as binary tensors"
)

OPEN_PATHS = frozenset({"/v2/health/live", "/v2/health/ready"})
"""Whether a process is live and ready, anybody may ask."""


class HttpService:
    """Answers the requests of the protocol."""

    def __init__(
        self,
        model: ServedModel,
        metrics: RequestMetrics,
        is_ready: Callable[[], bool],
        readers: Readers,
    ) -> None:
        """Answers with `model` whom `readers` lets pass, and tells `metrics` of each request."""
        self._model = model
        self._metrics = metrics
        self._is_ready = is_ready
        self._readers = readers
        self._num_in_flight = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    async def finish(self, limit_s: float) -> None:
        """Waits until the requests in flight are answered, at most `limit_s` seconds.

        aiohttp's own end drops the rest of a body that is still on its way.
        """
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_idle.wait(), limit_s)

    def application(self) -> web.Application:
        """Returns the routes."""
        application = web.Application(
            client_max_size=MAX_MESSAGE_BYTES, middlewares=[self._answered]
        )
        router = application.router
        router.add_get("/v2", self._server_metadata, name="ServerMetadata")
        router.add_get("/v2/health/live", self._live, name="ServerLive")
        router.add_get("/v2/health/ready", self._ready, name="ServerReady")
        for versions, suffix in (("", ""), ("/versions/{version}", "OfVersion")):
            model = f"/v2/models/{{name}}{versions}"
            router.add_get(model, self._model_metadata, name=f"ModelMetadata{suffix}")
            router.add_get(f"{model}/ready", self._ready, name=f"ModelReady{suffix}")
            router.add_post(f"{model}/infer", self._infer, name=f"ModelInfer{suffix}")
        return application

    @web.middleware
    async def _answered(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answers and counts; once the process ends, closes connections."""
        self._num_in_flight += 1
        self._is_idle.clear()
        start, status = time.perf_counter(), 500
        try:
            response = await self._answer(request, handler)
            status = response.status
            if not self._is_ready():
                response.force_close()
            return response
        finally:
            self._metrics.ended("http", _method(request), str(status), time.perf_counter() - start)
            self._num_in_flight -= 1
            if not self._num_in_flight:
                self._is_idle.set()

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if why := self._refusal(request):
                return _error(401, why)
            return await handler(request)
        except web.RequestPayloadError as error:
            return _error(400, f"the body of the request cannot be read: {error}")
        except web.HTTPException as error:  # no such path, a method that it has not, too large
            limit = f": {_SIZE}" if isinstance(error, web.HTTPRequestEntityTooLarge) else ""
            text = f"{error.reason} ({request.method} {request.path}){limit}"
            response = _error(error.status, text)
            if "Allow" in error.headers:
                response.headers["Allow"] = error.headers["Allow"]
            return response
        except CtrPsError as error:
            return _error(_status_of(error), str(error), error)
        except MemoryError as error:
            return _error(503, str(memory_error_of(error)))

    def _refusal(self, request: web.Request) -> str:
        if request.path in OPEN_PATHS:
            return ""
        transport = request.transport
        certificate = None if transport is None else transport.get_extra_info("peercert")
        return self._readers.refusal(request.headers, certificate)

    async def _server_metadata(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"name": "ctr-ps", "version": own_version(), "extensions": EXTENSIONS}
        )

    async def _live(self, request: web.Request) -> web.Response:
        return web.json_response({"live": True})

    async def _ready(self, request: web.Request) -> web.Response:
        if "name" in request.match_info:
            self._meant(request)
        is_ready = self._is_ready()
        return web.json_response({"ready": is_ready}, status=200 if is_ready else 503)

    async def _model_metadata(self, request: web.Request) -> web.Response:
        self._meant(request)
        return web.json_response(self._model.metadata())

    async def _infer(self, request: web.Request) -> web.Response:
        current = self._meant(request)
        with self._model.place():
            asked = _Asked(await _body(request), request.headers)
            found = await self._model.infer(current, asked.decode)
        outputs, raw = [], []
        for each, values in found:
            output = asdict(each)
            if asked.is_binary(each.name):
                raw.append(raw_of(values))
                output["parameters"] = {"binary_data_size": len(raw[-1])}
            else:
                output["data"] = [value if isfinite(value) else None for value in values.tolist()]
            outputs.append(output)
        answered: dict[str, Any] = {
            "model_name": self._model.name,
            "model_version": current.version,
            "outputs": outputs,
        }
        if asked.id is not None:
            answered["id"] = asked.id
        text = json.dumps(answered, allow_nan=False).encode()
        if not raw:
            return web.Response(body=text, content_type="application/json")
        return web.Response(
            body=b"".join((text, *raw)),
            content_type="application/octet-stream",
            headers={HEADER_LENGTH: str(len(text))},
        )

    def _meant(self, request: web.Request) -> Current:
        return self._model.meant(request.match_info["name"], request.match_info.get("version", ""))


async def _body(request: web.Request) -> bytes:
    """Returns the body of a request; one that takes too long would keep its place from others."""
    try:
        async with asyncio.timeout(BODY_LIMIT_S):
            return await request.read()
    except TimeoutError:
        text = f"the request body did not arrive within {BODY_LIMIT_S:g} s"
        raise web.HTTPRequestTimeout(reason=text) from None


class _Asked:
    """A request to infer, which is decoded in a thread: one of 16 MiB takes long."""

    def __init__(self, body: bytes, headers: Mapping[str, str]) -> None:
        self._body = body
        self._headers = headers
        self._outputs: dict[str, Mapping[str, Any]] = {}
        self._is_binary = False
        self.id: str | None = None

    def decode(self) -> Request:
        """Returns the request; afterwards the rest of this is known.

        Raises DataError if it is not as the protocol says, or HTTPRequestEntityTooLarge if its JSON is.
        """
        encoding = self._headers.get("Content-Encoding", "identity")
        if encoding.strip().lower() not in ("", "identity"):
            raise DataError(f"Content-Encoding is {encoding[:100]!r}: send the body unencoded")
        head, binary = _parts(self._body, self._headers.get(HEADER_LENGTH))
        self._outputs = {
            str(_field(each, "name", "an output")): each for each in _list(head, "outputs")
        }
        for each in self._outputs.values():
            _parameters(each)
        self._is_binary = bool(_parameters(head).get("binary_data_output", False))
        self.id = head.get("id")
        if self.id is not None and not isinstance(self.id, str):
            raise DataError(f"'id' is {type(self.id).__name__}, expected text")
        return Request(tensors_in(head, binary), list(self._outputs))

    def is_binary(self, output: str) -> bool:
        """Whether the bytes of an output are to follow the JSON."""
        asked = _parameters(self._outputs.get(output, {}))
        return bool(asked.get("binary_data", self._is_binary))


def tensors_in(head: Mapping[str, Any], binary: bytes) -> list[Tensor]:
    """Returns the tensors of a request: of its JSON, and of the bytes behind it for inputs that say so.

    Raises DataError if the request is not as the protocol says.
    """
    tensors, at = [], 0
    for each in _list(head, "inputs"):
        name = str(_field(each, "name", "an input"))
        datatype = str(_field(each, "datatype", f"tensor {name!r}"))
        shape = _field(each, "shape", f"tensor {name!r}")
        if not isinstance(shape, list):
            raise DataError(f"tensor {name!r} has shape {shape!r}, expected a list")
        size = _parameters(each).get("binary_data_size")
        if size is None:
            data = _field(each, "data", f"tensor {name!r}")
            tensors.append(tensor_of_values(name, datatype, shape, _flat(name, shape, data)))
            continue
        if not isinstance(size, int) or not 0 <= size <= len(binary) - at:
            raise DataError(
                f"tensor {name!r} has binary_data_size {size!r}, but only {len(binary) - at} bytes of the "
                "body are left"
            )
        tensors.append(tensor_of_raw(name, datatype, shape, binary[at : at + size]))
        at += size
    if at != len(binary):
        raise DataError(
            f"{len(binary) - at} bytes after the last binary tensor belong to no tensor"
        )
    return tensors


def _parts(body: bytes, length: str | None) -> tuple[Mapping[str, Any], bytes]:
    if length is not None and not re.fullmatch("[0-9]{1,10}", length):
        raise DataError(f"{HEADER_LENGTH} is {length[:20]!r}, expected a number of bytes")
    end = len(body) if length is None else int(length)
    if end > len(body):
        raise DataError(f"{HEADER_LENGTH} is {end}, but the request has {len(body)} bytes")
    if end > MAX_JSON_BYTES:
        raise web.HTTPRequestEntityTooLarge(MAX_JSON_BYTES, end)
    try:
        head = json.loads(body[:end])
    except json.JSONDecodeError as error:
        near = error.doc[max(0, error.pos - 20) : error.pos + 20]
        raise DataError(f"the request is not JSON: {error}, near {near!r}") from error
    except (ValueError, RecursionError) as error:  # no UTF-8; numbers or nesting without end
        raise DataError(f"the request is not JSON: {str(error)[:100]}") from error
    if not isinstance(head, dict):
        raise DataError(f"the request is {type(head).__name__}, expected a JSON object")
    return head, body[end:]


def _field(value: Any, name: str, owner: str) -> Any:
    if not isinstance(value, dict):
        raise DataError(f"{owner} is {type(value).__name__}, expected an object")
    if name not in value:
        raise DataError(f"{name!r} is missing in {owner}, which has {sorted(value)[:5]}")
    return value[name]


def _list(head: Mapping[str, Any], name: str) -> list[Any]:
    found = head.get(name, [])
    if not isinstance(found, list):
        raise DataError(f"{name!r} is {type(found).__name__}, expected a list")
    return found


def _parameters(value: Mapping[str, Any]) -> Mapping[str, Any]:
    found = value.get("parameters", {})
    if not isinstance(found, dict):
        raise DataError(f"'parameters' is {type(found).__name__}, expected an object")
    return found


def _flat(name: str, shape: Sequence[Any], data: Any) -> list[Any]:
    """Returns the values of a list that is flat, or nested exactly as the shape.

    Raises DataError if it is neither: values would move to other rows.
    """
    if not isinstance(data, list):
        raise DataError(f"tensor {name!r}: 'data' is {type(data).__name__}, expected a list")
    values: list[Any] = [data]
    if not any(isinstance(each, list) for each in data):
        return data
    for length in shape:
        if not all(isinstance(each, list) and len(each) == length for each in values):
            break
        values = list(chain.from_iterable(values))
    else:
        if not any(isinstance(each, list) for each in values):
            return values
    raise DataError(
        f"tensor {name!r} has 'data' that does not fit shape {str(shape)[:100]}: nest the lists like the "
        "shape, or write all values in one list"
    )


def _method(request: web.Request) -> str:
    """Returns the name that metrics know a request by: one of few, whatever the path."""
    name = request.match_info.route.resource and request.match_info.route.resource.name
    return name.removesuffix("OfVersion") if name else "unknown"


def _status_of(error: CtrPsError) -> int:
    match error:
        case UnknownModelError():
            return 404
        case DataError():
            return 400
        case OverloadedError():
            return 503
    return 500


def _error(status: int, text: str, error: CtrPsError | None = None) -> web.Response:
    headers, text = {}, text[:MAX_ERROR_CHARACTERS]
    if isinstance(error, OverloadedError):
        headers["Retry-After"] = f"{error.retry_after_s:.0f}"
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.json_response({"error": text}, status=status, headers=headers)
