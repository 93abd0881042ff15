"""The service: decode, call the store, encode.

It runs on one event loop. A call that waits for other workers is a suspended coroutine, so it takes no
thread that the pushes it waits for would need; calls with much work are handed to threads.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import TypeVar

import grpc
import numpy as np

from protos.chunking import VALUE_BYTES
from protos.errors import CtrPsError
from protos.futures import WaitingFuture
from protos.store import Future, Shrunk
from protos.v1 import control_plane_pb2, data_plane_pb2, parameter_server_pb2_grpc
from protos.wire import control_messages, data_messages, spec_messages
from protos.wire.grpc_status import details_of, metadata_of, status_of
from ps_server.checkpoint.files.manifest import share_to_json
from ps_server.rpc.activity import Activity
from ps_server.store import ParameterStore

# ruff: noqa: D102 - what each RPC does stands in protos/v1/parameter_server.proto

logger = logging.getLogger(__name__)

T = TypeVar("T")

INLINE_VALUES = 300_000
"""Calls that touch more numbers than this run in a thread, so that they do not hold the loop.

A thread costs more than its hop of 45 µs: it competes with the loop for the interpreter. With it, a pull of
1,800 keys of dim 10 took 1.13 ms of processor time instead of 0.67, one of 20,000 keys 3.2 instead of 2.9,
a push of 20,000 keys 4.5 instead of 3.7. This many numbers hold the loop for 2 or 3 ms.
"""

_VALUES_A_KEY = 10  # a guess at the dim: a pull's keys do not say what they will read


async def abort_with(context: grpc.aio.ServicerContext, call: str, error: Exception) -> None:
    """Ends a call with an error: ours as they are, any other logged and kept from the client."""
    if isinstance(error, CtrPsError):
        await context.abort(status_of(error), details_of(error), metadata_of(error))
    logger.error("call failed call=%s", call, exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, f"the server failed in {call}; its log says why")


class _Answering:
    """One call: a sign of life while it lasts; an error that ends it becomes a status."""

    def __init__(self, activity: Activity, context: grpc.aio.ServicerContext, call: str) -> None:
        self._activity = activity
        self._context = context
        self._call = call

    async def __aenter__(self) -> None:
        self._activity.begin()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._activity.end()
        if isinstance(error, Exception):
            await abort_with(self._context, self._call, error)


class ParameterServerServicer(parameter_server_pb2_grpc.ParameterServerServicer):
    """The methods of protos/v1/parameter_server.proto, over a store."""

    def __init__(
        self,
        store: ParameterStore,
        *,
        activity: Activity,
        on_all_left: Callable[[], None],
        inline_values: int = INLINE_VALUES,
    ) -> None:
        """Serves `store`.

        Args:
            store: Holds the parameters.
            activity: Told of every call.
            on_all_left: Called when the last worker has left.
            inline_values: Calls that touch more numbers run in a thread.
        """
        self._store = store
        self._activity = activity
        self._on_all_left = on_all_left
        self._inline_values = inline_values
        store.apply_steps_in(ThreadPoolExecutor(1, "steps"), inline_values=inline_values)
        self._logged: set[str] = set()

    async def CreateTable(
        self, request: control_plane_pb2.CreateTableRequest, context: grpc.aio.ServicerContext
    ) -> control_plane_pb2.CreateTableResponse:
        async with self._answering(context, "CreateTable"):
            spec = spec_messages.table_spec_from_message(request.spec)
            self._store.create_table(spec)
            self._log_once(f"table created table={spec.name} dim={spec.dim}")
            return control_plane_pb2.CreateTableResponse()

    async def CreateDense(
        self, request: control_plane_pb2.CreateDenseRequest, context: grpc.aio.ServicerContext
    ) -> control_plane_pb2.CreateDenseResponse:
        async with self._answering(context, "CreateDense"):
            spec = spec_messages.dense_spec_from_message(request.spec)
            self._store.create_dense(spec)
            self._log_once(f"dense block created block={spec.name} length={spec.length}")
            return control_plane_pb2.CreateDenseResponse()

    async def PullSparse(
        self, request: data_plane_pb2.PullSparseRequest, context: grpc.aio.ServicerContext
    ) -> data_plane_pb2.PullSparseResponse:
        async with self._answering(context, "PullSparse"):
            keys, missing, at = data_messages.pull_sparse_arguments(request)
            num_keys = sum(column.size for column in keys.values())
            pull = partial(self._store.pull_sparse, keys, missing=missing, at=at)
            values = await self._answer(num_keys * _VALUES_A_KEY, pull)
            return data_messages.pull_sparse_response(values)

    async def PullChanged(
        self, request: data_plane_pb2.PullChangedRequest, context: grpc.aio.ServicerContext
    ) -> data_plane_pb2.PullChangedResponse:
        async with self._answering(context, "PullChanged"):
            tables, worker, max_rows = list(request.tables), request.worker, request.max_rows
            pull = partial(self._store.pull_changed, tables, worker, max_rows=max_rows)
            # In a thread, however little changed: it looks at all rows.
            return data_messages.changed_to_message(await _settled(await asyncio.to_thread(pull)))

    async def PullDense(
        self, request: data_plane_pb2.PullDenseRequest, context: grpc.aio.ServicerContext
    ) -> data_plane_pb2.PullDenseResponse:
        async with self._answering(context, "PullDense"):
            blocks, at = data_messages.pull_dense_arguments(request)
            into = {
                block: np.empty(self._store.piece_length(block), np.float32) for block in blocks
            }
            num_values = sum(piece.size for piece in into.values())
            version = await self._answer(num_values, partial(self._store.pull_dense, into, at=at))
            return data_messages.pull_dense_response(into, version)

    async def PushGrad(
        self, request: data_plane_pb2.PushGradRequest, context: grpc.aio.ServicerContext
    ) -> data_plane_pb2.PushGradResponse:
        async with self._answering(context, "PushGrad"):
            push_id, part, at = data_messages.push_grad_arguments(request)
            self._log_once(f"worker seen worker={push_id.worker}")
            push = partial(self._store.push_chunk, part, push_id, at=at)
            version = await self._answer(part.num_chunks * request.ByteSize() // VALUE_BYTES, push)
            return data_plane_pb2.PushGradResponse(version=version)

    async def Post(
        self, request: data_plane_pb2.PostRequest, context: grpc.aio.ServicerContext
    ) -> data_plane_pb2.PostResponse:
        async with self._answering(context, "Post"):
            message = data_messages.posted_message(request)
            await _settled(self._store.post(request.exchange, message))
            return data_plane_pb2.PostResponse()

    async def Take(
        self, request: data_plane_pb2.TakeRequest, context: grpc.aio.ServicerContext
    ) -> data_plane_pb2.TakeResponse:
        async with self._answering(context, "Take"):
            where = (request.exchange, request.worker)
            messages = self._store.take(*where, received=request.received)
            return data_messages.take_response(await _settled(messages))

    async def Barrier(
        self, request: control_plane_pb2.BarrierRequest, context: grpc.aio.ServicerContext
    ) -> control_plane_pb2.BarrierResponse:
        async with self._answering(context, "Barrier"):
            self._log_once(f"worker seen worker={request.worker}")
            where = (request.name, request.worker)
            if (brought := control_messages.brought_numbers(request)) is None:
                version = await _settled(self._store.barrier(*where, step=request.step))
                return control_plane_pb2.BarrierResponse(version=version)
            reduction = self._store.all_reduce(*where, *brought, step=request.step)
            return control_messages.reduced_to_message(await _settled(reduction))

    async def Advance(
        self, request: control_plane_pb2.AdvanceRequest, context: grpc.aio.ServicerContext
    ) -> control_plane_pb2.AdvanceResponse:
        async with self._answering(context, "Advance"):
            future = self._store.advance(request.worker, request.clock, at_least=request.at_least)
            return control_plane_pb2.AdvanceResponse(slowest=await _settled(future))

    async def Leave(
        self, request: control_plane_pb2.LeaveRequest, context: grpc.aio.ServicerContext
    ) -> control_plane_pb2.LeaveResponse:
        async with self._answering(context, "Leave"):
            # In a thread: it waits until the steps that it completes are applied.
            await asyncio.to_thread(self._store.leave, request.worker, step=request.step)
            logger.info("worker done worker=%d step=%d", request.worker, request.step)
            if self._store.all_left():
                self._on_all_left()
            return control_plane_pb2.LeaveResponse()

    async def CheckFolder(
        self, request: control_plane_pb2.CheckFolderRequest, context: grpc.aio.ServicerContext
    ) -> control_plane_pb2.CheckFolderResponse:
        async with self._answering(context, "CheckFolder"):
            await asyncio.to_thread(self._store.check_folder, request.folder, request.token)
            return control_plane_pb2.CheckFolderResponse()

    async def Snapshot(
        self, request: control_plane_pb2.SnapshotRequest, context: grpc.aio.ServicerContext
    ) -> control_plane_pb2.SnapshotResponse:
        async with self._answering(context, "Snapshot"):
            await asyncio.to_thread(self._store.snapshot, request.token, request.base)
            return control_plane_pb2.SnapshotResponse()

    async def Save(
        self, request: control_plane_pb2.SaveRequest, context: grpc.aio.ServicerContext
    ) -> control_plane_pb2.SaveResponse:
        async with self._answering(context, "Save"):
            where = (request.folder, request.token)
            if (settings := control_messages.inference_settings(request)) is None:
                part = await asyncio.to_thread(self._store.save_part, *where)
            else:
                save = partial(self._store.save_inference_part, *where, settings)
                part = await asyncio.to_thread(save)
            logger.info("saved folder=%s files=%d", request.folder, len(part.entries))
            return control_plane_pb2.SaveResponse(part=share_to_json(part))

    async def Load(
        self, request: control_plane_pb2.LoadRequest, context: grpc.aio.ServicerContext
    ) -> control_plane_pb2.LoadResponse:
        async with self._answering(context, "Load"):
            only, token = list(request.only), request.token
            await asyncio.to_thread(self._store.load, request.folder, only=only, token=token)
            logger.info("loaded folder=%s", request.folder)
            return control_plane_pb2.LoadResponse()

    async def Resume(
        self, request: control_plane_pb2.ResumeRequest, context: grpc.aio.ServicerContext
    ) -> control_plane_pb2.ResumeResponse:
        async with self._answering(context, "Resume"):
            self._store.resume(*control_messages.resumed_run(request))
            logger.info("resumed version=%d", request.version)
            return control_plane_pb2.ResumeResponse()

    async def Shrink(
        self, request: control_plane_pb2.ShrinkRequest, context: grpc.aio.ServicerContext
    ) -> control_plane_pb2.ShrinkResponse:
        async with self._answering(context, "Shrink"):
            max_norm = request.max_norm if request.HasField("max_norm") else None
            shrink = partial(self._store.shrink, max_norm=max_norm, dry_run=request.dry_run)
            shrunk = await asyncio.to_thread(shrink)
            total = sum(shrunk.values(), Shrunk())
            logger.info(
                "shrunk removed_rows=%d left_rows=%d dry_run=%s",
                total.rows,
                total.left_rows,
                request.dry_run,
            )
            return control_messages.shrunk_to_message(shrunk)

    async def GetDigest(
        self, request: control_plane_pb2.GetDigestRequest, context: grpc.aio.ServicerContext
    ) -> control_plane_pb2.GetDigestResponse:
        async with self._answering(context, "GetDigest"):
            return control_messages.digests_to_message(
                await asyncio.to_thread(self._store.shard_digests)
            )

    async def GetStatus(
        self, request: control_plane_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> control_plane_pb2.GetStatusResponse:
        async with self._answering(context, "GetStatus"):
            return control_messages.status_to_message(
                self._store.status(), self._store.server_index, self._store.num_servers
            )

    def _answering(self, context: grpc.aio.ServicerContext, call: str) -> _Answering:
        return _Answering(self._activity, context, call)

    async def _answer(self, num_values: int, call: Callable[[], Future[T]]) -> T:
        """Calls the store, in a thread if it is much work, and waits for its answer."""
        is_small = num_values <= self._inline_values
        return await _settled(call() if is_small else await asyncio.to_thread(call))

    def _log_once(self, event: str) -> None:
        if event not in self._logged:
            self._logged.add(event)
            logger.info(event)


async def _settled(future: Future[T]) -> T:
    """Returns the answer; one that is not there yet is awaited for as long as it says."""
    if isinstance(future, WaitingFuture) and not future.done():
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), future.limit_s)
        except TimeoutError:
            error = future.give_up()
        raise error
    return future.result()
