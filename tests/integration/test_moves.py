"""Shards move between servers that serve: nothing is lost, doubled or refused, and clients follow."""

import itertools
import re
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from ctr_ps.protos.chunking import PushChunk
from ctr_ps.protos.errors import (
    CtrPsError,
    OverloadedError,
    RecoveringError,
    TransportError,
    UsageError,
)
from ctr_ps.protos.gradients import DenseGrad, Gradients, SparseGrad
from ctr_ps.protos.placement import NO_SERVER, NUM_PLACES, ShardMap
from ctr_ps.protos.spec import (
    AdmissionSpec,
    InitializerSpec,
    OptimizerSpec,
    StatisticsSpec,
    TableSpec,
)
from ctr_ps.protos.store import Lease, Missing, ReduceOp, WorkerLoss
from ctr_ps.protos.store.moves import Phase
from ctr_ps.protos.wire.calls import BEGIN_MOVE, END_MOVE, PUSH_GRAD, PUSH_PULL
from ctr_ps.protos.wire.requests import BeginMove, EndMove, PushGrad
from ctr_ps.protos.wire.security.credentials import Credentials
from ctr_ps.ps_server.engine.journal import Journal
from ctr_ps.ps_server.rpc.moves import SILENT_S
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.cluster.grpc_transport import GrpcTransport
from ctr_ps.ps_worker.data.dealt_files import FilePosition, places_of
from ctr_ps.ps_worker.extras.moves import cli
from ctr_ps.ps_worker.extras.moves.move import Move, Progress, connected, states_of, weights_of
from ctr_ps.ps_worker.extras.moves.plan import with_another, with_server, without_server
from tests.support.cluster import Cluster, cluster
from tests.support.crashed_moves import Crash, CrashingTransport, DriverKilledError
from tests.support.processes import free_port
from tests.support.stores import DEEP, INCARNATION, KEYS, TOWER, WIDE, declare, push_id
from tests.support.waiting import wait_until

COUNTED = TableSpec(
    name="counted",
    dim=2,
    initializer=InitializerSpec(),
    optimizer=OptimizerSpec(name="sgd", params={"learning_rate": 0.5}),
    statistics=StatisticsSpec(),
    admission=AdmissionSpec(threshold=3),
    num_shards=16,
)


def driver(servers: Cluster) -> GrpcTransport:
    transport = GrpcTransport(servers.endpoints[:1], retry_s=2.0)
    servers._stack.callback(transport.close)
    connected(transport)
    return transport


def add(transport: GrpcTransport, endpoint: str) -> Move:
    states = states_of(transport)
    return moved(transport, with_server(transport.shard_map, endpoint, weights_of(states)))


def moved(transport: GrpcTransport, next_map) -> Move:
    move = Move(transport, states_of(transport), next_map)
    move.run()
    return move


def gradients(random, keys=KEYS) -> Gradients:
    chosen = np.unique(random.choice(keys, 50))
    return Gradients(
        sparse={"deep": SparseGrad(chosen, random.normal(size=(chosen.size, 5)).astype("f4"), 10)},
        dense={"tower": DenseGrad(random.normal(size=TOWER.length).astype("f4"), 10)},
    )


def test_a_server_is_added_and_drained_while_nothing_is_lost():
    def trained(moves) -> tuple[str, np.ndarray]:
        with cluster(num_servers=2, num_workers=1) as servers:
            client = servers.client()
            declare(client)
            random = np.random.default_rng(1)
            for number in range(30):
                client.push_grad(gradients(random), push_id(sequence=number)).result()
                if number in moves:
                    moves[number](servers)
            tower = np.empty(TOWER.length, np.float32)
            client.pull_dense({"tower": tower}).result()
            return client.digest(), tower

    def adds(servers):
        assert add(driver(servers), servers.start_spare()).progress.copied_rows > 0

    def drains(servers):
        transport = driver(servers)
        assert transport.shard_map.servers == (0, 1, 2)
        moved(transport, without_server(transport.shard_map, 1, weights_of(states_of(transport))))

    def replaces(servers):
        transport = driver(servers)
        moved(transport, with_another(transport.shard_map, 2, servers.start_spare()))
        assert transport.shard_map.servers == (0, 1)

    expected = trained({})
    found = trained({5: adds, 12: drains, 20: replaces})
    assert found[0] == expected[0]
    np.testing.assert_array_equal(found[1], expected[1])


