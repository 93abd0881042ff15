"""Clients that count: each push adds 1 to some pairs of counters, whatever else happens.

    acknowledged before a read began  <=  what it reads  <=  sent before it ended

The two counters of a pair are rows of one server in different shards, and always pushed together: so a
checkpoint that has one without the other is of no one moment.
"""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ctr_ps.protos.errors import CheckpointError, SnapshotLostError, UnknownChangesError
from ctr_ps.protos.futures import Future
from ctr_ps.protos.placement import shard_of
from ctr_ps.protos.role import WorkerRole
from ctr_ps.protos.store import Lease, Missing, SaveRequest, Version, WorkerLoss
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_worker.cluster.client import ClusterClient
from ctr_ps.ps_worker.cluster.connect import connect
from ctr_ps.ps_worker.cluster.grpc_transport import Deadlines
from ctr_ps.ps_worker.run.membership import LeaseRenewal
from tests.simulation.network import network
from tests.simulation.world import Process, world
from tests.support import pusher

NUM_SHARDS = 16  # of a table: each costs time in every save
COUNTERS = replace(pusher.COUNTERS, num_shards=NUM_SHARDS)
NUM_PAIRS, PUSHES, ON_THE_WAY = 12, 40, 4
READ_SHARE, SAVE_SHARE, FULL_SHARE = 0.3, 0.15, 0.2


def groups_of(setup: Any) -> int:
    """Returns the number of groups of shards that do not part: of a server, or each alone where they move."""
    return NUM_SHARDS if setup.num_spares else int(setup.num_servers)


@cache
def pairs_of(num_groups: int) -> Sequence[tuple[int, int]]:
    """Returns keys, two each of shards of one group, by their remainder, which are always on one server."""
    waiting: dict[int, int] = {}
    pairs = []
    for key in range(1, 10_000):
        shard = int(shard_of(np.uint64(key), np.uint64(COUNTERS.num_shards)))
        other = waiting.pop(shard % num_groups, None)
        if other is None:
            waiting[shard % num_groups] = key
        else:
            pairs.append((other, key))
        if len(pairs) == NUM_PAIRS:
            break
    return pairs


@dataclass(slots=True)
class Tally:
    """What clients have sent, what was acknowledged, and what has been wrong."""

    sent: Counter[int] = field(default_factory=Counter)  # by pair
    acknowledged: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    saves: list[tuple[str, Counter[int], Counter[int]]] = field(default_factory=list)
    num_reads: int = 0
    # when a barrier was first left to which all come after their pushes
    counted_at: float = math.inf

    def check(
        self, what: str, values: Mapping[int, float], low: Counter[int], high: Counter[int]
    ) -> None:
        """Each value has to lie between what was acknowledged before and sent until now."""
        self.wrong += [
            f"{what}: counter of pair {pair} is {value:g}, expected {low[pair]} to {high[pair]}"
            for pair, value in values.items()
            if not low[pair] <= value <= high[pair]
        ]


