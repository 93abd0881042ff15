"""Requests to predict the first rows of a test, as JSON and as messages of gRPC."""

import struct
from typing import Any

import numpy as np

from ctr_ps.protos.v1 import open_inference_pb2 as messages
from tests.ps_worker.extras.inference_server.conftest import Trained

NUM_ROWS = 5


def columns(trained: Trained, num_rows: int = NUM_ROWS) -> list[tuple[str, list[Any]]]:
    """Returns the columns of the first rows, by the names of Criteo's."""
    rows = trained.samples[:num_rows]
    numbers = [(f"I{i + 1}", [row[1][i] for row in rows]) for i in range(13)]
    values = [(f"C{i + 1}", [row[2][i] for row in rows]) for i in range(26)]
    return numbers + values


def json_request(trained: Trained, num_rows: int = NUM_ROWS) -> dict[str, Any]:
    inputs = [
        {
            "name": name,
            "datatype": "FP32" if name[0] == "I" else "BYTES",
            "shape": [num_rows],
            "data": values,
        }
        for name, values in columns(trained, num_rows)
    ]
    return {"id": "42", "inputs": inputs}


def grpc_request(trained: Trained, num_rows: int = NUM_ROWS, *, raw: bool = True) -> Any:
    request = messages.ModelInferRequest(model_name="ctr", id="42")
    for name, values in columns(trained, num_rows):
        is_number = name[0] == "I"
        tensor = request.inputs.add(
            name=name, datatype="FP32" if is_number else "BYTES", shape=[num_rows]
        )
        numbers = [np.nan if value is None else value for value in values] if is_number else []
        texts = [] if is_number else [value.encode() for value in values]
        if not raw:
            tensor.contents.fp32_contents.extend(numbers)
            tensor.contents.bytes_contents.extend(texts)
        elif is_number:
            request.raw_input_contents.append(np.array(numbers, "<f4").tobytes())
        else:
            parts = [struct.pack("<I", len(text)) + text for text in texts]
            request.raw_input_contents.append(b"".join(parts))
    return request
