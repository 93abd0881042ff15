"""Health checks of gRPC, as probes, load balancers and clients that wait for a server ask them.

Anybody may ask, so an answer costs nothing: requests are not read, whatever service they name, and an address
has `MAX_CALLS` of a kind open at once. Callers that a server knows, as workers, are not counted.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2

from protos.wire.security.access import token_in
from protos.wire.security.credentials import Credentials, WatchedTokens

MAX_CALLS = 32
"""Of one address, watches and checks each; gRPC keeps up to 512 KiB of a message that nobody reads."""

WHY_KEY = "ctr-ps-why"
"""Trailing metadata of a check: why a server does not serve yet."""


class HealthService:
    """The service grpc.health.v1 of a gRPC server of asyncio, which serves from `begin` to `end`.

    The servicer of grpcio-health-checking (1.85) reads requests of any size; its watches outlast the server's
    grace, and it forgets all watches of a service when one of them ends.
    """

    def __init__(self, why_not: Callable[[], str] | None = None) -> None:
        """Serves, or begins to later.

        Args:
            why_not: Returns why it does not serve before `begin`; None: it does at once.
        """
        self._why_not = why_not
        self._tokens: WatchedTokens | None = None
        self._begun = asyncio.Event()
        self._ending = asyncio.Event()
        self._open: Counter[tuple[str, str]] = Counter()
        if why_not is None:
            self.begin()

    def add_to(self, server: grpc.aio.Server, credentials: Credentials) -> None:
        """Adds the methods to a server, which knows its callers by these credentials.

        Raises:
            UsageError: If there are to be tokens, and none can be read.
        """
        self._tokens = WatchedTokens(credentials) if credentials.has_token else None
        serializer = health_pb2.HealthCheckResponse.SerializeToString
        methods = {
            "Check": grpc.stream_unary_rpc_method_handler(
                self._check, response_serializer=serializer
            ),
            "Watch": grpc.stream_stream_rpc_method_handler(
                self._watch, response_serializer=serializer
            ),
        }
        handler = grpc.method_handlers_generic_handler(health.SERVICE_NAME, methods)
        server.add_generic_rpc_handlers((handler,))

    def begin(self) -> None:
        """Says from now on that it serves."""
        self._begun.set()

    def end(self) -> None:
        """Says from now on that nothing is served, and ends all watches."""
        self._ending.set()
        self._begun.set()

    async def _check(self, _: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> Any:
        await self._take_place("check", context)
        if self._why_not is not None and not self._begun.is_set():
            context.set_trailing_metadata(((WHY_KEY, self._why_not()),))
        return self._answer()

    async def _watch(self, _: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        """Says whether the server serves, and when that changes; at its end it ends, as UNAVAILABLE."""
        await self._take_place("watch", context)
        await context.write(self._answer())
        if not self._begun.is_set():
            await self._begun.wait()
            await context.write(self._answer())
        if not self._ending.is_set():
            await self._ending.wait()
            await context.write(self._answer())
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the server ends")

    async def _take_place(self, kind: str, context: grpc.aio.ServicerContext) -> None:
        """Counts a call until it has ended; refuses it if too many of its address are open."""
        if self._knows(context):
            return
        place = kind, context.peer().rpartition(":")[0]
        if self._open[place] >= MAX_CALLS:
            text = f"{MAX_CALLS} calls of this kind are open from this address"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        self._open[place] += 1
        context.add_done_callback(lambda _: self._give_back(place))

    def _knows(self, context: grpc.aio.ServicerContext) -> bool:
        """Whether a caller is known; all are who reach a server without tokens."""
        if self._tokens is None:
            return True
        token = token_in(context.invocation_metadata())
        return token is not None and self._tokens.access_of(token) is not None

    def _give_back(self, place: tuple[str, str]) -> None:
        self._open[place] -= 1
        self._open = +self._open  # without those that are 0

    def _answer(self) -> Any:
        response = health_pb2.HealthCheckResponse
        is_serving = self._begun.is_set() and not self._ending.is_set()
        return response(status=response.SERVING if is_serving else response.NOT_SERVING)
