"""`ps-serve`: serves a saved model over HTTP and gRPC in the Open Inference Protocol.

    ps-serve output/model                      # HTTP at 127.0.0.1:8000, gRPC at 127.0.0.1:8001
    ps-serve output/model --name ctr --http 0.0.0.0:8000 --grpc 0.0.0.0:8001 --metrics 8002

Switches to newer checkpoints as they appear. After SIGTERM it finishes the requests in flight and exits.
"""

import asyncio
import logging
import re
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from threadpoolctl import threadpool_limits

from ctr_ps.protos.errors import CheckpointError, CtrPsError, UsageError
from ctr_ps.protos.metrics.metrics_port import (
    Readers,
    metrics_address,
    open_metrics_port,
    parse_address,
)
from ctr_ps.protos.role import address_to_bind
from ctr_ps.protos.runtime.environment import arguments, connection_limit, num_processors
from ctr_ps.protos.runtime.logs import configure_logs, errors_as_exit_codes
from ctr_ps.protos.runtime.options import (
    Insecure,
    LogFormatOption,
    LogLevelOption,
    Metrics,
    command_app,
)
from ctr_ps.protos.wire.security.credentials import (
    Credentials,
    bind,
    require_protection,
    server_context,
)

if TYPE_CHECKING:
    from ctr_ps.ps_worker.checkpoints.notices import Channel
    from ctr_ps.ps_worker.extras.inference_server.grpc_service import GrpcService
    from ctr_ps.ps_worker.extras.inference_server.http_service import HttpService
    from ctr_ps.ps_worker.extras.inference_server.served_model import ServedModel

logger = logging.getLogger(__name__)

app = command_app()

GRACE_S = 10.0
"""Seconds that requests in flight may take when it ends."""

LOOK_S, TELL_S = 1.0, 60.0
"""How often a first checkpoint is looked for, and the wait for it told."""

PORTS = 2  # that share the connections of the process: HTTP and gRPC

End = Callable[[], Awaitable[object]]


@app.command()
def serve(
    model: Annotated[
        str,
        typer.Argument(help="Checkpoint, or checkpoint.dir of a job for its newest checkpoint."),
    ],
    name: Annotated[str, typer.Option(help="Name of the model in requests.")] = "ctr",
    http: Annotated[
        str, typer.Option(metavar="[HOST:]PORT", help="Address for HTTP; empty: none.")
    ] = "127.0.0.1:8000",
    grpc: Annotated[
        str, typer.Option(metavar="[HOST:]PORT", help="Address for gRPC; empty: none.")
    ] = "127.0.0.1:8001",
    metrics: Metrics = None,
    reload_every: Annotated[
        float, typer.Option(min=0, help="Seconds between checks for a newer checkpoint; 0: never.")
    ] = 10.0,
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for a first checkpoint.")
    ] = 600.0,
    notify: Annotated[
        str, typer.Option(metavar="URL", help="Channel of publish.notify: redis://HOST:6379/NAME.")
    ] = "",
    max_rows: Annotated[int, typer.Option(min=1, help="Maximum rows of a request.")] = 10_000,
    threads: Annotated[
        int, typer.Option(min=0, help="Prediction threads; 0: one per processor.")
    ] = 0,
    verify: Annotated[
        bool, typer.Option(help="Verify all checksums of a checkpoint before serving it.")
    ] = True,
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="Run code named by a checkpoint: a model's file.")
    ] = False,
    maps: Annotated[
        bool,
        typer.Option(
            "--map",
            help="Map the files of rows instead of reading them into memory; they must not change.",
        ),
    ] = False,
    drain: Annotated[
        float,
        typer.Option(
            min=0,
            help="Seconds to keep serving after SIGTERM, while health checks report not ready.",
        ),
    ] = 0.0,
    insecure: Insecure = False,
    log_format: LogFormatOption = None,
    log_level: LogLevelOption = None,
) -> None:
    """Serve a saved model over HTTP and gRPC in the Open Inference Protocol."""
    with errors_as_exit_codes():
        configure_logs(log_format, log_level)
        credentials = Credentials.from_environment()
        if insecure:
            credentials = replace(credentials, is_insecure=True)
        if not (http or grpc):
            raise UsageError("--http and --grpc are both empty: give at least one address")
        if not re.fullmatch(r"[\w.-]+", name):
            raise UsageError(f"--name is {name!r}, expected letters, digits, and _ . -")
        if http:
            try:
                import aiohttp  # noqa: F401
            except ImportError as error:
                raise UsageError("ps-serve needs the extra: pip install 'ctr-ps[serve]'") from error

        from ctr_ps.ps_worker.checkpoints.notices import Channel  # late: numba
        from ctr_ps.ps_worker.extras.inference_server.served_model import ServedModel

        serving = _run(
            partial(
                ServedModel,
                model,
                name=name,
                max_rows=max_rows,
                threads=threads or num_processors(),
                verify=verify,
                allow_code=allow_code,
                maps=maps,
            ),
            credentials,
            url=model,
            wait_s=wait,
            http=http,
            grpc=grpc,
            metrics=metrics_address(metrics),
            reload_s=reload_every,
            channel=Channel(notify) if notify else None,
            drain_s=drain,
        )
        with threadpool_limits(1):  # each thread of the pool is one
            asyncio.run(serving)


