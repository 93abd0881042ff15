"""Asks a server in the Open Inference Protocol, with Triton's client.

    triton_client.py HTTP GRPC request.json                  # a request of each kind
    triton_client.py HTTP GRPC request.json --load 10000     # many, until a line comes on stdin
    triton_client.py --fields                                # number and type of each field of its messages

Prints JSON. The request has samples, the expected probabilities by version, and the token.
"""

import argparse
import json
import sys
import threading
from typing import Any

import numpy as np
import tritonclient.grpc as by_grpc
import tritonclient.http as by_http
from tritonclient.utils import InferenceServerException


def arrays_of(samples: list[Any], names: list[str]) -> dict[str, np.ndarray]:
    numbers = np.array([dense for dense, _ in samples], np.float64).astype(np.float32)  # None: nan
    texts = np.array([[text.encode() for text in slots] for _, slots in samples], np.object_)
    columns = [*numbers.T, *texts.T]
    return {name: np.ascontiguousarray(each) for name, each in zip(names, columns, strict=True)}


def inputs_of(library: Any, arrays: dict[str, np.ndarray], **how: Any) -> list[Any]:
    """Returns the inputs of a request; `how` is for HTTP, binary or not."""
    found = []
    for name, array in arrays.items():
        datatype = "FP32" if array.dtype == np.float32 else "BYTES"
        tensor = library.InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array, **how)
        found.append(tensor)
    return found


class Client:
    """Clients of both protocols; each thread needs its own."""

    def __init__(self, http: str, grpc: str, token: str) -> None:
        self.http = by_http.InferenceServerClient(http)
        self.grpc = by_grpc.InferenceServerClient(grpc)
        self._token = token

    @property
    def headers(self) -> dict[str, str]:
        """Those of a request; a new dictionary, as the library writes to it."""
        return {"authorization": f"Bearer {self._token}"}

    def names(self) -> list[str]:
        found = self.http.get_model_metadata("ctr", headers=self.headers)["inputs"]
        return [each["name"] for each in found]


def refusal(call: Any) -> str:
    """Returns the status that a call ends with."""
    try:
        call()
    except InferenceServerException as error:
        return str(error.status())
    return "none"


def once(client: Client, request: Any) -> dict[str, Any]:
    """Makes a request of each kind."""
    names = client.names()
    of_grpc = client.grpc.get_model_metadata("ctr", headers=client.headers)
    arrays = arrays_of(request["samples"], names)
    flat = {name: array.reshape(-1, 1) for name, array in arrays.items()}
    json_output = [by_http.InferRequestedOutput("probability", binary_data=False)]
    expected = np.array(request["expected"]["epoch-1"], np.float32)
    answers = {
        "http binary": client.http.infer("ctr", inputs_of(by_http, arrays), headers=client.headers),
        "http json": client.http.infer(
            "ctr",
            inputs_of(by_http, arrays, binary_data=False),
            outputs=json_output,
            headers=client.headers,
        ),
        "http 2-D": client.http.infer("ctr", inputs_of(by_http, flat), headers=client.headers),
        "grpc": client.grpc.infer("ctr", inputs_of(by_grpc, arrays), headers=client.headers),
    }
    return {
        "is_ready": [
            client.http.is_server_live(),
            client.http.is_server_ready(),
            client.http.is_model_ready("ctr", headers=client.headers),
            client.grpc.is_server_live(),
            client.grpc.is_server_ready(),
            client.grpc.is_model_ready("ctr", headers=client.headers),
        ],
        "num_inputs": [len(names), len(of_grpc.inputs)],
        "equal": {
            name: np.array_equal(answer.as_numpy("probability"), expected)
            for name, answer in answers.items()
        },
        "without_token": [
            refusal(lambda: client.http.infer("ctr", inputs_of(by_http, arrays))),
            refusal(lambda: client.grpc.infer("ctr", inputs_of(by_grpc, arrays))),
        ],
    }


def fields() -> dict[str, dict[str, list[int]]]:
    """Returns number and type of each field, by the name of its message."""
    found: dict[str, dict[str, list[int]]] = {}

    def add(message: Any) -> None:
        found[message.full_name] = {each.name: [each.number, each.type] for each in message.fields}
        for nested in message.nested_types:
            add(nested)

    for message in by_grpc.service_pb2.DESCRIPTOR.message_types_by_name.values():
        add(message)
    return found


class Load:
    """Requests of one row each, from several threads, by both protocols."""

    def __init__(self, options: Any, request: Any) -> None:
        self._options = options
        self._request = request
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self.found: dict[str, Any] = {"requests": 0, "failed": 0, "wrong": 0, "versions": {}}

    def run(self, num_threads: int = 4) -> None:
        """Asks until a line comes on stdin, and the least number of requests was made."""
        threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(num_threads)]
        for thread in threads:
            thread.start()
        sys.stdin.readline()
        self._is_over.set()
        for thread in threads:
            thread.join()

    def _is_done(self) -> bool:
        with self._lock:
            return self._is_over.is_set() and self.found["requests"] >= self._options.load

    def _ask(self, thread: int) -> None:
        client = Client(self._options.http, self._options.grpc, self._request["token"])
        names, samples = client.names(), self._request["samples"]
        library, asked = (by_http, client.http) if thread % 2 else (by_grpc, client.grpc)
        requests = [inputs_of(library, arrays_of([each], names)) for each in samples]
        number = 0
        while not self._is_done():
            row = number = (number + 1) % len(samples)
            try:
                answer = asked.infer("ctr", requests[row], headers=client.headers)
            except InferenceServerException as error:
                print(error, file=sys.stderr)
                self._count("failed")
                continue
            response = answer.get_response()
            version = response["model_version"] if thread % 2 else response.model_version
            expected = np.float32(self._request["expected"][version][row])
            self._count(version, is_right=bool(answer.as_numpy("probability")[0] == expected))

    def _count(self, version: str, *, is_right: bool = True) -> None:
        with self._lock:
            self.found["requests"] += 1
            if version == "failed":
                self.found["failed"] += 1
                return
            self.found["wrong"] += not is_right
            self.found["versions"][version] = self.found["versions"].get(version, 0) + 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("http", nargs="?")
    parser.add_argument("grpc", nargs="?")
    parser.add_argument("request", nargs="?")
    parser.add_argument("--load", type=int, default=0)
    parser.add_argument("--fields", action="store_true")
    options = parser.parse_args()
    if options.fields:
        print(json.dumps(fields()))
        return
    with open(options.request, encoding="utf-8") as file:  # noqa: PTH123
        request = json.load(file)
    if not options.load:
        print(json.dumps(once(Client(options.http, options.grpc, request["token"]), request)))
        return
    load = Load(options, request)
    load.run()
    print(json.dumps(load.found))


if __name__ == "__main__":
    main()
