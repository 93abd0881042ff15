"""What describes a saved model, and what is asked of one: attachments, bodies over HTTP, gRPC's tensors."""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aiohttp import web
from google.protobuf.message import DecodeError

from ctr_ps.ctr_model.schema import DenseColumn, Schema
from ctr_ps.protos.errors import CtrPsError, DataError
from ctr_ps.protos.v1 import open_inference_pb2 as messages
from ctr_ps.ps_server.checkpoint.files.manifest import Share
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.checkpoint.writer import save_checkpoint
from ctr_ps.ps_worker.checkpoints.attachments import (
    attachments_of,
    job_of_checkpoint,
    schema_of_checkpoint,
    values_of_checkpoint,
)
from ctr_ps.ps_worker.data.slot_values import SlotValues
from ctr_ps.ps_worker.data.user_code.samples import batches_of_samples
from ctr_ps.ps_worker.extras.inference_server import grpc_service
from ctr_ps.ps_worker.extras.inference_server.http_service import HEADER_LENGTH, _Asked
from ctr_ps.ps_worker.extras.inference_server.tensors import samples_of
from ctr_ps.ps_worker.job import Job
from tests.fuzz.data_targets import require_rows
from tests.fuzz.driver import Target
from tests.fuzz.mutations import mutated, mutated_json
from tests.support.checkpoints import sign_attachment

SCHEMA = Schema(dense=(DenseColumn(name="a", transform="log1p"),), slots=("x", "y"))
VALUES = SlotValues({"x": ["text"], "y": ["keys", "lists"]})
MAX_ROWS = 100


def attachments(folder: Path) -> Target:
    """Returns the readers of a checkpoint's attachments, of which anybody can sign others."""
    target = folder / "saved"
    save_checkpoint(
        target,
        write_shares=lambda url, token: [Share(entries=())],
        tables={},
        blocks={},
        attachments=attachments_of(Job(), SCHEMA, VALUES),
    )
    readers: Mapping[str, Any] = {
        "job.json": lambda saved: job_of_checkpoint(saved).to_json(),
        "schema.json": lambda saved: json.dumps(schema_of_checkpoint(saved).to_dict()),
        "values.json": lambda saved: values_of_checkpoint(saved).to_json(),
    }
    names = list(readers)
    saved = Checkpoint.open(str(target))
    contents = [saved.attachment(name) for name in names]

    def make(rng: random.Random) -> bytes:
        number = rng.randrange(len(names))
        return bytes([number]) + mutated_json(contents[number], rng)

    def check(data: bytes) -> bytes:
        name = names[data[0]]
        sign_attachment(target, name, data[1:])
        text = readers[name](Checkpoint.open(str(target)))
        sign_attachment(target, name, text.encode())
        assert readers[name](Checkpoint.open(str(target))) == text
        return text.encode()

    seeds = [bytes([number]) + content for number, content in enumerate(contents)]
    return Target(seeds, make, check)


TENSORS = [
    {"name": "a", "datatype": "FP32", "shape": [2], "data": [1.5, None]},
    {"name": "x", "datatype": "BYTES", "shape": [2, 2], "data": [["p", "q"], ["r", ""]]},
    {"name": "y", "datatype": "INT64", "shape": [2, 1], "data": [7, 8]},
    {"name": "y.lengths", "datatype": "INT32", "shape": [2], "data": [1, -1]},
]
OUTPUTS = [{"name": "probability", "parameters": {"binary_data": True}}]
BINARY = [
    (2 * b"\0\0\x80\x3f", {"name": "a", "datatype": "FP32", "shape": [2]}),
    (b"\1\0\0\0p\0\0\0\0", {"name": "x", "datatype": "BYTES", "shape": [2]}),
    (16 * b"\1", {"name": "y", "datatype": "UINT64", "shape": [2]}),
]


def batch_bytes(tensors: Any) -> bytes:
    """Returns the rows that tensors are."""
    samples = samples_of(tensors, SCHEMA, max_rows=MAX_ROWS, values=VALUES)
    batches = list(batches_of_samples(samples, SCHEMA, batch_size=MAX_ROWS, meant=VALUES))
    assert sum(batch.size for batch in batches) == len(samples)
    return require_rows(batches, len(SCHEMA.slots))


