"""The protocol over gRPC: `inference.GRPCInferenceService`."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass

from ctr_ps.protos.errors import CtrPsError, DataError
from ctr_ps.protos.runtime.environment import memory_error_of, own_version
from ctr_ps.protos.v1 import open_inference_pb2 as messages
from ctr_ps.protos.wire.channel import server_options
from ctr_ps.protos.wire.grpc_services import HealthService
from ctr_ps.protos.wire.grpc_status import details_of, status_of
from ctr_ps.protos.wire.security.access import Method
from ctr_ps.protos.wire.security.authorization import interceptors_of
from ctr_ps.protos.wire.security.credentials import Credentials
from ctr_ps.ps_worker.extras.inference_server.served_model import (
    MAX_WAITING,
    Request,
    RequestMetrics,
    ServedModel,
    UnknownModelError,
)
from ctr_ps.ps_worker.extras.inference_server.tensors import (
    BYTES,
    EXTENSIONS,
    Tensor,
    raw_of,
    tensor_of_raw,
    tensor_of_values,
)

_SERVICE = messages.DESCRIPTOR.services_by_name["GRPCInferenceService"]

MAX_CALLS = 4 * MAX_WAITING
"""At once, health checks and refusals among them; more are refused before their message is read."""


_CONTENTS = {
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BOOL": "bool_contents",
    BYTES: "bytes_contents",
}
"""Field of `InferTensorContents`, by datatype."""


_GUARDED_NAMES = ("ServerMetadata", "ModelMetadata", "ModelReady", "ModelInfer")

GUARDED = [Method(_SERVICE.full_name, name) for name in _GUARDED_NAMES]
"""Whether a process is live and ready, anybody may ask, as of servers of parameters; not of what models."""


class GrpcService:
    """Answers the methods of the protocol."""

    def __init__(
        self,
        model: ServedModel,
        metrics: RequestMetrics,
        is_ready: Callable[[], bool],
    ) -> None:
        """Answers with `model`, and tells `metrics` of each call."""
        self._model = model
        self._metrics = metrics
        self._is_ready = is_ready
        self._health = HealthService()

    def server(self, credentials: Credentials, *, ports: int = 1) -> grpc.aio.Server:
        """Returns a server with these methods, that asks callers for their access; it is not bound yet.

        It answers gRPC's health checks, too; `ports` of the process share its connections.
        """
        server = grpc.aio.server(
            options=server_options(ports=ports),
            interceptors=interceptors_of(credentials, GUARDED),
            maximum_concurrent_rpcs=MAX_CALLS,
        )
        answers: dict[str, Callable[[Any], Awaitable[Any]]] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelInfer": self._model_infer,
        }
        methods = {
            # What anybody may ask is empty, and a stream that nobody reads: else gRPC takes 16 MiB for it.
            name: (
                grpc.unary_unary_rpc_method_handler
                if name in _GUARDED_NAMES
                else grpc.stream_unary_rpc_method_handler
            )(
                self._method(name, answer),
                request_deserializer=GetMessageClass(
                    _SERVICE.methods_by_name[name].input_type
                ).FromString,
                response_serializer=lambda message: message.SerializeToString(),
            )
            for name, answer in answers.items()
        }
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(_SERVICE.full_name, methods),)
        )
        self._health.add_to(server, credentials)
        return server

    def tell_end(self) -> None:
        """Says to health checks that it does not serve any more."""
        self._health.end()

    def _method(
        self, name: str, answer: Callable[[Any], Awaitable[Any]]
    ) -> Callable[[Any, grpc.aio.ServicerContext], Awaitable[Any]]:
        async def method(request: Any, context: grpc.aio.ServicerContext) -> Any:
            start, status = time.perf_counter(), grpc.StatusCode.UNKNOWN
            try:
                answered = await answer(request)
                status = grpc.StatusCode.OK
                return answered
            except asyncio.CancelledError:
                status = grpc.StatusCode.CANCELLED
                raise
            except (CtrPsError, MemoryError) as raised:
                error = memory_error_of(raised) or raised
                assert isinstance(error, CtrPsError)
                status = _status_of(error)
                await context.abort(status, details_of(error))
            finally:
                self._metrics.ended("grpc", name, status.name, time.perf_counter() - start)

        return method

    async def _server_live(self, request: Any) -> Any:
        return messages.ServerLiveResponse(live=True)

    async def _server_ready(self, request: Any) -> Any:
        return messages.ServerReadyResponse(ready=self._is_ready())

    async def _model_ready(self, request: Any) -> Any:
        try:
            self._model.meant(request.name, request.version)
        except UnknownModelError:
            return messages.ModelReadyResponse(ready=False)
        return messages.ModelReadyResponse(ready=self._is_ready())

    async def _server_metadata(self, request: Any) -> Any:
        return messages.ServerMetadataResponse(
            name="ctr-ps", version=own_version(), extensions=EXTENSIONS
        )

    async def _model_metadata(self, request: Any) -> Any:
        self._model.meant(request.name, request.version)
        return messages.ModelMetadataResponse(**self._model.metadata())

    async def _model_infer(self, request: Any) -> Any:
        current = self._model.meant(request.model_name, request.model_version)
        with self._model.place():
            outputs = await self._model.infer(
                current,
                lambda: Request(tensors_in(request), [output.name for output in request.outputs]),
            )
        return messages.ModelInferResponse(
            model_name=self._model.name,
            model_version=current.version,
            id=request.id,
            outputs=[asdict(each) for each, _ in outputs],
            raw_output_contents=[raw_of(values) for _, values in outputs],
        )


def _status_of(error: CtrPsError) -> grpc.StatusCode:
    match error:
        case UnknownModelError():
            return grpc.StatusCode.NOT_FOUND
        case DataError():  # of the request, where servers of parameters have none
            return grpc.StatusCode.INVALID_ARGUMENT
    return status_of(error)


def tensors_in(request: Any) -> list[Tensor]:
    """Returns the tensors of a ModelInferRequest; raises DataError if one is not what it says."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise DataError(
            f"raw_input_contents has {len(raw)} parts, expected one for each of {len(request.inputs)} inputs"
        )
    if raw:
        return [
            tensor_of_raw(each.name, each.datatype, list(each.shape), contents)
            for each, contents in zip(request.inputs, raw, strict=True)
        ]
    return [
        tensor_of_values(each.name, each.datatype, list(each.shape), _contents(each))
        for each in request.inputs
    ]


def _contents(tensor: Any) -> Sequence[Any]:
    # A datatype that is none is refused with the values.
    return list(getattr(tensor.contents, _CONTENTS.get(tensor.datatype, "bytes_contents")))
