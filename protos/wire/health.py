"""Health checks of gRPC, as probes, load balancers and clients that wait for a server ask them."""

import asyncio
from collections.abc import Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

WHY_KEY = "ctr-ps-why"
"""Trailing metadata of a check: why a server does not serve yet."""


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # it has no types
    """The service grpc.health.v1 of a gRPC server of asyncio, which serves from `begin` to `end`.

    The servicer of grpcio-health-checking (1.85) would do but for its watches: they outlast the server's
    grace, and it forgets all watches of a service when one of them ends.
    """

    def __init__(self, service: str, why_not: Callable[[], str] | None = None) -> None:
        """Speaks for one service, by its full name, and with it for the server, whose name is empty.

        Args:
            service: The name.
            why_not: Returns why it does not serve before `begin`; None: it does at once.
        """
        self._service = service
        self._why_not = why_not
        self._begun = asyncio.Event()
        self._ending = asyncio.Event()
        if why_not is None:
            self.begin()

    def begin(self) -> None:
        """Says from now on that it serves."""
        self._begun.set()

    def end(self) -> None:
        """Says from now on that nothing is served, and ends all watches."""
        self._ending.set()
        self._begun.set()

    async def Check(  # noqa: N802 - the name in the protocol
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """Says whether a service is served; an unknown one is NOT_FOUND."""
        answer = self._answer(request)
        if answer.status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r}")
        if self._why_not is not None and not self._begun.is_set():
            context.set_trailing_metadata(((WHY_KEY, self._why_not()),))
        return answer

    async def Watch(  # noqa: N802 - the name in the protocol
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Says whether a service is served, and when that changes; at its end it ends, as UNAVAILABLE."""
        await context.write(self._answer(request))
        if not self._begun.is_set():
            await self._begun.wait()
            await context.write(self._answer(request))
        if not self._ending.is_set():
            await self._ending.wait()
            await context.write(self._answer(request))
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the server ends")

    def _answer(self, request: health_pb2.HealthCheckRequest) -> health_pb2.HealthCheckResponse:
        response = health_pb2.HealthCheckResponse
        if request.service not in ("", self._service):
            return response(status=response.SERVICE_UNKNOWN)
        is_serving = self._begun.is_set() and not self._ending.is_set()
        return response(status=response.SERVING if is_serving else response.NOT_SERVING)
