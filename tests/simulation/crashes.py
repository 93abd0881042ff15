"""Crashes at each step of a move of shards: all of them, one a run.

    python -m tests.simulation --crashes TEXT,TEXT      # those whose name has all texts; "" are all

A step is a call of the move's driver. A run without a crash tells which there are; as a seed is one run, all
others are the same up to their crash. What dies is started again, with its update log; so is the driver,
until the servers have the map that it was to lead to.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ctr_ps.protos.wire.calls import BEGIN_MOVE
from ctr_ps.ps_worker.cluster.grpc_transport import GrpcTransport
from ctr_ps.ps_worker.extras.moves.move import Move, connected, states_of, weights_of
from ctr_ps.ps_worker.extras.moves.plan import with_server, without_server
from tests.simulation.cluster import COUNTERS, MOVE, Cluster, Fault, Outcome, Setup
from tests.simulation.network import (
    DELAY_S,
    DIES_AFTER,
    DIES_BEFORE,
    DIES_UNANSWERED,
    LOST_REPLY,
    CallFault,
)
from tests.simulation.seeds import AnyFault, Result, Simulator
from tests.simulation.world import Process

DRIVER = "driver.0"
SERVERS = ("server.0", "server.1", "server.2")  # before the move, or after it
SEED = 1
AGAIN_S = 4.0
JOBS = {
    f"{mode} {kind}": (
        Setup(
            mode=mode,
            num_servers=3 if kind == "drain" else 2,
            num_spares=1,
            step_s=(0.02, 0.1),
            pace_s=0.1,
        ),
        Fault(MOVE, at, DRIVER, kind),
    )
    for mode, at in (("sync", 1.2), (COUNTERS, 1.2))
    for kind in ("add", "drain")
}
AFTER_CRASH = {"step_s": (0.3, 0.8), "pace_s": 3.0}
WITHOUT_DRIVER = {"step_s": (4.0, 8.0), "pace_s": 8.0}
"""The job is slow then, so that it is not over before the move."""


class MovingCluster(Cluster):
    """A cluster whose driver is started again until its move is done."""

    _is_moved = False

    def run(self) -> Outcome:
        self.network.on_call = self._note
        outcome = super().run()
        if not self._is_moved:
            outcome.errors.append("the job ended before the move")
        elif len(self.network.happened) + 1 != len(self._faults):
            outcome.errors.append("nothing has crashed")
        else:
            outcome.errors += self._unlike_maps()
        return outcome

    def _note(self, client: str, server: str, call: str, number: int) -> None:
        if client == DRIVER:
            step = CallFault("", client, server, call, number)
            self.outcome.steps.append((self.world.now, step))

    def _unlike_maps(self) -> list[str]:
        """What servers of the new map have that they should not."""
        newest = {process.name: engine for process, engine in self.engines.items()}
        shard_map = newest["server.0"].shard_map
        wrong = [] if shard_map.epoch == 2 else [f"the map is of epoch {shard_map.epoch}"]
        for index in shard_map.servers:
            engine = newest[f"server.{index}"]
            if engine.shard_map != shard_map or engine.owner.server_index != index:
                wrong.append(f"server.{index} has map {engine.shard_map.epoch}")
            if engine.moves_shards:
                wrong.append(f"server.{index} has not ended its move")
        return wrong

    def _happen(self, fault: Fault) -> None:
        if fault.kind == MOVE:
            self._kind = fault.other
            self._drive_again()
        else:
            super()._happen(fault)

    def _drive_again(self) -> None:
        if not self.world.is_over:
            driver = self.running[DRIVER] = self.world.process(DRIVER)
            self.world.tell(driver, "starts")
            driver.start(partial(self._main, driver, self._drive), "main")

    def _drive(self) -> int:
        self._pace(AFTER_CRASH if self.network.happened else {})
        transport = GrpcTransport(self.endpoints, stream=False, retry_s=10.0)
        try:
            before = connected(transport)
            if before.epoch == 1:
                states = states_of(transport)
                if self._kind == "add":
                    after = with_server(before, "server.2:1", weights_of(states))
                else:
                    after = without_server(before, 1, weights_of(states))
                Move(transport, states, after).run()
        finally:
            transport.close()
        self._is_moved = True
        self._pace({})
        return 0

    def _pace(self, pace: dict[str, Any]) -> None:
        self.world.setup = replace(self.setup, **pace)

    def _ended(self, process: Process, code: int) -> None:
        was_alive = process.is_alive
        super()._ended(process, code)
        if was_alive:
            self._look_at(process)

    def _kill(self, process: Process, loses_power: bool = False) -> None:
        was_alive = process.is_alive
        super()._kill(process, loses_power)
        if was_alive:
            self._pace(AFTER_CRASH)
            self._look_at(process)

    def _look_at(self, ended: Process) -> None:
        if ended.name == DRIVER and not self._is_moved:
            self._pace(WITHOUT_DRIVER)
            self.world.at(AGAIN_S, self._drive_again)


def cases(simulator: Simulator, texts: str = "") -> Iterator[tuple[str, Setup, list[AnyFault]]]:
    """Yields the name, the setup and the faults of each run."""
    for job in [each for each in JOBS if each in texts] or JOBS:
        setup, move = JOBS[job]
        calm = simulator.run(SEED, setup, [move])
        assert calm.is_good, calm.told()
        for number, steps in enumerate(_groups(calm.outcome.steps)):
            for fault in _crashes(steps, f"worker.{number % 2}"):
                name = f"{job}: {fault}"
                if all(text in name for text in texts.split(",")):
                    yield name, setup, [move, fault]


def _groups(steps: Sequence[tuple[float, CallFault]]) -> Sequence[Sequence[CallFault]]:
    """Returns the steps from the first that changes a server on, together those that begin together."""
    groups: list[list[CallFault]] = []
    before = 0.0
    for at, step in steps:
        if groups and at - before < DELAY_S[0]:
            groups[-1].append(step)
        elif groups or step.call == BEGIN_MOVE.name:
            groups.append([step])
        before = at
    return groups


def _crashes(steps: Sequence[CallFault], worker: str) -> Iterator[CallFault]:
    """Yields what can happen at steps that begin together.

    What dies before a step without a part in it died after the one before.
    """
    for step in steps:
        for kind in (DIES_BEFORE, DIES_AFTER, DIES_UNANSWERED):
            yield replace(step, kind=kind, victim=step.server)
    first, last = steps[0], steps[-1]
    yield replace(first, kind=LOST_REPLY)
    yield replace(first, kind=DIES_BEFORE, victim=first.client)
    called = {step.server for step in steps}
    for victim in (first.client, worker, *(each for each in SERVERS if each not in called)):
        yield replace(last, kind=DIES_AFTER, victim=victim)


def run_cases(simulator: Simulator, texts: str, num_processes: int) -> list[Result]:
    """Runs all cases; returns those that are bad, and tells of them."""
    simulator.cluster = MovingCluster
    all_cases = [*cases(simulator, texts)]
    print(f"{len(all_cases)} crashes", flush=True)
    bad, processor_s = [], 0.0
    runs = ((SEED, setup, faults) for _, setup, faults in all_cases)
    results = simulator.run_all(runs, num_processes)
    for (name, _, _), result in zip(all_cases, results, strict=True):
        processor_s += result.processor_s
        if not result.is_good:
            bad.append(result)
            print(f"{name}: {result.outcome.errors[0][:300]}", flush=True)
    print(f"{len(bad)} bad, {processor_s:.0f} s of processors")
    return bad