def test_pushes_and_pulls_of_many_threads_go_on_through_moves():
    with cluster(num_servers=2, num_workers=2) as servers:
        client = servers.client()
        declare(client)
        errors, counts = [], [0, 0]
        stop = threading.Event()
        ones = {"wide": np.ones((KEYS.size, 1), np.float32)}
        keys = np.sort(KEYS)

        def push(worker: int) -> None:
            try:
                while not stop.is_set():
                    grad = SparseGrad(keys, -ones["wide"], 1)  # sgd with 0.5: adds 0.5 to each row
                    client.push_grad(
                        Gradients(sparse={"wide": grad}, dense={}),
                        push_id(worker=worker, sequence=counts[worker]),
                    ).result()
                    counts[worker] += 1
                    found = client.pull_sparse({"wide": keys}, missing=Missing.INITIAL).result()
                    values = found.rows["wide"]
                    assert values.min() >= 0.5 * counts[worker], "an acknowledged push is missing"
            except Exception as error:  # told below
                errors.append(error)

        threads = [threading.Thread(target=push, args=(worker,)) for worker in (0, 1)]
        for thread in threads:
            thread.start()
        try:
            transport = driver(servers)
            pauses = []
            for _ in range(2):
                pauses.append(add(transport, servers.start_spare()).progress.pause_s)
                for server in (1, 2):
                    if server in transport.shard_map.servers:
                        states = states_of(transport)
                        moved(
                            transport,
                            without_server(transport.shard_map, server, weights_of(states)),
                        )
                        break
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert not errors, errors
        values = client.pull_sparse({"wide": keys}, missing=Missing.INITIAL).result().rows["wide"]
        np.testing.assert_array_equal(values, np.full_like(values, 0.5 * sum(counts)))
        assert min(counts) > 5


@pytest.mark.parametrize(
    ("counter", "num_known"),
    [({}, 100), ({"counter": "bloom", "expected_keys": 10_000}, 0)],
    ids=["exact", "bloom"],
)
def test_candidates_and_statistics_move(counter, num_known):
    admission = AdmissionSpec(threshold=3, **counter)
    with cluster(num_servers=2, num_workers=1) as servers:
        client = servers.client()
        client.create_table(replace(COUNTED, admission=admission))
        keys = np.arange(100, dtype=np.uint64)

        def push(sequence: int) -> None:
            counts = np.tile(np.array([[1, 0]], np.uint32), (keys.size, 1))
            grad = SparseGrad(keys, np.ones((keys.size, 2), np.float32), 1, counts)
            push = Gradients(sparse={"counted": grad}, dense={})
            client.push_grad(push, push_id(sequence=sequence)).result()

        push(0)
        push(1)
        assert client.status().tables["counted"].candidates == num_known
        add(driver(servers), servers.start_spare())
        assert client.status().tables["counted"].candidates == num_known
        push(2)
        found = client.status().tables["counted"]
        assert (found.rows, found.candidates) == (100, 0)


