"""Whether a server serves. Checks run often, so this imports nothing heavy."""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ctr_ps.protos.v1 import parameter_server_pb2
from ctr_ps.protos.wire.grpc_services import WHY_KEY
from ctr_ps.protos.wire.security.credentials import Credentials, open_channel

SERVICE: str = parameter_server_pb2.DESCRIPTOR.services_by_name["ParameterServer"].full_name


def why_not_serving(endpoint: str, limit_s: float) -> str:
    """Asks the health service of a server, host:port; returns why it does not serve, "" if it does.

    Raises UsageError if the credentials of this process cannot be used.
    """
    with open_channel(endpoint, Credentials.from_environment()) as channel:
        try:
            answer, call = health_pb2_grpc.HealthStub(channel).Check.with_call(
                health_pb2.HealthCheckRequest(service=SERVICE), timeout=limit_s
            )
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return ""
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    why = dict(call.trailing_metadata()).get(WHY_KEY)
    return f"its health check says {status}{f': {why}' if why else ''}"
