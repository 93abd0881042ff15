"""Everything that is done to parameters, in any order, on any number of servers, against dictionaries.

Numbers are such that float32 is exact, so servers and dictionaries must agree to the last bit.
"""

import shutil
import tempfile
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ctr_ps.protos.gradients import Gradients, SparseGrad
from ctr_ps.protos.spec import (
    AdmissionSpec,
    ExpirySpec,
    InitializerSpec,
    OptimizerSpec,
    StatisticsSpec,
    TableSpec,
)
from ctr_ps.protos.store import Missing, SaveRequest, Store
from ctr_ps.ps_server.store import ParameterStore
from tests.reference.admission import ReferenceAdmission
from tests.reference.feature_life import Life, ReferenceLives
from tests.support.local_transport import LocalTransport, joined_client
from tests.support.needs import IN_CI
from tests.support.statistics import candidates_of, counted_by
from tests.support.stores import push_id

KEYS = np.arange(24, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
LEARNING_RATE = 0.5
STATISTICS = StatisticsSpec(nonclk_coeff=0.25, click_coeff=1.0, decay=0.5)
SCORED = TableSpec(
    name="scored",
    dim=1,
    initializer=InitializerSpec(),
    optimizer=OptimizerSpec(name="sgd", params={"learning_rate": LEARNING_RATE}),
    num_shards=4,
    statistics=STATISTICS,
    expiry=ExpirySpec(delete_threshold=0.25, max_unseen=2),
)
COUNTED = replace(
    SCORED,
    name="counted",
    dim=2,
    admission=AdmissionSpec(threshold=3),
    expiry=ExpirySpec(max_unseen=1),
)
HOT = replace(
    SCORED,
    name="hot",
    dim=3,
    admission=AdmissionSpec(policy="score", threshold=2.0, table="scored"),
    expiry=ExpirySpec(ttl_s=20.0),
)
TABLES = (SCORED, COUNTED, HOT)

PUSHES = st.dictionaries(
    st.integers(0, KEYS.size - 1),
    st.tuples(st.integers(1, 4), st.integers(0, 4), st.integers(-8, 8)),
    min_size=1,
    max_size=8,
)


@dataclass
class Dictionaries:
    """What the tables should hold."""

    lives: dict[str, ReferenceLives] = field(
        default_factory=lambda: {
            spec.name: ReferenceLives(STATISTICS, spec.expiry) for spec in TABLES
        }
    )
    candidates: ReferenceLives = field(
        default_factory=lambda: ReferenceLives(STATISTICS, COUNTED.expiry)
    )
    weights: dict[str, dict[int, np.ndarray]] = field(
        default_factory=lambda: {spec.name: {} for spec in TABLES}
    )

    def push(self, pushed: dict[int, tuple[int, int, int]], now: int) -> None:
        for index, (shows, clicks, grad) in pushed.items():
            key = int(KEYS[index])
            self._learn(SCORED, key, (shows, clicks), grad, now)
            if self._admits_by_count(key, (shows, clicks), now):
                self._learn(COUNTED, key, (shows, clicks), grad, now)
            is_hot = self.lives["scored"].lives[key].score(STATISTICS) >= 2.0
            if is_hot or key in self.lives["hot"].lives:
                self._learn(HOT, key, (shows, clicks), grad, now)

    def _admits_by_count(self, key: int, counts: tuple[int, int], now: int) -> bool:
        lives, candidates = self.lives["counted"].lives, self.candidates.lives
        if key in lives:
            return True
        reference = ReferenceAdmission(COUNTED)
        known = candidates.pop(key, Life())
        reference.candidates[key] = (known.show, known.click)
        if reference.push(key, *counts):
            lives[key] = known  # to which the push adds its counts
            return True
        show, click = reference.candidates[key]
        candidates[key] = Life(show, click, 0, now)
        return False

    def _learn(
        self, spec: TableSpec, key: int, counts: tuple[int, int], grad: int, now: int
    ) -> None:
        self.lives[spec.name].push([(key, *counts)], now)
        zeros = np.zeros(spec.dim, np.float32)
        row = self.weights[spec.name].setdefault(key, zeros)
        self.weights[spec.name][key] = row - np.float32(LEARNING_RATE * grad)

    def shrink(self, now: int) -> dict[str, int]:
        gone = {name: lives.shrink(now) for name, lives in self.lives.items()}
        for name, keys in gone.items():
            for key in keys:
                del self.weights[name][key]
        self.candidates.shrink(now)
        return {name: len(keys) for name, keys in gone.items()}


class Parameters(RuleBasedStateMachine):
    """Servers beside dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="parameter-machine-"))
        self.now = 1000
        self.sequence = 0
        self.expected = Dictionaries()
        self.saved: list[tuple[str, Dictionaries, str]] = []

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @initialize(num_servers=st.integers(1, 3))
    def start(self, num_servers: int) -> None:
        self.stores = [
            ParameterStore(
                server_index=index, num_servers=num_servers, clock=lambda: float(self.now)
            )
            for index in range(num_servers)
        ]
        self.client: Store = joined_client(LocalTransport(self.stores))
        for spec in TABLES:
            self.client.create_table(spec)

    @rule(pushed=PUSHES)
    def push(self, pushed: dict[int, tuple[int, int, int]]) -> None:
        pushed = {
            key: (shows, min(clicks, shows), grad) for key, (shows, clicks, grad) in pushed.items()
        }
        keys = KEYS[list(pushed)]
        counts = np.array([[shows, clicks] for shows, clicks, _ in pushed.values()], np.uint32)
        column = np.array([[grad] for _, _, grad in pushed.values()], np.float32)
        gradients = Gradients(
            {
                spec.name: SparseGrad(keys, np.repeat(column, spec.dim, axis=1), 1, counts)
                for spec in TABLES
            }
        )
        self.client.push_grad(gradients, push_id(sequence=self.sequence)).result()
        self.sequence += 1
        self.expected.push(pushed, self.now)

    @rule(seconds=st.integers(1, 15))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule()
    def shrink(self) -> None:
        planned = self.client.shrink(dry_run=True)
        done = self.client.shrink()

        expected = self.expected.shrink(self.now)
        assert {name: each.rows for name, each in done.items()} == expected
        assert {name: each.rows for name, each in planned.items()} == expected

    @rule()
    def save(self) -> None:
        url = str(self.folder / f"checkpoint-{len(self.saved)}")
        digest = self.client.save(SaveRequest(url=url))

        assert digest == self.client.digest()
        self.saved.append((url, deepcopy(self.expected), digest))

    @precondition(lambda self: self.saved)
    @rule(data=st.data(), num_servers=st.integers(1, 3))
    def load(self, data: st.DataObject, num_servers: int) -> None:
        url, expected, digest = data.draw(st.sampled_from(self.saved))
        self.start(num_servers)
        self.client.load(url)

        assert self.client.digest() == digest
        self.expected = deepcopy(expected)

    @invariant()
    def reads_what_dictionaries_say(self) -> None:
        wanted = {spec.name: KEYS for spec in TABLES}
        rows = self.client.pull_sparse(wanted, missing=Missing.INITIAL).result().rows
        for spec in TABLES:
            weights = self.expected.weights[spec.name]
            zeros = np.zeros(spec.dim, np.float32)
            np.testing.assert_array_equal(
                rows[spec.name], [weights.get(int(key), zeros) for key in KEYS], err_msg=spec.name
            )

    @invariant()
    def counts_what_dictionaries_count(self) -> None:
        for spec in TABLES:
            assert self._counted(counted_by, spec.name) == _numbers(self.expected.lives[spec.name])
        assert self._counted(candidates_of, "counted") == _numbers(self.expected.candidates)

    def _counted(self, read, table: str) -> dict[int, tuple[float, float, float, int]]:
        return {
            key: tuple(counted)
            for store in self.stores
            for key, counted in read(store.engine.parameters.table(table)).items()
        }


def _numbers(lives: ReferenceLives) -> dict[int, tuple[float, float, float, int]]:
    return {
        key: (life.show, life.click, float(life.unseen), life.last_seen)
        for key, life in lives.lives.items()
    }


TestParameters = Parameters.TestCase
TestParameters.settings = settings(
    max_examples=40 if IN_CI else 20, stateful_step_count=25, deadline=None
)
