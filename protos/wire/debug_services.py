"""Services for debugging, on request: gRPC's reflection, for grpcurl, and channelz, for grpcdebug.

Reflection tells which methods a server has and what their messages look like, channelz which connections
and streams it has, and what went over them. Like the status, both are for readers.
"""

from collections.abc import Iterable, Sequence

import grpc

from protos.errors import UsageError
from protos.wire.security.authorization import Guarded, Method


class DebugServices:
    """Adds the services to a server on an event loop."""

    def __init__(self) -> None:
        """Imports them.

        Raises:
            UsageError: If the extra is not installed.
        """
        try:
            from grpc_channelz.v1 import channelz, channelz_pb2
            from grpc_reflection.v1alpha import reflection, reflection_pb2
        except ImportError as error:
            raise UsageError(
                "--grpc-debug needs the extra: pip install 'ctr-ps[grpc-debug]'"
            ) from error
        self._reflection, self._channelz = reflection, channelz
        self._services = [
            reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
            channelz_pb2.DESCRIPTOR.services_by_name["Channelz"],
        ]

    @property
    def methods(self) -> Sequence[Guarded]:
        """The methods, of which each needs an access."""
        return [
            Method(service.full_name, method.name)
            for service in self._services
            for method in service.methods
        ]

    def add_to(self, server: grpc.aio.Server, services: Iterable[str]) -> None:
        """Adds both.

        Args:
            server: Not started yet.
            services: Full names of its other services, which reflection is to tell of.
        """
        names = [*services, *(service.full_name for service in self._services)]
        self._reflection.enable_server_reflection(names, server)
        self._channelz.add_channelz_servicer(server)
