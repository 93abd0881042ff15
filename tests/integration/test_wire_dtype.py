"""`wire_dtype = "bfloat16"`: what is rounded on its way, what is not, and what a job learns with it."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.gradients import DenseGrad, Gradients, SparseGrad, Values
from ctr_ps.protos.store import Missing
from ctr_ps.protos.wire import calls
from ctr_ps.protos.wire.encoding.arrays import from_bfloat16, to_bfloat16
from ctr_ps.ps_worker.cluster.client import ClusterClient
from tests.support.cluster import cluster
from tests.support.local_transport import LocalTransport, joined_client
from tests.support.stores import KEYS, TOWER, declare, in_process, pull, push_id, random_gradients
from tests.support.training import job, random_batches, small_model, together, worker_run

TRAIN = [random_batches(120, 32, seed=seed) for seed in (1, 2)]
TEST = random_batches(40, 256, seed=3)


def rounded(values: Values) -> Values:
    return from_bfloat16(to_bfloat16(values)).reshape(values.shape)


def test_numbers_are_rounded_on_their_way_alone() -> None:
    """Servers keep and read float32; the same client without rounds nothing."""
    pushed = random_gradients(1)
    expected = in_process()
    expected.push_grad(
        Gradients(
            sparse={
                name: SparseGrad(grad.keys, rounded(grad.values), grad.examples)
                for name, grad in pushed.sparse.items()
            },
            dense={
                name: DenseGrad(rounded(grad.values), grad.examples)
                for name, grad in pushed.dense.items()
            },
        ),
        push_id(sequence=0),
    ).result()

    with cluster(num_servers=2) as servers:
        client = servers.client(chunk_bytes=2_000)  # a push of several chunks
        declare(client)
        client.with_bfloat16().push_grad(pushed, push_id(sequence=0)).result()
        exact, coarse = pull(client), pull(client.with_bfloat16())

    for name, values in pull(expected).items():
        np.testing.assert_array_equal(exact[name], values)
        np.testing.assert_array_equal(coarse[name], rounded(values))
    assert (coarse["tower"] != exact["tower"]).any()


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.push_grad(random_gradients(1), push_id(sequence=0), at=0),
        lambda client: client.pull_sparse({"deep": KEYS}, missing=Missing.INITIAL, at=0),
        lambda client: client.pull_dense({"tower": np.empty(TOWER.length, np.float32)}, at=0),
        lambda client: client.push_pull(
            random_gradients(1),
            push_id(sequence=0),
            keys={"deep": KEYS},
            into={"tower": np.empty(TOWER.length, np.float32)},
            at=0,
        )[0],
    ],
    ids=["push_grad", "pull_sparse", "pull_dense", "push_pull"],
)
def test_synchronous_steps_are_not_rounded(call: Callable[[ClusterClient], Any]) -> None:
    with cluster(num_servers=2) as servers:
        client = servers.client()
        declare(client)
        before = client.digest()

        with pytest.raises(
            ProtocolError, match="step 0 sends bfloat16, but synchronous steps need fl"
        ):
            call(client.with_bfloat16()).result()

        assert client.digest() == before


@pytest.mark.parametrize("part", ["push", "sparse", "dense"])
def test_call_of_which_one_part_is_rounded_is_refused_as_a_whole(part: str) -> None:
    """The push comes first, and would be applied before a pull is refused."""
    store = in_process()
    transport = LocalTransport([store])
    client = joined_client(transport)
    declare(client)
    client.push_pull(
        random_gradients(1),
        push_id(sequence=0),
        keys={"deep": KEYS},
        into={"tower": np.empty(TOWER.length, np.float32)},
        at=0,
    )
    *_, (_, name, sent) = transport.calls
    assert name == "PushPull"
    later = replace(
        sent,
        push=replace(sent.push, push_id=push_id(sequence=1), at=1),
        sparse=replace(sent.sparse, at=2),
        dense=replace(sent.dense, at=2),
    )
    of = replace(later.push.chunk, bfloat16=True) if part == "push" else True
    changed = {"chunk": of} if part == "push" else {"bfloat16": of}
    rounded_call = replace(later, **{part: replace(getattr(later, part), **changed)})
    before = client.digest()

    with pytest.raises(ProtocolError, match="sends bfloat16"):
        transport.call(0, calls.PUSH_PULL, rounded_call).result()

    assert client.digest() == before
    assert store.status().version == 1


def trained(mode: str, wire_dtype: str) -> tuple[float, set[tuple[str, Any, bool]]]:
    """Trains two workers on two servers; returns the AUC, and which calls were rounded."""
    settings = job(
        mode,
        f"strategy.{mode}.wire_dtype={wire_dtype}",
        "optimizer.sparse={name='adagrad', learning_rate=0.1, initial_accumulator=0.0}",
        "optimizer.dense=adam",
    )
    seen: set[tuple[str, Any, bool]] = set()
    with cluster(num_servers=2, num_workers=2) as servers:
        clients = [servers.client(joins=False) for _ in TRAIN]
        runs: dict[int, float] = {}

        def work(worker: int) -> None:
            transport = clients[worker]._transport
            send = transport.call

            def call(server: int, call: Any, argument: Any, **named: Any) -> Any:
                of = getattr(argument, "chunk", argument)
                if hasattr(of, "bfloat16"):
                    seen.add((call.name, getattr(argument, "missing", None), of.bfloat16))
                return send(server, call, argument, **named)

            transport.call = call  # type: ignore[method-assign]
            with worker_run(
                clients[worker],
                small_model(),
                settings,
                worker=worker,
                num_workers=2,
                is_in_process=False,
            ) as run:
                run.train(TRAIN[worker])
                run.barrier("trained")
                runs[worker] = run.evaluate(TEST).auc()
                run.barrier("evaluated")

        together(*(functools.partial(work, worker) for worker in range(2)))
    assert runs[0] == runs[1]
    return runs[0], seen


@pytest.mark.parametrize("mode", ["async", "bounded_staleness"])
def test_job_sends_its_training_in_bfloat16_and_learns_as_well(mode: str) -> None:
    """Evaluation reads what servers have."""
    exact, sent = trained(mode, "float32")
    assert not any(is_rounded for _, _, is_rounded in sent)

    found, sent = trained(mode, "bfloat16")

    assert sent == {
        ("PushGrad", None, True),
        ("PullSparse", Missing.INITIAL, True),
        ("PullSparse", Missing.ZEROS, False),
        ("PullDense", None, True),
        ("PullDense", None, False),
    }
    assert found == pytest.approx(exact, abs=0.01)
    assert found > 0.8  # a tenth of the clicks is noise
