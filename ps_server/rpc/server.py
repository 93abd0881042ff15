"""The life of a server: bind, recover or load, serve, and end when all workers have left.

start --bound--> recover --serves--> wait --all workers left | idle | job failed | told to end--> stop

Until it serves it answers each call with how far it has come: callers know that it is there.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc

from ctr_ps.protos.errors import AbortedError, IdleError, LogError, NoMemoryError
from ctr_ps.protos.format import FORMAT
from ctr_ps.protos.runtime.environment import connection_limit, memory_error_of
from ctr_ps.protos.store import StreamOffer
from ctr_ps.protos.wire.calls import CALLS, END_MOVE, Call
from ctr_ps.protos.wire.channel import server_options
from ctr_ps.protos.wire.grpc_services import HealthService
from ctr_ps.protos.wire.security.access import Access
from ctr_ps.protos.wire.security.authorization import interceptors_of
from ctr_ps.protos.wire.security.credentials import Credentials, bind
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.durability.saved_log import SavedLog, read_log
from ctr_ps.ps_server.durability.update_log import UpdateLog
from ctr_ps.ps_server.engine.engine import Engine
from ctr_ps.ps_server.engine.journal import NO_JOURNAL
from ctr_ps.ps_server.precompile import KERNELS
from ctr_ps.ps_server.rpc.backlog import Backlog
from ctr_ps.ps_server.rpc.handlers import Handlers
from ctr_ps.ps_server.rpc.journal import UpdateJournal, first_records, resumed_record
from ctr_ps.ps_server.rpc.recovery import Progress, Replayed, StoppedError, recover
from ctr_ps.ps_server.rpc.service import Service
from ctr_ps.ps_server.rpc.stream import StreamPort
from ctr_ps.ps_server.settings import ServerSettings

if TYPE_CHECKING:
    from ctr_ps.protos.metrics.http_port import HttpPort

logger = logging.getLogger(__name__)

TICK_S = 0.25

REACHED_AGAIN_S = 5.0
"""After this all workers reach a server that was restarted: they look for it every two seconds or so."""

LONG_REPLAY_S = 60.0
"""An update log that would take longer to carry out again is warned of."""

ALL_LEFT = "all workers have left"
DRAINED = "its shards have moved to other servers"
DRAINED_S = 15.0  # in which clients that call it hear of the new map: each does within a renewal of its lease


class Server:
    """One gRPC server over an engine. All methods belong to the event loop that started it."""

    def __init__(
        self,
        engine: Engine,
        settings: ServerSettings,
        *,
        address: str,
        credentials: Credentials | None = None,
        backlog: Backlog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepares to serve at `address`, host:port, of which port 0 takes a free one; binds nothing yet.

        Without credentials it serves whoever calls, without TLS; see `Service` for `backlog` and `clock`.

        Raises:
            UsageError: If a file of the credentials cannot be read.
        """
        self._engine = engine
        self._address = address
        self._settings = settings
        has_past = (settings.load or settings.update_log) is not None
        self._progress = Progress() if has_past else None
        self._health = HealthService(
            (lambda: "" if self._progress is None else self._progress.text) if has_past else None
        )
        self._credentials = credentials or Credentials()
        self._server = grpc.aio.server(
            options=server_options(ports=1 if settings.stream_port is None else 2),
            interceptors=interceptors_of(self._credentials, _calls_of(engine.owner.server_index)),
        )
        self._handlers = Handlers(engine, self._on_all_left, kernels=KERNELS)
        self._handlers.moves.on_drained = self._on_drained
        self._backlog = backlog or Backlog()
        self._service = Service(
            self._handlers,
            backlog=self._backlog,
            why_not=lambda: None if self._progress is None else self._progress.error(),
            on_end=self._end_by,
            clock=clock,
        )
        self._stream: StreamPort | None = None
        self._metrics_port: HttpPort | None = None
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[str] = self._loop.create_future()
        self._saved: SavedLog | None = None
        self._log: UpdateLog | None = None
        self._leases: asyncio.Task[None] | None = None
        self._is_job_over = False
        self._is_drained = False  # all of its shards have moved to other servers
        self.replayed: Replayed | None = None
        self._long_replay_s = LONG_REPLAY_S
        self._service.add_to(self._server)
        self._health.add_to(self._server, self._credentials)

    async def start(self) -> int:
        """Binds and serves, or says until `recover` how far it has come; returns the port.

        After an error no port is open, and the update log is free.

        Raises:
            BindError: If an address cannot be bound.
            UsageError: If a certificate cannot be used.
            LogError: If the update log is in use, or cannot be read.
        """
        if self._settings.update_log is not None:
            self._saved = read_log(self._settings.update_log)
        try:
            self._open_metrics_port()
            self._open_stream()
            # Last: what is bound and not started, gRPC's `stop` does not free.
            port = bind(self._server, self._address, self._credentials)
            await self._server.start()
        except BaseException:
            await self.stop()
            raise
        if self._progress is None:
            self._serve()
        return port

    async def recover(self) -> bool:
        """Goes on where the server before this one was, by its update log, and serves; after `start`.

        Without such a log it loads the checkpoint to start with, if any. Returns whether it serves; not if it
        was told to end before.

        Raises:
            LogError: If the log is damaged.
            CheckpointError: If the checkpoint that it needs does not exist, or is damaged.
            AbortedError: If the job of the server before this one has ended by an error.
        """
        if self._progress is None:
            return True
        recovery = asyncio.create_task(asyncio.to_thread(self._recover, self._progress))
        try:
            either: list[asyncio.Future[Any]] = [recovery, self._ended]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._progress.stop()
        try:
            await recovery
        except StoppedError:
            return False
        except Exception as error:
            if (no_memory := memory_error_of(error)) is not None:
                raise no_memory from error
            raise
        self._progress = None
        self._serve()
        return True

    def _serve(self) -> None:
        self._engine.call_on_failure(self._hear_of_failure)
        self._health.begin()
        self._service.restart_idle_time()
        self._leases = asyncio.create_task(self._watch_leases())
        self._handlers.end_if_all_left()  # the server before this one may have died just before its end

    def _recover(self, progress: Progress) -> None:
        handlers, engine, sync = self._handlers, self._engine, self._settings.log_sync
        saved = self._saved
        if saved is None:
            self._load(progress)
            return
        if saved.segments:
            self.replayed = recover(
                engine,
                saved,
                replay=handlers.replay,
                restore_completed=handlers.restore_completed,
                progress=progress,
            )
            self._handlers.moves.recovered()
            self._log = UpdateLog.resume(saved, sync=sync)
            self._log.replay_s = self.replayed.replay_s
            if self.replayed.format != FORMAT:
                resumed = resumed_record()
                self._log.append(resumed.kind, resumed.payload)
        else:
            loaded = self._load(progress)
            head = first_records(engine.state(), loaded)
            self._log = UpdateLog.create(saved, sync=sync, head=head)
        engine.journal = UpdateJournal(
            self._log, handlers.completed, wait_limit_s=self._settings.wait_limit_s
        )
        if engine.job.failure:
            self._is_job_over = True
            self._close_log()  # the next start is for another job
            raise AbortedError(engine.job.failure)

    def _load(self, progress: Progress) -> Checkpoint | None:
        """Loads the checkpoint to start with, and returns it; None: fresh parameters."""
        if self._settings.load is None:
            return None
        progress.text = f"starting: loading {self._settings.load}"
        KERNELS.prepare_loading()
        checkpoint = Checkpoint.open(self._settings.load)
        self._engine.load(checkpoint.url, token=checkpoint.token, on_shard=progress.step)
        logger.info("loaded folder=%s", self._settings.load)
        return checkpoint

    def _open_stream(self) -> None:
        if self._settings.stream_port is None:
            return
        self._stream = StreamPort(
            self._service, self._credentials, max_connections=connection_limit() // 2
        )
        host = self._address.rpartition(":")[0]
        offer = self._stream.start(host, self._settings.stream_port)
        self._handlers.stream = offer
        logger.info("stream open port=%d", offer.port)

    def _open_metrics_port(self) -> None:
        if self._settings.metrics is None:
            return
        # Imported late: most servers need none of it.
        from ctr_ps.protos.metrics.metrics_port import open_metrics_port
        from ctr_ps.ps_server.rpc.metrics.server_metrics import ServerMetrics
        from ctr_ps.ps_server.rpc.metrics.server_status import server_status

        metrics = ServerMetrics(
            self._engine,
            self._service.counts,
            self._backlog,
            lambda: self._log,
            lambda: self.replayed,
        )
        self._metrics_port = open_metrics_port(
            self._settings.metrics,
            metrics,
            lambda: server_status(self._engine, self._service.counts),
            self._credentials,
        )

    @property
    def stream(self) -> StreamOffer | None:
        """What clients are told of its stream; None: it has none."""
        return self._handlers.stream

    async def wait(self) -> str:
        """Waits for the end, and returns its reason.

        Raises:
            IdleError: If no call came for longer than the idle limit.
            AbortedError: If the job has ended by an error, and the server does not stay.
            LogError: If the update log cannot be written.
        """
        if (limit_s := self._settings.ends_idle_after_s) is None:
            return await self._ended
        watch = asyncio.create_task(self._end_when_idle(limit_s))
        try:
            return await self._ended
        finally:
            watch.cancel()

    def end(self, reason: str) -> None:
        """Has `wait` return `reason`."""
        if not self._ended.done():
            self._ended.set_result(reason)

    def _end_by(self, error: Exception) -> None:
        """Has `wait` raise an error."""
        if not self._ended.done():
            self._ended.set_exception(error)

    async def stop(self) -> None:
        """Refuses new calls, lets those in flight end within the grace, and frees the port."""
        if self._leases is not None:
            self._leases.cancel()
        self._health.end()
        self._engine.call_on_failure(lambda _: None)
        stopping = [self._server.stop(self._settings.grace_s)]
        if self._stream is not None:
            stopping.append(self._stream.stop(self._settings.grace_s))
        await asyncio.gather(*stopping)
        self._service.close()
        if self._metrics_port is not None:
            await asyncio.to_thread(self._metrics_port.close)
        self._close_log()

    def _close_log(self) -> None:
        """Ends the update log: for good if the job is over, and nobody needs it any more."""
        if self._log is not None and self._is_job_over:
            self._log.delete(is_drained=self._is_drained)
        elif self._log is not None:
            self._log.close()
        elif self._saved is not None:
            self._saved.close()

    def _on_all_left(self) -> None:
        if not self._settings.stay:
            self._is_job_over = True
            self.end(ALL_LEFT)
            return
        logger.info("%s, waiting for the next job", ALL_LEFT)
        self._engine.begin_job()

    def _on_drained(self) -> None:
        self._loop.call_soon_threadsafe(self._end_drained)

    def _end_drained(self) -> None:
        """Ends this server once its clients had time to hear of the new map; they no longer need its log."""
        self._is_drained = self._is_job_over = True
        logger.info("all shards have moved to other servers ends_in_s=%g", DRAINED_S)
        self._loop.call_later(DRAINED_S, self.end, DRAINED)

    def _hear_of_failure(self, reason: str) -> None:
        self._loop.call_soon_threadsafe(self._end_after_failure, reason)

    def _end_after_failure(self, reason: str) -> None:
        """Ends the server of a job that has failed, when all workers have had the time to hear why.

        One without memory ends at once, with its log: one that is started again goes on.
        """
        if self._engine.job.lacks_memory:
            self._end_by(NoMemoryError(reason))
            return
        self._is_job_over = not self._engine.job.can_resume
        self._engine.journal = NO_JOURNAL
        try:
            self._close_log()
        except LogError as error:
            logger.error("update log not removed: %s", error)
        if self._log is not None:
            logger.warning(
                "update log %s folder=%s",
                "removed, as the job cannot be resumed"
                if self._is_job_over
                else "kept for a restart",
                self._settings.update_log,
            )
        if self._settings.stay:
            logger.error("the job has ended: %s; restart this server before the next job", reason)
            return
        self._loop.call_later(self._settings.linger_s, self._end_by, AbortedError(reason))

    async def _watch_leases(self) -> None:
        """Lets time pass in steps: after a server was stopped for long, one step has passed."""
        if self.replayed is not None:
            await asyncio.sleep(REACHED_AGAIN_S)
        try:
            while True:
                await asyncio.sleep(TICK_S)
                self._warn_of_replay()
                if self._handlers.moves.is_under_way:
                    await asyncio.to_thread(self._handlers.pass_time, TICK_S)
                if not self._is_drained:
                    self._engine.pass_time(TICK_S)
                self._handlers.end_if_all_left()
        except Exception as error:  # as when the update log cannot be written
            self._end_by(memory_error_of(error) or error)

    def _warn_of_replay(self) -> None:
        """Says that a restart would take long, again when it would take twice as long."""
        if self._log is None or self._log.replay_s < self._long_replay_s:
            return
        logger.warning(
            "after a restart this server would replay its update log for about %.0f s, while all workers "
            "wait: save checkpoints more often (checkpoint.every_steps, every_s)",
            self._log.replay_s,
        )
        self._long_replay_s = 2 * self._log.replay_s

    async def _end_when_idle(self, limit_s: float) -> None:
        while (left_s := limit_s - self._service.idle_s) > 0:
            await asyncio.sleep(left_s)
        self._end_by(
            AbortedError(self._engine.job.failure)  # which is why nobody calls any more
            if self._engine.job.failure
            else IdleError(
                f"no worker called for {limit_s:g} s: did the workers fail to start, or crash?"
            )
        )

    async def run(self, on_start: Callable[[int], None]) -> str:
        """Serves from the start to the end, and returns its reason; raises as `start`, `recover` and `wait`.

        `on_start` is called with the port once it serves.
        """
        port = await self.start()
        try:
            if await self.recover():
                on_start(port)
            return await self.wait()
        finally:
            await self.stop()


def _calls_of(server: int) -> list[Call[Any, Any]]:
    """Returns the calls that a server answers, with their access: the first one's EndMove decides."""
    decides = replace(END_MOVE, access=Access.ADMIN)
    return [decides if each is END_MOVE and server == 0 else each for each in CALLS.values()]