def test_a_move_that_fails_leaves_the_map_and_the_rows():
    with cluster(num_servers=2, num_workers=1) as servers:
        client = servers.client()
        declare(client)
        random = np.random.default_rng(1)
        client.push_grad(gradients(random), push_id(sequence=0)).result()
        before = client.digest()
        transport = driver(servers)
        spare = servers.start_spare()
        states = states_of(transport)
        move = Move(transport, states, with_server(transport.shard_map, spare, weights_of(states)))
        move._prepare = lambda: (_ for _ in ()).throw(KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            move.run()
        client.push_grad(gradients(random), push_id(sequence=1)).result()
        assert client.digest() != before
        assert all(not each.move for each in states_of(transport).values())
        add(transport, spare)
        assert len(transport.shard_map.servers) == 3
        client.push_grad(gradients(random), push_id(sequence=2)).result()


def test_a_server_that_a_dead_driver_has_prepared_is_added_by_another():
    with cluster(num_servers=2, num_workers=1) as servers:
        declare(servers.client())
        spare, crash = servers.start_spare(), Crash("end by server 0", is_after=False)
        transport = CrashingTransport(driver(servers), crash)
        crash.kill = transport.dies
        states = states_of(transport)
        move = Move(transport, states, with_server(transport.shard_map, spare, weights_of(states)))
        with pytest.raises(DriverKilledError):
            move.run()
        transport = driver(servers)
        for server in (0, 1):  # as their clocks do, or their clients
            transport.call(server, END_MOVE, EndMove(token=move.token, is_committed=False)).result()
        add(transport, spare)
        assert len(transport.shard_map.servers) == 3


@pytest.mark.parametrize(
    ("its_map", "is_told"),
    [({}, True), ({"endpoints": ("other:1", "other:2")}, False)],
    ids=["drained", "of another cluster"],
)
def test_a_drained_server_that_was_away_at_the_end_is_told_if_it_is_named(its_map, is_told):
    with cluster(num_servers=2, num_workers=1) as servers:
        declare(servers.client())
        crash = Crash("end by others", is_after=False)
        transport = CrashingTransport(driver(servers), crash)
        crash.kill = transport.dies
        states = states_of(transport)
        after = without_server(transport.shard_map, 1, weights_of(states))
        with pytest.raises(DriverKilledError):
            Move(transport, states, after).run()
        drained = servers.stores[1].engine
        drained.shard_map = replace(drained.shard_map, **its_map)

        def status(*endpoints: str) -> str:
            return CliRunner().invoke(cli.app, [",".join(endpoints), "status"]).output

        assert "shard map 2, 1 servers" in status(servers.endpoints[0])
        assert drained.moves_shards
        told = f"{servers.endpoints[1]} was told that its shards have moved"
        assert (told in status(*servers.endpoints)) == is_told
        assert drained.moves_shards != is_told


def test_a_spare_whose_move_was_ended_while_its_driver_was_gone_is_told_if_it_is_named(monkeypatch):
    with cluster(num_servers=2, num_workers=1) as servers:
        declare(servers.client())
        transport, spare = driver(servers), servers.start_spare()
        states = states_of(transport)
        move = Move(transport, states, with_server(transport.shard_map, spare, weights_of(states)))
        call = transport.call

        def dies(server, of, *arguments, **options):
            if of is END_MOVE:
                raise DriverKilledError
            return call(server, of, *arguments, **options)

        monkeypatch.setattr(transport, "call", dies)
        with pytest.raises(DriverKilledError):
            move.run()
        for each in (*servers.servers, servers.spares[spare]):
            each._handlers.pass_time(SILENT_S)
        waits = servers.spares[spare]._handlers.moves
        assert waits.is_under_way

        named = CliRunner().invoke(cli.app, [f"{servers.endpoints[0]},{spare}", "status"])
        assert f"{spare} was told that nothing has moved" in named.output
        assert not waits.is_under_way


@pytest.mark.parametrize("loss", [WorkerLoss.WAIT, WorkerLoss.CONTINUE])
def test_what_a_drained_server_alone_lacked_of_a_file_is_trained_again(loss, monkeypatch):
    monkeypatch.setattr("ctr_ps.ps_worker.extras.moves.move.HOLD_S", 0.0)
    with cluster(num_servers=2, num_workers=2, num_at_start=1) as servers:
        client = servers.client(joins=False)
        lease = Lease(seconds=60.0, on_worker_loss=loss)
        for worker in (0, 1):
            client.join(worker, INCARNATION, terms={}, lease=lease).result()

        chunk = PushChunk(sparse=[], dense=[])

        def pushed_to(*indices: int, sequence: int) -> None:
            position = FilePosition(epoch=1, file=0, place=(10 + sequence, 0))
            push = replace(push_id(worker=1, sequence=sequence), partitions=position.partitions)
            for server in indices:
                request = PushGrad(chunk=chunk, push_id=push, at=None, shard_map_epoch=1)
                client._transport.call(server, PUSH_GRAD, request).result()

        pushed_to(0, 1, sequence=0)
        pushed_to(0, sequence=1)
        for _ in range(2):  # worker 1 is lost in its second push
            client.renew(0)
            for store in servers.stores:
                store.engine.pass_time(40.0)
        if loss is WorkerLoss.WAIT:
            successor = servers.client(joins=False)
            successor.join(1, INCARNATION + 1, terms={}, lease=lease).result()

        transport = driver(servers)
        weights = weights_of(states_of(transport))
        moved(transport, without_server(transport.shard_map, 1, weights))
        assert places_of(client.status().progress, epoch=1) == {0: (10, 0)}


def test_a_server_for_a_job_with_other_places_is_not_added():
    with cluster(num_servers=2, num_workers=2, num_at_start=1) as servers:
        transport = driver(servers)
        states, before = states_of(transport), transport.shard_map
        store = ParameterStore(num_workers=2, server_index=NO_SERVER)
        other = servers.start_server(store)
        store.engine.shard_map = ShardMap.of(1, [other])
        after = with_server(before, other, weights_of(states))
        with pytest.raises(UsageError, match="for 2 workers, but the job has 1 to 2 workers: give"):
            cli._require_spare(after, before, states[0])


def test_table_is_created_on_a_server_of_which_the_client_does_not_know_yet():
    with cluster(num_servers=2, num_workers=1) as servers:
        client = servers.client()
        add(driver(servers), servers.start_spare())
        declare(client)
        client.push_grad(gradients(np.random.default_rng(1)), push_id(sequence=0)).result()
        client.pull_sparse({"wide": KEYS}, missing=Missing.INITIAL).result()


def test_a_driver_that_knows_server_0_takes_the_addresses_of_the_servers_list():
    with cluster(num_servers=3) as servers:
        named = servers.endpoints[0].replace("127.0.0.1", "localhost")
        transport = GrpcTransport([named], retry_s=2.0)
        servers._stack.callback(transport.close)
        assert connected(transport).endpoints == tuple(servers.endpoints)
        assert sorted(states_of(transport)) == [0, 1, 2]


@pytest.mark.parametrize(
    "other",
    [
        lambda own: replace(own, endpoints=("127.0.0.1:1", own.endpoints[1])),
        lambda own: replace(own, epoch=2),
        lambda own: replace(own, owners=own.owners[::-1]),
    ],
    ids=["list", "epoch", "owners"],
)
def test_a_server_with_another_map_than_server_0_is_refused_by_name(other):
    """As one of another job, which its address leads to."""
    with cluster(num_servers=2) as servers:
        transport = driver(servers)
        engine = servers.stores[1].engine
        engine.shard_map = other(engine.shard_map)
        with pytest.raises(
            UsageError, match=f"^{servers.endpoints[1]} is server 1 of the shard map"
        ):
            states_of(transport)


def test_a_server_in_the_place_of_another_is_refused_by_name():
    with cluster(num_servers=3) as servers:
        swapped = ShardMap.of(3, [servers.endpoints[each] for each in (0, 2, 1)])
        for store in servers.stores:
            store.engine.shard_map = swapped
        transport = driver(servers)
        with pytest.raises(
            UsageError, match=f"^{servers.endpoints[2]} is server 2 of .* server 1 in"
        ):
            states_of(transport)


def test_shards_of_servers_without_a_list_do_not_move():
    with cluster(num_servers=2) as servers:
        for store in servers.stores:
            store.engine.shard_map = ShardMap.of(2)
        with pytest.raises(UsageError, match="without a list of servers"):
            driver(servers)


def test_a_server_that_is_added_before_there_are_tables_gets_its_share_of_their_shards():
    shard_map = with_server(ShardMap.of(2, ("a:1", "b:1")), "c:1", [0] * NUM_PLACES)
    for num_shards in (16, 64, 256, 1024):
        share = shard_map.owners[:num_shards].count(2)
        assert abs(share - num_shards / 3) < 2, num_shards


def test_server_without_room_for_the_shards_is_not_added():
    with cluster(num_servers=2, num_workers=1) as servers:
        client = servers.client()
        declare(client)
        random = np.random.default_rng(1)
        client.push_grad(gradients(random), push_id(sequence=0)).result()
        before = client.digest()
        transport = driver(servers)
        spare = servers.start_spare(memory_limit=1000)
        with pytest.raises(OverloadedError, match=f"{spare}.*memory limit of 1000"):
            add(transport, spare)
        assert client.digest() == before
        assert all(not each.move for each in states_of(transport).values())
        client.push_grad(gradients(random), push_id(sequence=1)).result()


def test_server_0_cannot_be_drained():
    with cluster(num_servers=2, num_workers=1) as servers:
        transport = driver(servers)
        with pytest.raises(UsageError, match="server 0 keeps the shard map"):
            without_server(transport.shard_map, 0, [0] * 1024)
        with pytest.raises(UsageError, match="no server 7"):
            without_server(transport.shard_map, 7, [0] * 1024)
        with pytest.raises(CtrPsError):
            add(transport, servers.endpoints[1])


@pytest.mark.parametrize("with_pulls", [False, True], ids=["push", "push with pulls"])
def test_a_push_whose_server_has_left_follows_its_shards(monkeypatch, with_pulls):
    """Server 1 has taken its part, and the answer is lost; until the push comes again it has ended."""
    keys = np.sort(KEYS)
    grad = SparseGrad(keys, np.full((keys.size, 1), -2.0, np.float32), 1)  # adds 1 to each row
    push = Gradients(sparse={"wide": grad}, dense={})
    with cluster(num_servers=2) as servers:
        client = servers.client()
        declare(client)
        call = GrpcTransport.call

        class Lost:
            def __init__(self, answer):
                self.sent, self.when_failed = answer.sent, lambda tell: None
                answer.result()

            def result(self):
                monkeypatch.undo()
                transport = driver(servers)
                weights = weights_of(states_of(transport))
                moved(transport, without_server(transport.shard_map, 1, weights))
                raise TransportError("away")

        def lossy(transport, server, of, argument, **rest):
            answer = call(transport, server, of, argument, **rest)
            return Lost(answer) if of in (PUSH_GRAD, PUSH_PULL) and server == 1 else answer

        monkeypatch.setattr(GrpcTransport, "call", lossy)
        if with_pulls:
            client.push_pull(push, push_id(sequence=0), keys={"wide": keys}, into={})[1].result()
        else:
            client.push_grad(push, push_id(sequence=0)).result()

        found = client.pull_sparse({"wide": keys}, missing=Missing.INITIAL).result().rows["wide"]
        np.testing.assert_array_equal(found, np.ones_like(found))


def test_a_move_goes_on_through_a_step_that_takes_long(monkeypatch):
    monkeypatch.setattr("ctr_ps.ps_worker.extras.moves.move.SIGN_S", 0.01)
    with cluster(num_servers=2, num_workers=2) as servers:
        client = servers.client()
        declare(client)
        random = np.random.default_rng(1)
        client.push_grad(gradients(random), push_id(worker=0, sequence=0), at=0)
        transport, spare = driver(servers), servers.start_spare()
        states = states_of(transport)
        move = Move(transport, states, with_server(transport.shard_map, spare, weights_of(states)))
        driving = threading.Thread(target=move.run)
        driving.start()
        handlers = [each._handlers for each in (*servers.servers, servers.spares[spare])]
        moves = [each.moves for each in handlers]
        wait_until(
            lambda: all(each._move and each._move.phase is Phase.DRAIN for each in moves[:2])
        )
        for _ in range(3):
            for each in handlers:
                each.pass_time(0.9 * SILENT_S)
            wait_until(lambda: all(each._move.silent_s < 0.5 * SILENT_S for each in moves))
        before = time.monotonic()
        client.push_grad(gradients(random), push_id(worker=1, sequence=0), at=0).result()
        driving.join(60.0)
        assert move._held_at > before, "the step counts as time for which calls waited"
        assert transport.shard_map.servers == (0, 1, 2)


@pytest.mark.parametrize("reduces", [False, True], ids=["barrier", "all-reduce"])
def test_workers_wait_for_each_other_while_a_server_is_drained(reduces):
    with cluster(num_servers=2, num_workers=2) as servers:
        client = servers.client()
        declare(client)

        def arrive(worker: int):
            if reduces:
                return client.all_reduce("r", worker, np.ones(3), ReduceOp.SUM, step=0)
            return client.barrier("b", worker, step=0)

        first = arrive(0)
        waiting = servers.stores[1].engine.job.waiting
        wait_until(lambda: len(waiting()) == 1)
        transport = driver(servers)
        moved(transport, without_server(transport.shard_map, 1, weights_of(states_of(transport))))
        assert not waiting()
        found = arrive(1), first  # the first one asks for the map when it is looked at
        if not reduces:
            assert [each.result() for each in found] == [0, 0]
            return
        for each in found:
            np.testing.assert_array_equal(each.result().values, np.full(3, 2.0))


def test_a_table_that_is_declared_during_a_move_is_on_all_servers_of_the_new_map():
    with cluster(num_servers=2) as servers:
        client = servers.client()
        declare(client)
        transport = driver(servers)
        states = states_of(transport)
        after = with_server(transport.shard_map, servers.start_spare(), weights_of(states))
        move = Move(transport, states, after)
        late = replace(COUNTED, name="late")
        declares = threading.Thread(target=lambda: client.create_table(late))
        prepare = move._prepare

        def declare_now() -> None:
            declares.start()
            waits = servers.servers[0]._handlers.moves
            wait_until(lambda: bool(waits._waiting))
            prepare()

        move._prepare = declare_now
        move.run()
        declares.join()

        found = client.pull_sparse({"late": KEYS}, missing=Missing.INITIAL).result()
        assert found.rows["late"].shape == (KEYS.size, 2)


def test_the_command_names_why_a_server_is_not_added(monkeypatch):
    def without_places(shard_map: ShardMap, endpoint: str, _: object) -> ShardMap:
        endpoints = (*shard_map.endpoints, endpoint)
        return ShardMap(2, (0, 1, 2), shard_map.owners, endpoints)

    with cluster(num_servers=2) as servers:
        spare = servers.start_spare()
        command = [servers.endpoints[0], "add", spare]

        def told() -> str:
            result = CliRunner().invoke(cli.app, command)
            assert result.exit_code == UsageError.exit_code
            return result.output

        with monkeypatch.context() as patched:
            patched.setattr(cli, "with_server", without_places)
            assert f"{spare} would get no shards" in told()
        servers.stores[0].engine.journal = Journal()  # another than that of a server without a log
        assert f"{spare} keeps no update log" in told()
        command[0] = servers.endpoints[1]
        assert "is not server 0 of its cluster" in told()


def test_shards_are_balanced_by_bytes_or_by_load(monkeypatch):
    monkeypatch.setattr(cli, "LOAD_S", 1.0)
    with cluster(num_servers=2, num_workers=1) as servers:
        client = servers.client()
        declare(client)
        shard_map = driver(servers).shard_map
        deep = KEYS[shard_map.route(KEYS, DEEP.num_shards)[0]]
        wide = KEYS[shard_map.route(KEYS, WIDE.num_shards)[1]]
        sparse = {
            "deep": SparseGrad(deep, np.ones((deep.size, DEEP.dim), np.float32), 1),
            "wide": SparseGrad(wide, np.ones((wide.size, 1), np.float32), 1),
        }
        client.push_grad(Gradients(sparse=sparse, dense={}), push_id(sequence=0)).result()

        def shares(by: str, *command: str) -> tuple[float, float]:
            command = (servers.endpoints[0], *(command or ("rebalance",)), "--by", by)
            result = CliRunner().invoke(cli.app, command)
            assert result.exit_code == 0, result.output
            before, after = re.findall(r"server 0 ([0-9.]+)%", result.output)
            return float(before), float(after)

        spare = servers.start_spare()
        commands = (("rebalance",), 50.0), (("add", spare), 33.3), (("drain", "1"), 100.0)
        for command, share in commands:
            of_server_0, then = shares("bytes", *command, "--dry-run")
            assert of_server_0 > 60.0
            assert then == pytest.approx(share, abs=5.0)

        result = CliRunner().invoke(cli.app, [servers.endpoints[0], "rebalance", "--by", "load"])
        assert result.exit_code == UsageError.exit_code
        assert "nothing was pulled or pushed" in result.output

        shards = [
            shard_map.count_by_shard(deep[i : i + 1], DEEP.num_shards, 0).argmax() for i in range(9)
        ]
        hot = deep[[0, next(i for i in range(9) if shards[i] != shards[0])]]
        is_over = threading.Event()

        def pull() -> None:
            while not is_over.is_set():
                client.pull_sparse({"deep": hot}, missing=Missing.ZEROS).result()

        pulls = threading.Thread(target=pull)
        pulls.start()
        try:
            assert shares("load") == pytest.approx((100.0, 50.0), abs=1.0)
            assert shares("load") == pytest.approx((50.0, 50.0), abs=15.0)
        finally:
            is_over.set()
            pulls.join()


def test_a_command_waits_for_a_move_whose_driver_is_gone(monkeypatch):
    with cluster(num_servers=2, num_workers=1) as servers:
        declare(servers.client())
        transport = driver(servers)
        begin = BeginMove(token="other", shard_map=replace(transport.shard_map, epoch=2))
        for server in (0, 1):
            transport.call(server, BEGIN_MOVE, begin).result()

        echo = typer.echo

        def tell(what: str, **options: bool) -> None:
            echo(what, **options)
            if "waits up to" in what:
                for server in (0, 1):
                    end = EndMove(token="other", is_committed=False)
                    transport.call(server, END_MOVE, end).result()

        monkeypatch.setattr(typer, "echo", tell)
        result = CliRunner().invoke(cli.app, [servers.endpoints[0], "add", servers.start_spare()])
        assert "waits up to 40 s for the end of move other" in result.output
        assert result.exit_code == 0, result.output
        assert connected(transport).servers == (0, 1, 2)


def test_a_server_is_added_once_and_drained_by_its_endpoint():
    with cluster(num_servers=2, num_workers=1) as servers:
        declare(servers.client())
        spare, other = servers.start_spare(), servers.start_spare()

        def told(*command: str) -> str:
            result = CliRunner().invoke(cli.app, [servers.endpoints[0], *command])
            assert result.exit_code == 0, result.output
            return result.output

        told("add", spare)
        told("add", other)
        assert f"{spare} is in the cluster already" in told("add", spare)
        told("drain", spare)
        result = CliRunner().invoke(cli.app, [servers.endpoints[0], "drain", spare])
        assert result.exit_code == UsageError.exit_code
        assert f"{spare} is not in the cluster, only {servers.endpoints[0]}" in result.output
        shard_map = connected(driver(servers))
        assert shard_map.endpoints == (*servers.endpoints[:2], other)
        assert shard_map.epoch == 4


def test_servers_that_do_not_answer_are_named(monkeypatch):
    monkeypatch.setattr(cli, "FIRST_S", 0.3)
    monkeypatch.setattr(cli, "RETRY_S", 1.0)
    monkeypatch.setattr("ctr_ps.ps_worker.cluster.placement.ASK_S", 0.3)
    with cluster(num_servers=2, num_workers=1) as servers:
        declare(servers.client())

        def told(*command: str) -> str:
            result = CliRunner().invoke(cli.app, [servers.endpoints[0], *command])
            assert result.exit_code == TransportError.exit_code, result.output
            return result.output

        with free_port() as port:
            nobody = f"127.0.0.1:{port}"
        assert f"nothing answers at {nobody}: start a server there with ps-server --spare" in told(
            "add", nobody
        )
        servers.stop_server(1)
        away = f"server 1 ({servers.endpoints[1]})"
        for command in (["status"], ["drain", "1"]):
            found = told(*command)
            assert f"server 0  {servers.endpoints[0]}  512 places  0 rows" in found
            assert f"server 1  {servers.endpoints[1]}  512 places  no answer" in found
            assert f"no answer from {away}: start it again, with its update log" in found
            assert (f"waits for {away}" in found) == (command != ["status"])
        servers.stop_server(0)
        assert f"nothing answers at {servers.endpoints[0]}: is the job over?" in told("status")


def test_a_command_waits_for_a_server_that_recovers(monkeypatch):
    with cluster(num_servers=1, num_workers=1) as servers:
        declare(servers.client())
        starts = [RecoveringError("starting"), RecoveringError("starting")]
        call = GrpcTransport.call

        def recovering(transport, server, of, *arguments, **options):
            if starts:
                raise starts.pop()
            return call(transport, server, of, *arguments, **options)

        monkeypatch.setattr(GrpcTransport, "call", recovering)
        result = CliRunner().invoke(cli.app, [servers.endpoints[0], "status"])
        assert result.exit_code == 0, result.output
        assert not starts


def test_a_server_that_answers_anybody_is_not_added_to_others(monkeypatch):
    with cluster(num_servers=0) as servers:
        token = "admin a-token-of-sixteen-or-more"
        servers.start_server(ParameterStore(), credentials=Credentials(token=token))
        servers.stores[0].engine.shard_map = ShardMap.of(1, servers.endpoints)
        monkeypatch.setenv("CTR_PS_TOKEN", token.removeprefix("admin "))
        for credentials, told in ((None, "without a token"), (Credentials(token=token), "done: ")):
            spare = servers.start_spare(credentials=credentials)
            result = CliRunner().invoke(cli.app, [servers.endpoints[0], "add", spare])
            assert told in result.output
            assert (result.exit_code == 0) == (credentials is not None)


def test_progress_does_not_foretell_an_end_while_rows_change(capsys, monkeypatch):
    monkeypatch.setattr(cli, "TELL_S", 0.0)
    for copied, told in ((250, "about 3 s left"), (1200, "again those that change meanwhile")):
        began = time.monotonic() - 1.0
        cli._Teller()(Progress(1000, copied_rows=copied, copied_bytes=2**20, began=began))
        assert told in capsys.readouterr().err


def test_a_command_that_is_interrupted_says_where_the_shards_are(monkeypatch):
    def interrupted(_: Move) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Move, "_prepare", interrupted)
    with cluster(num_servers=2, num_workers=1) as servers:
        declare(servers.client())
        result = CliRunner().invoke(cli.app, [servers.endpoints[0], "add", servers.start_spare()])
        assert "nothing has moved" in result.output
        assert result.exit_code == 130
        assert driver(servers).shard_map.epoch == 1


