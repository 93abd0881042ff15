"""Authorization: a server's interceptor that refuses calls without the needed access.

    metadata or certificate --> Authority --refused--> the call ends, and its message is not read
                                      `----allowed--> the service

Refusing handlers take streams of messages: gRPC reads these on demand, so that a caller without access
cannot make a server allocate memory for a message, or wait for it.

Health checks need no access and are not in protos/wire/calls.py: they say nothing about a job.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any

import grpc

from ctr_ps.protos.errors import AccessError, UnknownCallerError
from ctr_ps.protos.wire.grpc_status import details_of, metadata_of, status_of
from ctr_ps.protos.wire.security.access import NAME_PREFIX, Access, Method, access_of_name, token_in
from ctr_ps.protos.wire.security.credentials import (
    TLS_CERT,
    TOKEN,
    TOKEN_FILE,
    Credentials,
    WatchedTokens,
)

_NO_TOKEN = f"it has no token, and this server needs one: set {TOKEN_FILE} or {TOKEN} of the caller"
_UNKNOWN_TOKEN = (
    f"this server does not know the token of the caller: compare {TOKEN_FILE} or {TOKEN} of both"
)


class Authority:
    """Checks callers of the given calls, by tokens if the server has any, else by certificates."""

    def __init__(self, credentials: Credentials, calls: Iterable[Method]) -> None:
        self._tokens = WatchedTokens(credentials) if credentials.has_token else None
        self.calls = {call.path: call for call in calls}  # by path; others need no access

    @property
    def asks_for_tokens(self) -> bool:
        """Whether tokens decide."""
        return self._tokens is not None

    def refusal(
        self, call: Method, metadata: Iterable[tuple[str, str | bytes]]
    ) -> AccessError | None:
        """Returns why a call with such metadata is refused; None: it is allowed."""
        assert self._tokens is not None
        token = token_in(metadata)
        found = None if token is None else self._tokens.access_of(token)
        return _refusal(found, call, _NO_TOKEN if token is None else _UNKNOWN_TOKEN)

    def refusal_of_peer(self, call: Method, peer: Mapping[str, list[bytes]]) -> AccessError | None:
        """Returns why a call is refused by the `auth_context` of its connection; None: it is allowed."""
        names = [name.decode("utf-8", "replace") for name in peer.get("x509_common_name", ())]
        found = next(filter(None, map(access_of_name, names)), None)
        shown = ", ".join(map(repr, names)) or "missing"
        expected = ", ".join(f"{NAME_PREFIX}{each}" for each in Access)
        why = (
            f"the common name of the caller's certificate is {shown}, expected {expected}, alone or before "
            f"a dot: see its {TLS_CERT}"
        )
        return _refusal(found, call, why)


class AsyncAuthorization(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Checks each call of a server on an event loop."""

    def __init__(self, authority: Authority) -> None:
        self._authority = authority
        self._of_peers: dict[str, Any] = {}

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: Any
    ) -> Any:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(details)
        call = self._authority.calls.get(details.method)
        if call is None or handler is None:
            return handler
        if self._authority.asks_for_tokens:
            refusal = self._authority.refusal(call, details.invocation_metadata)
            return handler if refusal is None else _refusing_async(refusal)
        if call.path not in self._of_peers:
            self._of_peers[call.path] = self._asking_for_peer(call, handler)
        return self._of_peers[call.path]

    def _asking_for_peer(self, call: Method, handler: Any) -> Any:
        """Returns a handler that checks the caller's certificate first, which only a context has."""

        async def method(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> Any:
            if refusal := self._authority.refusal_of_peer(call, context.auth_context()):
                await context.abort(*_abort_arguments(refusal))
            request = await anext(requests, None)
            if request is None:
                await context.abort(*_no_message(call))
            return await handler.unary_unary(request, context)

        return grpc.stream_unary_rpc_method_handler(
            method,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


def interceptors_of(
    credentials: Credentials, calls: Iterable[Method]
) -> list[grpc.aio.ServerInterceptor]:
    """Returns the interceptors of a server on an event loop; none if it serves all callers."""
    if not credentials.tell_callers_apart:
        return []
    return [AsyncAuthorization(Authority(credentials, calls))]


class Authorization(grpc.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Checks each call of a server with threads."""

    def __init__(self, authority: Authority) -> None:
        self._authority = authority

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """See grpc.ServerInterceptor."""
        handler = continuation(details)
        call = self._authority.calls.get(details.method)
        if call is None or handler is None:
            return handler
        by_token: AccessError | None = None
        if self._authority.asks_for_tokens:
            by_token = self._authority.refusal(call, details.invocation_metadata)
            if by_token is None:
                return handler

        def method(requests: Iterator[Any], context: grpc.ServicerContext) -> Any:
            refusal = by_token or self._authority.refusal_of_peer(call, context.auth_context())
            if refusal is not None:
                context.set_trailing_metadata(metadata_of(refusal))
                context.abort(status_of(refusal), details_of(refusal))
            request = next(requests, None)
            if request is None:
                context.abort(*_no_message(call))
            return handler.unary_unary(request, context)

        return grpc.stream_unary_rpc_method_handler(
            method,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


def _refusal(found: Access | None, call: Method, why_unknown: str) -> AccessError | None:
    if found is None:
        return UnknownCallerError(f"{call.name} is refused: {why_unknown}")
    if found < call.access:
        return AccessError(
            f"{call.name} needs the access {str(call.access)!r}, but this caller has {str(found)!r}"
        )
    return None


def _no_message(call: Method) -> tuple[Any, ...]:
    return grpc.StatusCode.INVALID_ARGUMENT, f"{call.name} has no message"


def _abort_arguments(error: AccessError) -> tuple[Any, ...]:
    return status_of(error), details_of(error), metadata_of(error)


def _refusing_async(error: AccessError) -> Any:
    async def refuse(_: Any, context: grpc.aio.ServicerContext) -> None:
        await context.abort(*_abort_arguments(error))

    return grpc.stream_unary_rpc_method_handler(refuse)