def http(_: Path) -> Target:
    """Returns the decoder of requests to infer: a line of headers, then the body."""
    plain = {"id": "1", "inputs": TENSORS, "outputs": OUTPUTS}
    inputs = [{**head, "parameters": {"binary_data_size": len(raw)}} for raw, head in BINARY]
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    binary = b"".join(raw for raw, _ in BINARY)
    bodies = [(json.dumps(plain).encode(), b""), (head, binary)]

    def request(text: bytes, raw: bytes, length: str) -> bytes:
        return json.dumps({HEADER_LENGTH: length}).encode() + b"\n" + text + raw

    def make(rng: random.Random) -> bytes:
        text, raw = rng.choice(bodies)
        text = mutated_json(text, rng) if rng.random() < 0.7 else text
        raw = mutated(raw, rng) if rng.random() < 0.3 else raw
        length = rng.choice([len(text), len(text), len(text), len(text) - 1, 0, 10**9, "x"])
        data = request(text, raw, str(length))
        headers, _, body = data.partition(b"\n")
        return headers + b"\n" + mutated(body, rng) if rng.random() < 0.2 else data

    def check(data: bytes) -> bytes:
        headers, _, body = data.partition(b"\n")
        asked = _Asked(body, json.loads(headers))
        try:
            decoded = asked.decode()
        except web.HTTPException as error:
            raise DataError(str(error)) from error
        is_binary = asked.is_binary("probability")
        return batch_bytes(decoded.tensors) + bytes([is_binary])

    seeds = [request(text, raw, str(len(text))) for text, raw in bodies]
    return Target(seeds, make, check)


def grpc(_: Path) -> Target:
    """Returns the decoder of tensors over gRPC."""
    inputs = messages.ModelInferRequest.InferInputTensor
    contents = messages.InferTensorContents
    plain = messages.ModelInferRequest(
        inputs=[
            inputs(name="a", datatype="FP64", shape=[2], contents=contents(fp64_contents=[1, 2])),
            inputs(
                name="x",
                datatype="BYTES",
                shape=[2, 1],
                contents=contents(bytes_contents=[b"p", b""]),
            ),
            inputs(name="y", datatype="INT8", shape=[2], contents=contents(int_contents=[7, 8])),
        ]
    )
    raw = messages.ModelInferRequest(
        inputs=[inputs(**head) for _, head in BINARY], raw_input_contents=[raw for raw, _ in BINARY]
    )
    sized = messages.ModelInferRequest()
    sized.CopyFrom(raw)
    sized.inputs.append(inputs(name="x.lengths", datatype="INT32", shape=[2]))
    sized.raw_input_contents.append(b"\1\0\0\0\xff\xff\xff\xff")
    seeds = [each.SerializeToString() for each in (plain, raw, sized)]

    def make(rng: random.Random) -> bytes:
        if rng.random() < 0.5:
            return mutated(rng.choice(seeds), rng)
        message = messages.ModelInferRequest.FromString(rng.choice(seeds))
        for _ in range(rng.choice([1, 1, 2])):
            each = rng.choice(message.inputs)
            match rng.randrange(4):
                case 0:
                    each.datatype = rng.choice([*grpc_service._CONTENTS, "FP16", ""])
                case 1:
                    each.shape[:] = [
                        rng.choice([-1, 0, 1, 2, 3, 2**31, 2**62]) for _ in range(rng.randrange(5))
                    ]
                case 2:
                    each.name = rng.choice(["a", "x", "y", "x.lengths", "y.lengths", "z", ""])
                case _ if message.raw_input_contents:
                    at = rng.randrange(len(message.raw_input_contents))
                    message.raw_input_contents[at] = mutated(message.raw_input_contents[at], rng)
        return message.SerializeToString()

    def check(data: bytes) -> bytes:
        try:
            message = messages.ModelInferRequest.FromString(data)
        except DecodeError as error:  # gRPC refuses it
            raise CtrPsError(str(error)) from error
        return batch_bytes(grpc_service.tensors_in(message))

    return Target(seeds, make, check)
