"""The claim of a run on its folder of checkpoints, so that no two runs save into one.

    OWNER             run and process that own the folder; created if no file is there
    OWNER.<process>   replaced every few seconds while that process lives

A claim passes on when its process has ended, which is known at once on the same machine, and elsewhere once
its second file no longer changes. If storage creates a file twice, or two processes take over at once, the
later one owns the folder: the other notices within seconds, and before it replaces a file.
"""

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ctr_ps.protos.errors import CheckpointError
from ctr_ps.ps_server.checkpoint.storage.folders import Folder, folder_at
from ctr_ps.ps_worker.job import Job

logger = logging.getLogger(__name__)

OWNER = "OWNER"
BEAT_S = 5.0
EXPIRY_S = 20.0
_SETTLE_S = 0.3  # seconds after which a claim is read back, as another process may have replaced it
_POLL_S = 0.5
_TRIES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process that owns a folder."""

    run: str  # random; shared by successive processes in one worker's place
    process: str  # random
    host: str
    pid: int
    pid_space: str  # scope of the pid: boot and namespace; empty: unknown
    started: str  # start time of the process, which distinguishes it from another one with its pid
    servers: str  # of its job, "host:port" by commas, unique to one job at a time

    @classmethod
    def this(cls, servers: Sequence[str] = ()) -> "Owner":
        """Returns this process as the owner of a new run."""
        pid, space = os.getpid(), ""
        with suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            space = f"{boot} {Path('/proc/self/ns/pid').readlink()}"
        return cls(
            run=secrets.token_hex(8),
            process=secrets.token_hex(8),
            host=socket.gethostname(),
            pid=pid,
            pid_space=space,
            started=_state_and_start(pid)[1],
            servers=",".join(servers),
        )

    @classmethod
    def from_json(cls, text: bytes) -> "Owner | None":
        """Returns what `to_json` gave; None: incomplete, or of another release."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError, RecursionError):
            return None

    def to_json(self) -> bytes:
        """Returns a text for `from_json`."""
        return json.dumps(asdict(self)).encode()

    @property
    def beat(self) -> str:
        """Name of the file that shows that the process lives."""
        return f"{OWNER}.{self.process}"

    def is_gone_beside(self, other: "Owner") -> bool | None:
        """Whether the process has ended, if it is on this machine; None: unknown, or stopped."""
        if not self.pid_space or self.pid_space != other.pid_space:
            return None
        state, started = _state_and_start(self.pid)
        if not state:
            return None if _has_pid(self.pid) else True
        if started != self.started or state in "ZX":
            return True
        return None if state in "Tt" else False


def _state_and_start(pid: int) -> tuple[str, str]:
    """Returns the state of a process, and its start in ticks since boot; "" if it does not exist."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


def _has_pid(pid: int) -> bool:
    """Whether a process exists, even if /proc hides those of other users."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError, TypeError):  # the last two of an altered file
        return False
    except PermissionError:
        pass
    return True


class Claim:
    """This run's claim on a folder. Thread-safe."""

    def __init__(self, root: Folder, owner: Owner) -> None:
        self._root = root
        self._owner = owner
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="claim", daemon=True)
        self._thread.start()

    def require(self) -> None:
        """Raises CheckpointError if another run owns the folder, or storage cannot be reached."""
        if not self._root.has(OWNER):
            return  # it was removed, and the folder was not claimed since
        found = Owner.from_json(self._root.read(OWNER))
        if found is None or found.run != self._owner.run:
            raise CheckpointError(
                f"{self._root.url} now belongs to another run, {_shown(found)}: two runs must not save to "
                "one folder, so this run ends"
            )

    def _beat(self) -> None:
        number = 0
        while True:
            number += 1
            try:
                self._root.put(self._owner.beat, f"{number}\n".encode())
                self._root.create_new(OWNER, self._owner.to_json())  # if it was removed
            except CheckpointError as error:
                logger.warning("cannot update the claim on the checkpoint folder: %s", error)
            if self._is_over.wait(BEAT_S):
                return

    def release(self) -> None:
        """Releases the folder, if this process still owns it."""
        self._is_over.set()
        self._thread.join(EXPIRY_S)
        if self._thread.is_alive():
            logger.warning(
                "storage does not respond: the claim on %s is not released", self._root.url
            )
            return
        try:
            if self._root.has(OWNER):
                found = Owner.from_json(self._root.read(OWNER))
                if found is not None and found.process == self._owner.process:
                    self._root.remove_file(OWNER)
            self._root.remove_file(self._owner.beat)
        except CheckpointError as error:
            logger.warning("could not release the claim on the checkpoint folder: %s", error)


