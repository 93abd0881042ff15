"""One server from its start to its end: what `ps-server` runs, and a script in a server's role.

    bind -> recover or load -> serve -> all workers left | idle | a signal

Heavy imports are made late: a health check imports this module every few seconds.
"""

import asyncio
import logging
import signal
import sys
from dataclasses import replace

from ctr_ps.protos.role import ServerRole, address_to_bind, default_bind
from ctr_ps.protos.runtime.environment import keep_freed_memory
from ctr_ps.ps_server.settings import ServerSettings

logger = logging.getLogger(__name__)


def run_server(role: ServerRole, settings: ServerSettings) -> int:
    """Serves until all workers have left; returns the exit code: 0, after SIGINT 130, after SIGTERM as set.

    To be called from the main thread, which handles the signals. Raises as `Server.run`, and UsageError if
    the address is not loopback, and nothing protects it.
    """
    # Until the loop takes over: a container's first process ignores SIGTERM otherwise.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(settings.sigterm_exit_code))
    keep_freed_memory()
    from ctr_ps.protos.metrics.metrics_port import metrics_address
    from ctr_ps.protos.placement import NO_SERVER
    from ctr_ps.protos.wire.security.credentials import Credentials, require_protection
    from ctr_ps.ps_server.engine.engine import Engine, EngineSettings
    from ctr_ps.ps_server.precompile import KERNELS
    from ctr_ps.ps_server.rpc.server import Server

    bind = settings.bind or default_bind(role.endpoint)
    credentials = Credentials.from_environment()
    if settings.insecure:
        credentials = replace(credentials, is_insecure=True)
    require_protection(bind, credentials)
    settings = replace(settings, metrics=metrics_address(settings.metrics) or None)
    if role.is_spare:
        KERNELS.prepare_loading()  # now: its first shards would come when all machines are busy
        if settings.idle_limit_s is None:
            settings = replace(settings, idle_limit_s=0.0)  # nobody calls until it is added

    engine = Engine(
        EngineSettings(
            num_workers=role.num_workers,
            num_heter=len(role.heter_endpoints),
            server_index=NO_SERVER if role.is_spare else role.server_index,
            num_at_start=role.num_at_start,
            num_servers=role.num_servers,
            endpoints=role.endpoints,
            wait_limit_s=settings.wait_limit_s,
            memory_limit=settings.memory_limit,
            checkpoint_roots=settings.checkpoint_roots,
            has_update_log=settings.update_log is not None,
        )
    )

    async def serve() -> str:
        address = address_to_bind(bind, role.port)
        server = Server(engine, settings, address=address, credentials=credentials)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, server.end, number.name)
        return await server.run(log_start)

    def log_start(port: int) -> None:
        logger.info(
            "serving server=%s servers=%s workers=%d heter_trainers=%d bind=%s port=%d",
            "spare" if (index := engine.owner.server_index) == NO_SERVER else index,
            ",".join(engine.shard_map.endpoints),
            role.num_workers,
            len(role.heter_endpoints),
            bind,
            port,
        )

    reason = asyncio.run(serve())
    logger.info("ended reason=%r", reason)
    codes = {
        signal.SIGINT.name: 128 + signal.SIGINT,
        signal.SIGTERM.name: settings.sigterm_exit_code,
    }
    return codes.get(reason, 0)