class Client:
    """One counting process."""

    def __init__(
        self, process: Process, role: WorkerRole, tally: Tally, setup: Any, *, may_fall: bool
    ) -> None:
        """`may_fall`: what was read, but not acknowledged, may be lost with a machine."""
        self._process, self._role, self._tally = process, role, tally
        self._may_fall = may_fall
        self._setup = setup
        self._worker = role.worker_index
        self._pairs = pairs_of(groups_of(setup))
        self._seen: dict[int, float] = {}
        self._waiting: list[tuple[list[int], Future[Version]]] = []
        self._base = tally.saves[-1][0] if tally.saves else ""  # that of the process before, too

    def run(self, lease_s: float) -> None:
        random, home = world().random, world()
        deadlines = Deadlines(rpc_s=20.0, wait_s=self._setup.wait_limit_s)
        with connect(self._role.endpoints, deadlines=deadlines, stream=False) as client:
            lease = Lease(seconds=lease_s, on_worker_loss=WorkerLoss.WAIT)
            incarnation = random.getrandbits(63)
            joined = client.join(self._worker, incarnation, terms={}, lease=lease).result()
            renewal = LeaseRenewal(client, self._worker, lease)
            client.create_table(COUNTERS)
            client.barrier("start", self._worker, step=0).result()
            # The first worker is the last to come to the barrier: the others wait there for long.
            pushes = 0 if joined.barriers_passed > 1 else PUSHES // (1 + self._worker)
            for sequence in range(pushes):
                # Pushes that nobody waits for are not sent again, so a move would wait for them.
                while home.setup.pace_s > 1.0 and self._waiting:
                    self._acknowledge()
                time.sleep(random.uniform(0.0, home.setup.pace_s))
                self._push(client, sequence, incarnation)
                if random.random() < READ_SHARE:
                    self._read(client)
                if self._worker == 0 and random.random() < SAVE_SHARE:
                    self._save(
                        client, f"checkpoints/{home.current and self._process.number}-{sequence}"
                    )
            while self._waiting:
                self._acknowledge()
            client.barrier("counted", self._worker, step=0).result()
            self._tally.counted_at = min(self._tally.counted_at, world().now)
            if joined.barriers_passed < 3:
                self._read(client)
            client.barrier("read", self._worker, step=0).result()
            client.leave(self._worker, step=0)
            renewal.close()

    def _push(self, client: ClusterClient, sequence: int, incarnation: int) -> None:
        random = world().random
        pairs = sorted(random.sample(range(NUM_PAIRS), random.randint(1, 4)))
        keys = np.array(sorted(key for pair in pairs for key in self._pairs[pair]), np.uint64)
        push = pusher.push_of(keys, self._worker, sequence, incarnation)
        self._tally.sent.update(pairs)
        self._waiting.append((pairs, client.push_grad(*push)))
        if len(self._waiting) == ON_THE_WAY:
            self._acknowledge()

    def _acknowledge(self) -> None:
        # In any order, as threads of a worker would.
        pairs, answer = self._waiting.pop(world().random.randrange(len(self._waiting)))
        answer.result()
        self._tally.acknowledged.update(pairs)
        # A process that was paused reads late what came before.
        if network().push_answered[self._process] > self._tally.counted_at:
            self._tally.wrong.append(f"a push of {self._process} comes after a barrier after it")

    def _read(self, client: ClusterClient) -> None:
        tally, low = self._tally, self._tally.acknowledged.copy()
        keys = np.array(sorted(key for pair in self._pairs for key in pair), np.uint64)
        pulled = client.pull_sparse({COUNTERS.name: keys}, missing=Missing.INITIAL).result()
        found = dict(zip(keys.tolist(), pulled.rows[COUNTERS.name][:, 0].tolist(), strict=True))
        for side in (0, 1):
            values = {pair: found[keys[side]] for pair, keys in enumerate(self._pairs)}
            tally.check(f"read of {self._process}", values, low, tally.sent)
        tally.num_reads += 1
        if not self._may_fall:
            tally.wrong += [
                f"counter {key} fell from {self._seen[key]:g} to {value:g} for {self._process}"
                for key, value in found.items()
                if value < self._seen.get(key, 0.0)
            ]
        self._seen = found

    @staticmethod
    def _servers() -> list[Process]:
        return [each for each in world().processes if each.is_alive and each.name[0] == "s"]

    def _save(self, client: ClusterClient, url: str) -> None:
        low, servers = self._tally.acknowledged.copy(), self._servers()
        base = "" if world().random.random() < FULL_SHARE else self._base
        try:
            try:
                client.save(SaveRequest(url=url, base=base))
            except UnknownChangesError:
                client.save(SaveRequest(url=url))
        except SnapshotLostError:  # with its server
            # A later one may be asked for on the same base: servers know whether it is theirs.
            first = [each for each in world().processes if each.name == self._process.name]
            if first == [self._process] and servers == self._servers():
                self._tally.wrong.append(f"save {url} was lost, but every process lives")
            return
        self._base = url
        self._tally.saves.append((url, low, self._tally.sent.copy()))


def faults_of_saves(tally: Tally, folder: Path, num_groups: int) -> None:
    """Checks that each checkpoint has every row once, and each pair of one moment."""
    for url, low, high in tally.saves:
        try:
            checkpoint = Checkpoint.open(folder / url)
            checkpoint.verify()
        except CheckpointError as error:
            tally.wrong.append(f"checkpoint {url}: {error}")
            continue
        found: dict[int, float] = {}
        shards = range(COUNTERS.num_shards)
        for _, rows in checkpoint.read_shards(COUNTERS.name, shards):
            for key, value in zip(rows.keys.tolist(), rows.weights[:, 0].tolist(), strict=True):
                if key in found:
                    tally.wrong.append(f"checkpoint {url} has key {key} twice")
                found[key] = value
        values = {}
        for pair, (one, other) in enumerate(pairs_of(num_groups)):
            values[pair] = found.get(one, 0.0)
            if values[pair] != found.get(other, 0.0):
                tally.wrong.append(
                    f"checkpoint {url} has {found.get(one)} and {found.get(other)} of pair {pair}"
                )
        tally.check(f"checkpoint {url}", values, low, high)
