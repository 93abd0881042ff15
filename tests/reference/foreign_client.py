"""A client that has nothing but the .proto files and docs/wire.md: it trains a logistic regression of keys.

    python foreign_client.py HOST:PORT,HOST:PORT      in a folder with the generated code of ctr_ps/protos/v1

Prints as JSON the final weights by key, the loss of the first and the last pass, and the files of all modules
of ctr_ps. It shares no code with the project: nothing here may import what is not generated.
"""

import json
import math
import random
import struct
import sys
from collections.abc import Sequence
from typing import Any

import grpc

from ctr_ps.protos.v1 import data_plane_pb2 as data
from ctr_ps.protos.v1 import parameter_server_pb2 as control
from ctr_ps.protos.v1 import spec_pb2 as spec

TABLE, NUM_SHARDS, RATE, PASSES, BATCH = "words", 8, 0.5, 4, 16
DEADLINE_S = 30.0
SERVICE = "/ctr_ps.v1.ParameterServer/"
MASK = 2**64 - 1

Example = tuple[list[int], float]


def mix64(key: int) -> int:
    """The finalizer of splitmix64."""
    key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    key = (key ^ (key >> 27)) * 0x94D049BB133111EB & MASK
    return key ^ (key >> 31)


def server_of(key: int, num_servers: int) -> int:
    """Shard `s` is on server `s % num_servers`; the top bits of mix64 choose the shard."""
    return (mix64(key) >> (64 - NUM_SHARDS.bit_length() + 1)) % num_servers


def examples() -> list[Example]:
    """Returns 400 examples of three keys; those with an even first key are mostly clicked."""
    rng = random.Random(7)
    keys = [rng.getrandbits(64) for _ in range(60)]
    found = []
    for _ in range(400):
        chosen = rng.sample(keys, 3)
        found.append((chosen, float(rng.random() < (0.9 if chosen[0] % 2 == 0 else 0.1))))
    return found


class Client:
    """Calls of one worker to all servers."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        self.channels = [grpc.insecure_channel(each) for each in endpoints]
        self.member = data.Member(worker=0, incarnation=random.getrandbits(63))
        self.pushes = self.batches = 0

    def call(self, server: int, name: str, request: Any) -> Any:
        answer = (control if hasattr(control, f"{name}Response") else data).__dict__[
            f"{name}Response"
        ]
        call = self.channels[server].unary_unary(
            SERVICE + name, type(request).SerializeToString, answer.FromString
        )
        return call(request, timeout=DEADLINE_S, wait_for_ready=True)

    def everywhere(self, name: str, request: Any) -> None:
        for server in range(len(self.channels)):
            self.call(server, name, request)

    def of_servers(self, keys: Sequence[int]) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self.channels]
        for key in keys:
            found[server_of(key, len(self.channels))].append(key)
        return found

    def pull(self, keys: Sequence[int]) -> dict[int, float]:
        weights = {}
        for server, own in enumerate(self.of_servers(keys)):
            column = data.KeyColumn(table=TABLE, keys=struct.pack(f"<{len(own)}Q", *own))
            answer = self.call(
                server,
                "PullSparse",
                data.PullSparseRequest(
                    keys=[column], missing=data.MISSING_INITIAL, shard_map_epoch=1
                ),
            )
            weights |= zip(own, struct.unpack(f"<{len(own)}f", answer.rows[0].values), strict=True)
        return weights

    def push(self, grads: dict[int, float], num_examples: int, *, twice: bool) -> None:
        self.batches += 1
        push_id = data.PushId(
            worker=0,
            incarnation=self.member.incarnation,
            sequence=self.pushes,
            step=self.batches,
            examples=num_examples,
            batches=1,
        )
        self.pushes += 1
        for server, own in enumerate(self.of_servers(list(grads))):
            column = data.SparseGradColumn(
                table=TABLE,
                keys=struct.pack(f"<{len(own)}Q", *own),
                values=struct.pack(f"<{len(own)}f", *(grads[key] for key in own)),
                examples=num_examples,
            )
            chunk = data.PushChunk(sparse=[column], chunk=0, num_chunks=1)
            request = data.PushGradRequest(push_id=push_id, chunk=chunk, shard_map_epoch=1)
            for _ in range(1 + twice):  # as after an answer that was lost
                self.call(server, "PushGrad", request)


def main() -> None:
    client = Client(sys.argv[1].split(","))
    client.everywhere("Join", control.JoinRequest(member=client.member))
    table = spec.TableSpec(
        name=TABLE,
        dim=1,
        initializer=spec.InitializerSpec(kind="uniform", scale=0.0),
        optimizer=spec.OptimizerSpec(name="sgd", params={"learning_rate": RATE}),
        num_shards=NUM_SHARDS,
    )
    client.everywhere("CreateTable", control.CreateTableRequest(spec=table))
    rows, losses = examples(), []
    for _ in range(PASSES):
        loss = 0.0
        for start in range(0, len(rows), BATCH):
            batch = rows[start : start + BATCH]
            weights = client.pull(sorted({key for keys, _ in batch for key in keys}))
            grads = dict.fromkeys(weights, 0.0)
            for keys, label in batch:
                probability = 1.0 / (1.0 + math.exp(-sum(weights[key] for key in keys)))
                loss -= math.log(probability if label else 1.0 - probability)
                for key in keys:
                    grads[key] += probability - label
            client.push(grads, len(batch), twice=start % 3 == 0)
        losses.append(loss / len(rows))
    weights = client.pull(sorted({key for keys, _ in rows for key in keys}))
    client.everywhere("Leave", control.LeaveRequest(member=client.member))
    files = [
        str(module.__file__) for name, module in sys.modules.items() if name.startswith("ctr_ps")
    ]
    print(json.dumps({"weights": weights, "losses": losses, "files": files}))


if __name__ == "__main__":
    main()
