"""The driver of a move of shards, from the map that servers have to the next one; docs/moves.md.

    begin --> copy while all train, until little changes --> hold, drain, close --> copy the rest
          --> prepare --> end

Until the first server has ended it by the new map, an error or a driver that dies leaves the old one; from
then on the new one, of which clients tell the servers that do not know it.
"""

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ctr_ps.protos.errors import (
    CtrPsError,
    ProtocolError,
    TransportError,
    UsageError,
    WaitTimeoutError,
)
from ctr_ps.protos.futures import results, results_of_all_ended, wait_for_all
from ctr_ps.protos.limits import CHUNK_BYTES
from ctr_ps.protos.placement import ShardMap
from ctr_ps.protos.store import merge_progress
from ctr_ps.protos.store.moves import Cut, MapState, Moved, Phase, SeenPushes, Taken
from ctr_ps.protos.store.state_transfer import BlockState, stretch_of
from ctr_ps.protos.wire import calls, requests
from ctr_ps.ps_worker.cluster import state_transfer
from ctr_ps.ps_worker.cluster.placement import ASK_S, settle
from ctr_ps.ps_worker.cluster.routing import Routing
from ctr_ps.ps_worker.cluster.transport import Transport, call_all
from ctr_ps.ps_worker.extras.moves.plan import endpoints_of, num_moved

logger = logging.getLogger(__name__)

MIB = 2**20
PART_BYTES = 2 * MIB
"""Pushes wait for the shard of which a part is taken."""
MIB_PER_S = 64.0
MOST_FASTER = 8
"""Times as many, where rows change as fast as they are copied."""
FEW_ROWS = 20_000
"""So many rows are copied while pushes wait: a few milliseconds' work."""
MOST_ROUNDS = 20
HOLD_S = 120.0
"""For saves, and exchanges of messages, to leave time between them."""
PAUSE_S = 0.1
SIGN_S = 5.0
DECLARED_S = 10.0


@dataclass(slots=True)
class Progress:
    """How far a move has come."""

    rows: int  # to be moved when it began
    copied_rows: int = 0
    copied_bytes: int = 0
    began: float = field(default_factory=time.monotonic)
    pause_s: float = 0.0  # for which calls waited, at most

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self.began


