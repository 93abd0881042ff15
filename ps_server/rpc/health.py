"""Whether a server serves: answering, and asking. Checks run often, so this imports nothing heavy."""

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.v1 import parameter_server_pb2
from protos.wire.security.credentials import Credentials, open_channel

SERVICE: str = parameter_server_pb2.DESCRIPTOR.services_by_name["ParameterServer"].full_name


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # it has no types
    """The service grpc.health.v1 of a server, which serves until `end`.

    The servicer of grpcio-health-checking (1.85) would do but for its watches: they outlast the server's
    grace, and it forgets all watches of a service when one of them ends.
    """

    def __init__(self) -> None:
        """Serves."""
        self._ending = asyncio.Event()

    def end(self) -> None:
        """Says from now on that nothing is served, and ends all watches."""
        self._ending.set()

    async def Check(  # noqa: N802 - the name in the protocol
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """Says whether a service is served; an unknown one is NOT_FOUND."""
        answer = self._answer(request)
        if answer.status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r}")
        return answer

    async def Watch(  # noqa: N802 - the name in the protocol
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Says whether a service is served, and when it is no more; then it ends, as UNAVAILABLE."""
        await context.write(self._answer(request))
        if not self._ending.is_set():
            await self._ending.wait()
            await context.write(self._answer(request))
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the server ends")

    def _answer(self, request: health_pb2.HealthCheckRequest) -> health_pb2.HealthCheckResponse:
        response = health_pb2.HealthCheckResponse
        if request.service not in ("", SERVICE):
            return response(status=response.SERVICE_UNKNOWN)
        is_ending = self._ending.is_set()
        return response(status=response.NOT_SERVING if is_ending else response.SERVING)


def why_not_serving(endpoint: str, limit_s: float) -> str:
    """Asks a server's health service; returns why it does not serve, "" if it does.

    Args:
        endpoint: "host:port".
        limit_s: Seconds to wait for an answer.

    Raises:
        UsageError: If the credentials of this process cannot be used.
    """
    with open_channel(endpoint, Credentials.from_environment()) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=SERVICE), timeout=limit_s
            )
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return ""
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return f"it says that it is {status}"
