"""The port for metrics of a server: /metrics for Prometheus."""

from prometheus_client import GC_COLLECTOR, PROCESS_COLLECTOR, CollectorRegistry

from protos.runtime.http_port import HttpPort
from protos.wire.metrics_port import log_port, metrics_route, open_metrics_port
from protos.wire.security.credentials import Credentials
from ps_server.rpc.metrics.server_metrics import ServerMetrics


def open_port(address: str, metrics: ServerMetrics, credentials: Credentials) -> HttpPort:
    """Serves the metrics of a server, and those of its process, at "[HOST:]PORT".

    Raises:
        UsageError: If the address is none, or is not loopback and nothing protects it.
        BindError: If it cannot be bound.
    """
    registry = CollectorRegistry()
    for each in (PROCESS_COLLECTOR, GC_COLLECTOR, metrics):
        registry.register(each)
    port = open_metrics_port(address, {"/metrics": metrics_route(registry)}, credentials)
    log_port(port)
    return port
