"""The service of a heter trainer: a gRPC method for each call of protos/wire/heter.py.

Each call has a thread while it waits. A thread of a CPU trainer sends no batch before it has the answer to
the one before; calls beyond `MAX_CALLS` are refused.
"""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import grpc

from ctr_ps.protos.errors import CtrPsError, TransportError
from ctr_ps.protos.wire.calls import Call
from ctr_ps.protos.wire.channel import server_options
from ctr_ps.protos.wire.grpc_status import details_of, metadata_of, status_of
from ctr_ps.protos.wire.heter import ATTEND, HETER_CALLS, TRAIN
from ctr_ps.protos.wire.security.authorization import Authority, Authorization
from ctr_ps.protos.wire.security.credentials import Credentials, bind
from ctr_ps.ps_worker.extras.heter.inbox import Inbox

logger = logging.getLogger(__name__)

MAX_CALLS = 256
"""Batches that wait, each with a request of up to 16 MiB; more would be training threads of CPU trainers."""

GRACE_S = 1.0
"""For answers that are on their way when the service ends."""


class HeterService(AbstractContextManager["HeterService"]):
    """Serves from `start` to `close`. For the thread that trains."""

    def __init__(self, address: str, credentials: Credentials | None = None) -> None:
        """Binds "host:port", 0: a free port; without credentials it serves whoever calls, without TLS."""
        credentials = credentials or Credentials()
        self._server = grpc.server(
            ThreadPoolExecutor(MAX_CALLS, "heter-calls"),
            options=server_options(),
            interceptors=[Authorization(Authority(credentials, HETER_CALLS.values()))]
            if credentials.tell_callers_apart
            else [],
            maximum_concurrent_rpcs=MAX_CALLS,
        )
        self._inbox: Inbox | None = None
        self.port = bind(self._server, address, credentials)

    def start(self, inbox: Inbox) -> None:
        """Has `inbox` answer the calls."""
        self._inbox = inbox
        answers: Mapping[Call[Any, Any], Callable[[Any], Any]] = {
            TRAIN: inbox.train,
            ATTEND: inbox.attend,
        }
        methods = {
            call.name: grpc.unary_unary_rpc_method_handler(_method(call, answer))
            for call, answer in answers.items()
        }
        handler = grpc.method_handlers_generic_handler(TRAIN.service, methods)
        self._server.add_generic_rpc_handlers((handler,))
        self._server.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Refuses new calls, lets those that are answered end, cuts off the others, and frees the port."""
        self._server.stop(GRACE_S).wait()
        if self._inbox is not None:  # the process ends when the threads of calls do
            self._inbox.fail(TransportError("the heter trainer has ended"))


def _method(call: Call[Any, Any], answer: Callable[[Any], Any]) -> Callable[[bytes, Any], Any]:
    """Returns the method of a call: the bytes of a message in, those of a message out."""

    def method(request: bytes, context: grpc.ServicerContext) -> Any:
        try:
            return call.answer.encode(answer(call.request.decode(request)))
        except CtrPsError as error:
            context.set_trailing_metadata(metadata_of(error))
            context.abort(status_of(error), details_of(error))
        except Exception:
            logger.exception("call failed call=%s", call.name)
            context.abort(
                grpc.StatusCode.INTERNAL,
                f"the heter trainer failed in {call.name}: see its log",
            )

    return method
