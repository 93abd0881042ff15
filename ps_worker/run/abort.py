"""How an error of a worker ends the job for all: the servers tell the others, which do not wait for it then.

A worker that has joined aborts the job (`Run`). One that has not, as its files are missing, joins to do so:
else the others would wait for it at the start.
"""

import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from protos.errors import AbortedError, CtrPsError, UsageError
from protos.role import HeterRole, WorkerRole
from protos.store import Coordination
from ps_worker.cluster.open_store import is_in_process

logger = logging.getLogger(__name__)

CONNECT_S = 10.0
"""For servers that are started together with this worker: they serve some seconds later."""
_ANSWER_S = 5.0
_MAX_REASON = 1000  # characters of an error that others are told


def abort_by(error: BaseException, store: Coordination, worker: int) -> None:
    """Ends the job by an error of a worker that has joined, on all servers that can be reached."""
    reason = f"{type(error).__name__}: {error}"[:_MAX_REASON]
    try:
        # A file's name may have characters that UTF-8 does not.
        store.abort(
            worker,
            reason.encode(errors="backslashreplace").decode(),
            comes_again=isinstance(error, CtrPsError) and error.comes_again,
        )
    except CtrPsError as failure:
        logger.warning("not all others could be told of the error: %s", failure)


@contextmanager
def job_ends_by_errors(role: WorkerRole | HeterRole) -> Iterator[None]:
    """Ends the job by an error of the block, as `abort_before_joining` does."""
    try:
        yield
    except Exception as error:
        abort_before_joining(role, error)
        raise


def abort_before_joining(role: WorkerRole | HeterRole, error: BaseException) -> None:
    """Ends the job for all by an error of a worker that has not joined, if the servers answer soon.

    A UsageError is left to this process: a wrong job file is so for all, and servers that stay are not lost.
    """
    if is_in_process(role) or isinstance(error, UsageError):
        return
    # Imported late: a run in one process needs no gRPC.
    from ps_worker.cluster.connect import connect
    from ps_worker.cluster.grpc_transport import Deadlines

    # At once: servers that are not there are waited for first.
    name = role.members.name(role.worker_index)
    logger.error("%s ends, and with it the job: %s", name, error)
    try:
        with connect(
            role.endpoints,
            connect_timeout_s=CONNECT_S,
            deadlines=Deadlines(rpc_s=_ANSWER_S, wait_s=0.0),
            retry_s=0.0,
        ) as store:
            incarnation = secrets.randbits(63)
            store.join(role.worker_index, incarnation, terms=role.members.terms).result()
            abort_by(error, store, role.worker_index)
    except AbortedError:
        return  # another worker was first
    except CtrPsError as failure:
        logger.warning("the others could not be told of the error: %s", failure)
