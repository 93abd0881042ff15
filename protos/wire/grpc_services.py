"""Health checks, gRPC's own service beside ours.

They are for probes, load balancers and waiting clients. Anybody may ask, so an answer costs nothing:
requests are not read, whatever service they name, and an address has `MAX_CALLS` of a kind open at once.
Callers with a known token are not counted.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2

from ctr_ps.protos.wire.security.access import token_in
from ctr_ps.protos.wire.security.credentials import Credentials, WatchedTokens

MAX_CALLS = 32
"""Of one address, watches and checks each; gRPC keeps up to 512 KiB of a message that nobody reads."""

WHY_KEY = "ctr-ps-why"
"""Trailing metadata of a check: why a server does not serve yet."""


class HealthService:
    """The service grpc.health.v1 of a gRPC server of asyncio, serving from `begin` to `end`.

    Without `why_not`, the reason why it does not serve yet, it begins at once. The servicer of
    grpcio-health-checking (1.85) reads requests of any size; its watches outlast the server's grace, and it
    forgets all watches of a service when one of them ends.
    """

    def __init__(self, why_not: Callable[[], str] | None = None) -> None:
        self._why_not = why_not
        self._tokens: WatchedTokens | None = None
        self._begun = asyncio.Event()
        self._ending = asyncio.Event()
        self._open: Counter[tuple[str, str]] = Counter()
        if why_not is None:
            self.begin()

    def add_to(self, server: grpc.aio.Server, credentials: Credentials) -> None:
        """Adds the methods to a server; raises UsageError if its tokens cannot be read."""
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
        """Reports SERVING from now on."""
        self._begun.set()

    def end(self) -> None:
        """Reports NOT_SERVING and ends all watches."""
        self._ending.set()
        self._begun.set()

    async def _check(self, _: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> Any:
        await self._take_place("check", context)
        if self._why_not is not None and not self._begun.is_set():
            context.set_trailing_metadata(((WHY_KEY, self._why_not()),))
        return self._answer()

    async def _watch(self, _: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        """Reports the status and its changes; ends with UNAVAILABLE when the server does."""
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
        """Counts an open call of an unknown caller, or refuses it above the limit of its address."""
        if self._knows(context):
            return
        place = kind, context.peer().rpartition(":")[0]
        if self._open[place] >= MAX_CALLS:
            text = f"this address has {MAX_CALLS} open calls of this kind, which is the limit"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        self._open[place] += 1
        context.add_done_callback(lambda _: self._give_back(place))

    def _knows(self, context: grpc.aio.ServicerContext) -> bool:
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
