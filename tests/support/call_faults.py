"""Faults of the calls of this process's clients: lost requests and replies, duplicates, delays.

with faults_of_calls(journal, calls="Push", lost=0.05): ...
python -P tests/support/call_faults.py JOURNAL train job.toml    # ps-worker whose pushes have faults
"""

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import grpc

from ctr_ps.protos.wire.stream import FailedCallError, Failure
from ctr_ps.ps_worker.cluster import grpc_transport
from ctr_ps.ps_worker.cluster.slow_calls import Delays


@contextmanager
def faults_of_calls(
    journal: Path,
    *,
    calls: str | tuple[str, ...] = "Push",
    lost: float = 0.0,
    twice: float = 0.0,
    delay_s: float = 0.0,
) -> Iterator[None]:
    """Puts faults into calls for the time of a block, on streams and without them.

    Args:
        journal: File to which a line "fault call" is appended for each, so that a test knows what happened.
        calls: Beginnings of the calls' names.
        lost: Share of the calls that fail; of half of them the request is lost, of the others the reply.
        twice: Share of the calls that are sent twice; the first answer counts.
        delay_s: Seconds by which each call is sent later.
    """
    send = grpc_transport._Connection.send
    delays, lock = Delays("call-faults"), threading.Lock()
    random: dict[tuple[int, str], Random] = {}  # so that other calls do not change the choice

    def send_with_faults(self: Any, server: int, call: str, *request: Any, **options: Any) -> Any:
        send_it = partial(send, self, server, call, *request, **options)
        if not call.startswith(calls):
            return send_it()
        with lock:
            own = random.setdefault((server, call), Random(f"{server}/{call}"))
            is_lost, is_reply, is_twice = (
                own.random() < lost,
                own.random() < 0.5,
                own.random() < twice,
            )
        happens = {
            "request_lost": is_lost and not is_reply,
            "reply_lost": is_lost and is_reply,
            "twice": is_twice,
            "delayed": delay_s > 0,
        }
        with journal.open("ab", buffering=0) as file:  # at once: processes are killed
            file.write("".join(f"{name} {call}\n" for name in happens if happens[name]).encode())
        faulty = _FaultyCall()
        if happens["request_lost"]:
            faulty.fail(grpc.StatusCode.UNAVAILABLE, "the test lost the request")
            return faulty
        copies = 2 if is_twice else 1
        deliver = partial(faulty.deliver, send_it, copies, loses_reply=happens["reply_lost"])
        if delay_s:
            delays.after(delay_s, deliver)
        else:
            deliver()
        return faulty

    with patch.object(grpc_transport._Connection, "send", send_with_faults):
        yield


class _FaultyCall(futures.Future[Any]):
    """A call with what is used of a grpc.Future; the first answer to a copy ends it. Thread-safe."""

    def deliver(self, send: Callable[[], Any], copies: int, *, loses_reply: bool) -> None:
        """Sends the call; raises nothing."""
        try:
            sent = [send() for _ in range(copies)]
        except ValueError as error:  # the channel was closed during the delay
            self.fail(grpc.StatusCode.CANCELLED, str(error))
            return
        for copy in sent:
            copy.add_done_callback(partial(self._answered, loses_reply=loses_reply))

    def _answered(self, copy: Any, *, loses_reply: bool) -> None:
        if loses_reply:
            self.fail(grpc.StatusCode.UNAVAILABLE, "the test lost the reply")
            return
        error = copy.exception()
        with suppress(futures.InvalidStateError):  # another copy was answered before
            if error is None:
                self.set_result(copy.result())
            else:
                self.set_exception(error)

    def fail(self, code: grpc.StatusCode, details: str) -> None:
        with suppress(futures.InvalidStateError):
            self.set_exception(FailedCallError(Failure(code, details)))

    def cancel(self) -> bool:
        """Ends it here; what was sent goes on, as where the cancellation is lost."""
        self.fail(grpc.StatusCode.CANCELLED, "cancelled")
        return True


def main() -> None:
    from ctr_ps.ps_worker.cli import main as ps_worker

    journal = Path(sys.argv.pop(1))
    with faults_of_calls(journal, lost=0.05, twice=0.05, delay_s=0.001):
        ps_worker()


if __name__ == "__main__":
    main()