class Move:
    """One move. For one thread."""

    def __init__(
        self,
        transport: Transport,
        states: Mapping[int, MapState],
        next_map: ShardMap,
        *,
        mib_per_s: float = MIB_PER_S,
        tell: Callable[[Progress], None] = lambda _: None,
    ) -> None:
        """Moves shards from the map of `transport` to `next_map`; `states` are those of all servers of both.

        Copies `mib_per_s` while all train, at most, or up to eight times as much where rows change faster;
        `tell` is called as it comes on.
        """
        self._transport = transport
        self._old, self._after = transport.shard_map, next_map
        self.token = secrets.token_hex(8)
        self._tables = {spec.name: spec for spec in states[0].tables}
        self._blocks = {spec.name: spec for spec in states[0].blocks}
        self._added = [each for each in next_map.servers if each not in self._old.servers]
        self._all = sorted({*self._old.servers, *next_map.servers})
        owners = zip(self._old.owners, next_map.owners, strict=True)
        self._pairs = sorted({(source, target) for source, target in owners if source != target})
        self._num_taken = dict.fromkeys(self._all, 0)
        self._num_put = dict.fromkeys(self._all, 0)
        self._rate = self._usual_rate = mib_per_s * MIB
        self._next_sign = 0.0
        self._num_held = 0
        self._tell = tell
        self.is_committed: bool | None = False  # None: it is not known
        self.progress = Progress(num_moved(self._old, next_map, rows_of(states)))

    def run(self) -> None:
        """Carries it out.

        Raises:
            CtrPsError: If it was not; the servers go on by the map before.
        """
        old, after = self._old, self._after
        endpoints = {**endpoints_of(after), **endpoints_of(old)}
        self._transport.use(
            ShardMap(
                old.epoch,
                tuple(self._all),
                old.owners,
                tuple(endpoints[each] for each in self._all),
            )
        )
        try:
            if self._added:
                # Only a driver can tell it, if it is prepared to end an earlier move.
                settle(self._transport)
            self._declare()  # before, as new kernels may take long
            begin = requests.BeginMove(token=self.token, shard_map=self._after)
            # The first server before others: so a move that they know, and it does not, has ended.
            self._transport.call(0, calls.BEGIN_MOVE, begin).result()
            results(call_all(self._transport, calls.BEGIN_MOVE, begin))
            # Again: new kernels may have taken long.
            self.progress.rows = num_moved(self._old, self._after, rows_of(self._states()))
            self._copy()
            self._hold()
            self._copy_rest()
            self._prepare()
            self.is_committed = None
            self._transport.call(0, calls.END_MOVE, self._end(is_committed=True)).result()
        except BaseException as error:
            # The first server may have ended it by the new map, and its answer be lost.
            self.is_committed = self._ended_by_new_map(error)
            if not self.is_committed:
                raise
        self.is_committed = True
        self.progress.pause_s = time.monotonic() - self._held_at
        end, others = self._end(is_committed=True), [each for each in self._all if each != 0]
        ending = [self._transport.call(server, calls.END_MOVE, end) for server in others]
        try:
            results_of_all_ended(ending)
        except CtrPsError as error:  # its callers tell it
            again = "if it was drained, name it to ps-cluster when it is back"
            logger.warning("a server has not ended the move yet: %s: %s", again, error)
        self._transport.use(after)

    def _ended_by_new_map(self, error: BaseException) -> bool:
        """Ends the move by the old map, if the first server has not ended it; returns whether it has."""
        try:
            self._transport.call(0, calls.END_MOVE, self._end(is_committed=False)).result()
        except ProtocolError:
            if self._transport.call(0, calls.GET_MAP, None).result().last_move != self.token:
                raise
            return True
        except TransportError as away:
            raise UsageError(
                f"server 0 does not answer, so it is not known how the move {self.token} ends: look at the "
                f"status when it is back ({error}; {away})"
            ) from error
        end = self._end(is_committed=False)
        for ended in call_all(self._transport, calls.END_MOVE, end, ready_s=ASK_S):
            with suppress(CtrPsError):  # it ends the move by itself, or its callers tell it
                ended.result()
        self._transport.use(self._old)
        return False

    def _end(self, *, is_committed: bool) -> requests.EndMove:
        return requests.EndMove(token=self.token, is_committed=is_committed)

    def _declare(self) -> None:
        for server in self._added:
            for spec in self._tables.values():
                request = requests.CreateTable(spec=spec)
                self._transport.call(server, calls.CREATE_TABLE, request).result()

    def _copy(self) -> None:
        """Copies rows until few have changed while the last were copied.

        Twice as fast after a round that was not much smaller than the one before: the rest is copied while
        pushes wait.
        """
        before = 0
        for number in range(MOST_ROUNDS):
            copied = self._copy_round()
            if copied <= FEW_ROWS:
                return
            if number and copied > 0.8 * before:
                if self._rate >= MOST_FASTER * self._usual_rate:
                    return
                self._rate *= 2
            before = copied

    def _copy_round(self, *, with_counts: bool = False) -> int:
        """Copies what has changed on each server, once around; returns the number of rows.

        While all train, no more than there are: under load rows change as fast as they are copied.
        """
        copied = 0
        left = deque(self._pairs)
        most = max(self.progress.rows, FEW_ROWS)
        while left and (with_counts or copied <= most):
            began = time.monotonic()
            source, target = left.popleft()
            taken = self._take(source, target, with_counts=with_counts)
            if taken.moved.rows or taken.moved.counters:
                self._put(target, taken.moved)
                copied += taken.moved.num_rows
            if not taken.is_all:
                left.append((source, target))
            if not with_counts:  # while all train, who shall go on
                self._say_that_it_goes_on()
                time.sleep(max(0.0, began + taken.moved.num_bytes / self._rate - time.monotonic()))
        return copied

    def _say_that_it_goes_on(self) -> None:
        """To servers that have nothing to do in this part of the move; they end one that is silent."""
        if time.monotonic() < self._next_sign:
            return
        self._next_sign = time.monotonic() + SIGN_S
        for server in self._all:
            self._take(server, server, with_counts=False)

    def _take(self, source: int, target: int, *, with_counts: bool) -> Taken:
        self._num_taken[source] += 1
        request = requests.TakeMoved(
            token=self.token,
            number=self._num_taken[source],
            server=target,
            max_bytes=PART_BYTES,
            with_counts=with_counts,
        )
        return self._transport.call(source, calls.TAKE_MOVED, request).result()

    def _put(self, target: int, moved: Moved) -> None:
        new = {each.table for each in moved.rows}.difference(self._tables)
        until = time.monotonic() + DECLARED_S
        while new.difference(self._tables):  # the job has declared them since, on some servers
            if time.monotonic() > until:
                raise ProtocolError(f"tables {sorted(new)} are not on all servers")
            time.sleep(PAUSE_S)
            self._look_at_specs()
        self._num_put[target] += 1
        request = requests.PutMoved(token=self.token, number=self._num_put[target], moved=moved)
        self._transport.call(target, calls.PUT_MOVED, request).result()
        self.progress.copied_rows += moved.num_rows
        self.progress.copied_bytes += moved.num_bytes
        self._tell(self.progress)

    def _hold(self) -> None:
        """Has calls wait, and all pushes before be applied, unless a save or an exchange is under way."""
        until = time.monotonic() + HOLD_S
        while True:
            self._held_at = time.monotonic()
            try:
                cuts = self._hold_at(Phase.HOLD)
                if len({cut.completed for cut in cuts}) > 1:
                    raise ProtocolError("a load or shrink has not come to all servers")
                cut = merged(cuts)
                self._hold_at(Phase.DRAIN, cut)
                if cut.step:  # for which all wait anyway
                    self._held_at = time.monotonic()
                self._hold_at(Phase.CLOSE)
            except (WaitTimeoutError, ProtocolError) as error:
                self._hold_at(Phase.RELEASE)
                if time.monotonic() > until:
                    raise
                logger.info("the move waits: %s", error)
                time.sleep(PAUSE_S)
                self._copy_round()
            else:
                return

    def _hold_at(self, phase: Phase, cut: Cut | None = None) -> list[Cut]:
        self._num_held += 1
        request = requests.HoldMove(
            token=self.token, number=self._num_held, phase=phase, cut=cut or Cut()
        )
        pending = [
            self._transport.call(server, calls.HOLD_MOVE, request) for server in self._old.servers
        ]
        while len(wait_for_all(pending, SIGN_S)) < len(pending):  # a step may take long
            self._say_that_it_goes_on()
        return results_of_all_ended(pending)

    def _states(self) -> dict[int, MapState]:
        return {
            server: self._transport.call(server, calls.GET_MAP, None).result()
            for server in self._old.servers
        }

    def _look_at_specs(self) -> None:
        states = self._states()
        on_all = set.intersection(
            *({spec.name for spec in each.tables} for each in states.values())
        )
        state = states[0]
        self._tables = {spec.name: spec for spec in state.tables if spec.name in on_all}
        self._blocks = {spec.name: spec for spec in state.blocks}
        self._declare()

    def _copy_rest(self) -> None:
        self._look_at_specs()
        self._copy_round(with_counts=True)
        routing = Routing(self._old, CHUNK_BYTES, self._tables, self._blocks)
        parts = state_transfer.parts_of_pull(routing, {}, [*self._blocks])
        pulled = results(
            [self._transport.call(part.server, calls.PULL_STATE, part.request) for part in parts]
        )
        whole_blocks = state_transfer.joined(routing, {}, list(zip(parts, pulled, strict=True)))
        for block, whole in whole_blocks.blocks.items():
            for server in self._after.servers:
                self._put_piece(server, block, whole)

    def _put_piece(self, server: int, block: str, whole: BlockState) -> None:
        piece = self._after.piece_of(server, whole.weights.size)
        size = max(1, CHUNK_BYTES // (4 * (1 + len(whole.element_state))))
        for start in range(piece.start, piece.stop, size):
            stop = min(start + size, piece.stop)
            part = (block, start - piece.start, stretch_of(whole, start, stop))
            self._num_put[server] += 1
            request = requests.PutMoved(
                token=self.token, number=self._num_put[server], moved=Moved(blocks=[part])
            )
            self._transport.call(server, calls.PUT_MOVED, request).result()

    def _prepare(self) -> None:
        state = requests.GetJobState(token=self.token)
        records = self._transport.call(0, calls.GET_JOB_STATE, state).result()
        # Who goes on for a worker that is lost begins where all servers have its pushes.
        told = [self._transport.call(each, calls.GET_STATUS, None) for each in self._old.servers]
        progress = merge_progress([each.store.progress for each in results(told)])
        pending = [
            self._transport.call(
                server,
                calls.PREPARE_MOVE,
                requests.PrepareMove(
                    token=self.token,
                    server=server,
                    progress=progress,
                    records=records if server in self._added else [],
                ),
            )
            for server in self._all
        ]
        results_of_all_ended(pending)


def merged(cuts: Sequence[Cut]) -> Cut:
    """Returns the cut with all that has come to any server.

    Raises ProtocolError if two processes have pushed as one worker: the newer one has joined on some servers
    only when they were asked, and its pushes must be in the cut, those of the older one need not.
    """
    seen: dict[int, SeenPushes] = {}
    for cut in cuts:
        for worker, each in cut.seen.items():
            known = seen.get(worker, each)
            if known.incarnation != each.incarnation and known.pushes and each.pushes:
                raise ProtocolError(f"worker {worker} is being replaced")
            seen[worker] = max(known, each, key=lambda of: of.pushes)
    return Cut(step=max(cut.step for cut in cuts), seen=seen)


def rows_of(states: Mapping[int, MapState]) -> list[int]:
    """Returns the rows of each place, on all servers."""
    return [int(each) for each in _of_servers(states, "rows").sum(axis=0)]


def weights_of(
    states: Mapping[int, MapState], by: Literal["rows", "row_bytes"] = "rows"
) -> list[int]:
    """Returns the rows of each place, on all servers, or their bytes; and one for each shard."""
    weights = _of_servers(states, by).sum(axis=0)
    for table in states[0].tables:
        np.add.at(weights, np.arange(table.num_shards) % weights.size, 1)
    return [int(each) for each in weights]


def accesses_between(before: Mapping[int, MapState], after: Mapping[int, MapState]) -> list[int]:
    """Returns the keys of pulls and pushes of each place, on all servers, from one moment to another.

    Raises UsageError if there were none, or a server was restarted meanwhile: it counts from 0.
    """
    accesses = _of_servers(after, "accesses") - _of_servers(before, "accesses")
    if accesses.min() < 0:
        raise UsageError(
            "a server was restarted while its load was counted: give the command again"
        )
    if not accesses.any():
        raise UsageError("nothing was pulled or pushed meanwhile, so there is no load to share")
    return [int(each) for each in accesses.sum(axis=0)]


def _of_servers(states: Mapping[int, MapState], column: str) -> NDArray[np.int64]:
    """Returns a column of the states, int64[servers, places]."""
    if not all(getattr(each, column) for each in states.values()):
        raise UsageError(f"a server is of an older version, which does not tell {column}")
    return np.array([getattr(each, column) for each in states.values()], np.int64)


def states_of(transport: Transport) -> dict[int, MapState]:
    """Returns what all servers of the transport's map say, by index.

    Raises UsageError if one has another map, or another place in it.
    """
    shard_map = transport.shard_map
    # All at once, as their loads are compared.
    found = results(call_all(transport, calls.GET_MAP, None))
    states = dict(zip(shard_map.servers, found, strict=True))
    require_same_map(shard_map, states)
    return states


def require_same_map(shard_map: ShardMap, states: Mapping[int, MapState]) -> None:
    """Raises UsageError if a server has another map than this, or another place in it."""
    for server, state in states.items():
        if (state.server, state.shard_map) != (server, shard_map):
            raise UsageError(
                f"{shard_map.endpoint_of(server)} is server {state.server} of the shard map "
                f"{state.shard_map.epoch} of {', '.join(state.shard_map.endpoints)}, but server {server} in "
                f"that of server 0, {shard_map.epoch} of {', '.join(shard_map.endpoints)}"
            )


def connected(transport: Transport) -> ShardMap:
    """Has `transport`, which knows the first server, use the map of the cluster, and returns it.

    Raises UsageError if the map has no endpoints.
    """
    while (shard_map := settle(transport)) != transport.shard_map:
        if not shard_map.endpoints:
            raise UsageError(
                "server 0 was started without a list of servers, so no shards can move"
            )
        transport.use(shard_map)
    return shard_map
