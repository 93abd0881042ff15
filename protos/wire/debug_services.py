"""Optional debug services: gRPC's reflection, for grpcurl, and channelz, for grpcdebug.

Reflection shows a server's methods and messages, channelz its connections and streams. Like the status,
both are for readers.
"""

from collections.abc import Iterable, Sequence

import grpc

from ctr_ps.protos.errors import UsageError
from ctr_ps.protos.wire.security.authorization import Guarded, Method


class DebugServices:
    """Adds the services to a server on an event loop; raises UsageError without their extra."""

    def __init__(self) -> None:
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
        """The methods, with the access that each needs."""
        return [
            Method(service.full_name, method.name)
            for service in self._services
            for method in service.methods
        ]

    def add_to(self, server: grpc.aio.Server, services: Iterable[str]) -> None:
        """Adds both to a server that is not started; `services` are its other ones, for reflection."""
        names = [*services, *(service.full_name for service in self._services)]
        self._reflection.enable_server_reflection(names, server)
        self._channelz.add_channelz_servicer(server)