async def _run(
    load: Callable[[], "ServedModel"],
    credentials: Credentials,
    *,
    url: str,
    wait_s: float,
    http: str,
    grpc: str,
    metrics: str,
    reload_s: float,
    channel: "Channel | None",
    drain_s: float,
) -> None:
    """Serves until SIGTERM or SIGINT; see the options of the command."""
    # Late: numba.
    from ctr_ps.ps_worker.extras.inference_server.grpc_service import GrpcService
    from ctr_ps.ps_worker.extras.inference_server.served_model import RequestMetrics

    for option, address in (("--http", http), ("--grpc", grpc)):
        if address:
            host, _ = parse_address(address, option)
            require_protection(host, credentials, "ask the model")
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)

    def is_ready() -> bool:
        return not ended.is_set()

    await _first_checkpoint(url, wait_s, ended)
    if ended.is_set():
        return
    with ExitStack() as stack:
        model = load()
        stack.callback(model.close)
        figures = RequestMetrics(model)
        if metrics:
            stack.enter_context(open_metrics_port(metrics, figures, figures.status, credentials))
        by_grpc = GrpcService(model, figures, is_ready)
        ends: list[End] = []
        try:
            if grpc:
                ends.append(await _start_grpc(by_grpc, grpc, credentials))
            if http:
                from ctr_ps.ps_worker.extras.inference_server.http_service import HttpService

                by_http = HttpService(model, figures, is_ready, Readers(credentials))
                ends.append(await _start_http(by_http, http, credentials))
            if reload_s or channel:
                reloading = asyncio.create_task(model.reload_every(reload_s, channel))
                stack.callback(reloading.cancel)
            await ended.wait()
            by_grpc.tell_end()
            logger.info("finishing the requests in flight")
            await asyncio.sleep(drain_s)
        finally:
            await asyncio.gather(*(end() for end in ends))


async def _first_checkpoint(url: str, limit_s: float, ended: asyncio.Event) -> None:
    """Returns once there is a checkpoint, or the process is to end; CheckpointError after `limit_s`."""
    from ctr_ps.ps_server.checkpoint.publish import resolve  # late: numba

    end_s, tell_s = time.monotonic() + limit_s, 0.0
    while not ended.is_set():
        try:
            await asyncio.to_thread(resolve, url)
            return
        except CheckpointError as error:
            if (now_s := time.monotonic()) >= end_s:
                raise
            if now_s >= tell_s:
                tell_s = now_s + TELL_S
                logger.warning("waiting %.0f s for a first checkpoint: %s", end_s - now_s, error)
        with suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), LOOK_S)


async def _start_grpc(service: "GrpcService", address: str, credentials: Credentials) -> End:
    server = service.server(credentials, ports=PORTS)
    host, port = parse_address(address)
    port = bind(server, address_to_bind(host, port), credentials)
    await server.start()
    logger.info("gRPC at %s", address_to_bind(host, port))
    return partial(server.stop, GRACE_S)


async def _start_http(service: "HttpService", address: str, credentials: Credentials) -> End:
    from aiohttp import web  # of an extra

    from ctr_ps.ps_worker.extras.inference_server.http_listener import HttpListener
    from ctr_ps.ps_worker.extras.inference_server.http_service import RUNNER_OPTIONS

    runner = web.AppRunner(service.application(), shutdown_timeout=GRACE_S, **RUNNER_OPTIONS)
    await runner.setup()
    assert runner.server is not None
    host, port = parse_address(address)
    try:
        listener = HttpListener(
            runner.server,
            host,
            port,
            max_connections=connection_limit() // PORTS,
            tls=server_context(credentials),
            **RUNNER_OPTIONS,
        )
    except CtrPsError:
        await runner.cleanup()
        raise
    logger.info("HTTP at %s", address_to_bind(host, listener.address[1]))

    async def end() -> None:
        await listener.close()
        await service.finish(GRACE_S)
        await runner.cleanup()

    return end


def main() -> None:
    """Runs the command."""
    app(arguments())


if __name__ == "__main__":
    main()