@contextmanager
def claimed(
    job: Job, *, is_of_this_run: bool, servers: Sequence[str] = ()
) -> Iterator[Claim | None]:
    """Claims the folder of a job's checkpoints for the block; None: it has none.

    With `is_of_this_run` this process replaces a lost one, and takes over its claim if their servers agree.
    Raises JobError, which names the run, if another, live one owns the folder; CheckpointError if it cannot
    be read or written.
    """
    if not job.checkpoint.dir:
        yield None
        return
    root = folder_at(job.checkpoint.dir)
    root.make()
    claim = Claim(root, _taken(job, root, Owner.this(servers), is_of_this_run=is_of_this_run))
    try:
        yield claim
    finally:
        claim.release()


def _taken(job: Job, root: Folder, own: Owner, *, is_of_this_run: bool) -> Owner:
    for _ in range(_TRIES):
        is_new = root.create_new(OWNER, own.to_json())
        if not is_new:
            if not root.has(OWNER):  # released between the two
                continue
            found = Owner.from_json(root.read(OWNER))
            if is_of_this_run and found is not None and found.servers == own.servers:
                own = replace(own, run=found.run)
            elif found is None or found.process != own.process:
                _require_gone(job, root, found, own)
                logger.info("taking over %s from %s, which has ended", root.url, _shown(found))
            root.put(OWNER, own.to_json())
            if found is not None:
                root.remove_file(found.beat)
        if is_new and "://" not in root.url:
            return own
        time.sleep(_SETTLE_S)
        if root.has(OWNER) and Owner.from_json(root.read(OWNER)) == own:
            return own
    raise _in_use(job, root, None)


def _require_gone(job: Job, root: Folder, found: Owner | None, own: Owner) -> None:
    """Returns once the owner of a folder is known to have ended; raises JobError if it lives."""
    is_gone = None if found is None else found.is_gone_beside(own)
    if is_gone:
        return
    if is_gone is False:
        raise _in_use(job, root, found)
    logger.warning(
        "%s is claimed by %s: waiting up to %g s to see whether it is alive",
        root.url,
        _shown(found),
        EXPIRY_S,
    )
    before, until = _signs(root, found), time.monotonic() + EXPIRY_S
    while time.monotonic() < until:
        time.sleep(_POLL_S)
        if _signs(root, found) != before:
            if root.has(OWNER):
                raise _in_use(job, root, Owner.from_json(root.read(OWNER)))
            return  # released


def _signs(root: Folder, owner: Owner | None) -> list[bytes]:
    """Returns files that change while the owner of a folder lives."""
    names = [OWNER] if owner is None else [OWNER, owner.beat]
    return [root.read(name) if root.has(name) else b"" for name in names]


def _in_use(job: Job, root: Folder, owner: Owner | None) -> Exception:
    return job.error(
        "checkpoint.dir",
        f"{root.url} is in use by another live run, {_shown(owner)}, and each would replace the other's "
        "checkpoints: end that run, or choose another checkpoint.dir. If that process no longer exists, "
        f"remove {root.url}/{OWNER}",
    )


def _shown(owner: Owner | None) -> str:
    if owner is None:
        return "of an unknown process"
    return f"process {owner.pid} on {owner.host}"