def test_a_move_ends_though_all_rows_change_all_the_time(monkeypatch):
    monkeypatch.setattr("ctr_ps.ps_worker.extras.moves.move.PART_BYTES", 1000)
    monkeypatch.setattr("ctr_ps.ps_worker.extras.moves.move.FEW_ROWS", 10)
    with cluster(num_servers=2, num_workers=1) as servers:
        client = servers.client()
        declare(client)
        ones = SparseGrad(np.sort(KEYS), np.ones((KEYS.size, 1), np.float32), 1)
        sequences = itertools.count()

        def push() -> None:
            pushed = Gradients(sparse={"wide": ones}, dense={})
            client.push_grad(pushed, push_id(sequence=next(sequences))).result()

        push()
        transport = driver(servers)
        states = states_of(transport)
        after = with_server(transport.shard_map, servers.start_spare(), weights_of(states))
        move = Move(transport, states, after, mib_per_s=1e6)
        take = move._take

        def take_after_push(*arguments, with_counts):
            if not with_counts:
                push()
            return take(*arguments, with_counts=with_counts)

        move._take = take_after_push
        move.run()
        assert move.progress.copied_rows < 6 * KEYS.size
        found = client.pull_sparse({"wide": KEYS}, missing=Missing.INITIAL).result().rows["wide"]
        np.testing.assert_array_equal(found, np.full_like(found, -0.5 * next(sequences)))
