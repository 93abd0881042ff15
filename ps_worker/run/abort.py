"""How an error of a worker ends the job for all: the servers tell the others, which do not wait for it then.

A worker that has joined aborts the job (`Run`). One that has not, as its files are missing, joins to do so:
else the others would wait for it at the start.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from ctr_ps.protos.errors import CtrPsError, UsageError, comes_again
from ctr_ps.protos.role import HeterRole, WorkerRole
from ctr_ps.protos.store import Coordination, abort_reason

logger = logging.getLogger(__name__)


def abort_by(error: BaseException, store: Coordination, worker: int) -> None:
    """Ends the job by an error of a worker that has joined, on all servers that can be reached."""
    try:
        store.abort(worker, abort_reason(error), comes_again=comes_again(error))
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
    if role.is_in_process or isinstance(error, UsageError):
        return
    # Imported late: a run in one process needs no gRPC.
    from ctr_ps.ps_worker.cluster.connect import abort_unjoined

    abort_unjoined(role, error)
