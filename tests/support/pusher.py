"""A counting worker: it pushes ones to a table of counters, and records acknowledged pushes.

    python -m tests.support.pusher FOLDER NUM_PUSHES [PACE_S]       # its role is in the environment

Each push adds 1 to some counters: gradients of -1 at a learning rate of 1. Of the pushes, 5 % are lost, with
their requests or replies, and 5 % are sent twice. A file "enough" in the folder ends it sooner.
"""

import os
import secrets
import sys
import time
from collections import deque
from pathlib import Path

import numpy as np

from ctr_ps.protos.futures import Future
from ctr_ps.protos.gradients import Gradients, SparseGrad
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.role import WorkerRole, role_from_environment
from ctr_ps.protos.spec import InitializerSpec, OptimizerSpec, TableSpec
from ctr_ps.protos.store import Lease, PushId, Version, WorkerLoss
from ctr_ps.ps_worker.cluster.connect import connect
from ctr_ps.ps_worker.run.membership import LeaseRenewal
from tests.support.call_faults import faults_of_calls

NUM_KEYS = 64
KEYS_A_PUSH = 8
ON_THE_WAY = 4
LEASE = Lease(seconds=1.5, on_worker_loss=WorkerLoss.WAIT)
COUNTERS = TableSpec(
    name="counters",
    dim=1,
    initializer=InitializerSpec(),
    optimizer=OptimizerSpec(name="sgd", params={"learning_rate": 1.0}),
)


def keys_of(worker: int, sequence: int) -> Keys:
    """Returns the keys that a push increments: uint64[KEYS_A_PUSH], ascending."""
    random = np.random.default_rng((worker, sequence))
    return np.sort(random.choice(NUM_KEYS, KEYS_A_PUSH, replace=False)).astype(np.uint64)


def push_of(keys: Keys, worker: int, sequence: int, incarnation: int) -> tuple[Gradients, PushId]:
    """Returns a push that adds 1 to the counters of some keys."""
    values = -np.ones((keys.size, 1), np.float32)
    push_id = PushId(
        worker=worker,
        incarnation=incarnation,
        sequence=sequence,
        step=sequence + 1,
        examples=1,
        batches=1,
        pulled=0,
    )
    return Gradients(sparse={COUNTERS.name: SparseGrad(keys, values, examples=1)}), push_id


def main() -> None:
    """Pushes, with several pushes in flight."""
    folder, num_pushes = Path(sys.argv[1]), int(sys.argv[2])
    pace_s = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
    role = role_from_environment(os.environ)
    assert isinstance(role, WorkerRole)
    worker, incarnation = role.worker_index, secrets.randbits(63)
    on_the_way: deque[tuple[int, Future[Version]]] = deque()
    with (
        faults_of_calls(folder / f"{worker}.faults", lost=0.05, twice=0.05),
        connect(role.endpoints) as client,
        # In one piece each, since this process is killed.
        (folder / f"{worker}.sent").open("ab", buffering=0) as sent,
        (folder / f"{worker}.acknowledged").open("ab", buffering=0) as acknowledged,
    ):
        client.join(worker, incarnation, terms={}, lease=LEASE).result()
        renewal = LeaseRenewal(client, worker, LEASE)
        client.create_table(COUNTERS)
        for sequence in range(num_pushes):
            time.sleep(pace_s)
            is_last = sequence == num_pushes - 1 or (folder / "enough").exists()
            sent.write(f"{sequence}\n".encode())
            on_the_way.append(
                (
                    sequence,
                    client.push_grad(
                        *push_of(keys_of(worker, sequence), worker, sequence, incarnation)
                    ),
                )
            )
            while len(on_the_way) == ON_THE_WAY or (on_the_way and is_last):
                first, answer = on_the_way.popleft()
                answer.result()
                acknowledged.write(f"{first}\n".encode())
            if is_last:
                break
        renewal.close()


if __name__ == "__main__":
    main()
