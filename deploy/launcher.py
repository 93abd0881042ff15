"""The launcher: starts the processes of a run and does what its supervisor decides.

Cluster --exits, signals, time--> Supervisor --decisions--> start again, stop, end with a code
"""

import contextlib
import json
import logging
import os
import textwrap
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import fsspec

from ctr_ps.deploy.cluster import (
    Cluster,
    Engine,
    Events,
    LocalEngine,
    LogDirError,
    Sink,
    Terminal,
    held,
    signals_as_events,
)
from ctr_ps.deploy.plan import Commands, Plan, ProcessSpec, with_update_logs
from ctr_ps.deploy.supervisor import (
    End,
    Event,
    OtherPorts,
    Policy,
    Restart,
    RestartAll,
    Supervisor,
    Warn,
)

TAIL_LINES = 20
TAIL_BYTES = 1 << 16
RESUMES = ("--set", "checkpoint.resume=true")

log = logging.getLogger("ps-launch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A cluster to run."""

    commands: Commands
    num_servers: int
    num_workers: int
    log_dir: Path
    num_heter: int = 0
    num_spares: int = 0  # servers more, which wait to be added
    heter_device: str = "cpu"  # of the heter trainers, "cpu" or "gpu"
    policy: Policy = field(default_factory=Policy)  # what is restarted, and how long to wait
    # whether processes can take the places of lost ones, so that a run can go on from the update
    # logs of an earlier one
    waits_for_lost: bool = False
    checkpoints: str = ""  # `checkpoint.dir` of the job; empty: it has none, or a script is run
    is_resumed: bool = False  # whether the job itself resumes from there
    has_metrics: bool = False  # whether it has a `run.dir`
    # whether the last line of trainer 0 is an object, which gets the number of restarts
    as_json: bool = False
    grace_seconds: float = 10.0  # time between the first SIGTERM and SIGKILL

    @property
    def update_logs(self) -> Path | None:
        """Folder of the servers' update logs; None: they write none, as those of a script."""
        has_logs = self.policy.durability == "log" and self.commands.are_of_job
        return self.log_dir / "update-log" if has_logs else None


def run(launch: Launch, terminal: Terminal, engine: Engine | None = None) -> int:
    """Runs a cluster to its end and returns the exit code: 0, or that of the first failure.

    `terminal` shows the output of trainer 0; `engine` starts the processes, None: on this machine. If another
    program takes a server's port between its release and the server's bind, the cluster is started once more.
    LogDirError: another launcher has the folder, or this run cannot go on from the update logs there.
    """
    events = Events()
    engine = engine or LocalEngine()
    launch.log_dir.mkdir(parents=True, exist_ok=True)
    result = LastLine(terminal.stdout)
    with (
        held(launch.log_dir),
        signals_as_events(events),
        Cluster(
            launch.log_dir, events, engine=engine, grace_seconds=launch.grace_seconds
        ) as cluster,
    ):
        shown = Terminal(result, terminal.stderr) if launch.as_json else terminal
        launcher = _Launcher(launch, cluster, engine, shown)
        code = launcher.run()
    fields = launcher.report()
    if launch.as_json:
        with contextlib.suppress(OSError):  # nobody reads it
            result.end(fields)
    return code


class _Launcher:
    """One run. For the main thread."""

    def __init__(
        self, launch: Launch, cluster: Cluster, engine: Engine, terminal: Terminal
    ) -> None:
        self._launch = launch
        self._cluster = cluster
        self._engine = engine
        self._terminal = terminal
        self._specs: dict[str, ProcessSpec] = {}
        self._goes_on: bool | None = None  # from update logs of an earlier run; None: not known yet
        self._drained: set[str] = set()  # servers that the earlier run has drained
        self._wanted: dict[str, str] = {}  # endpoints, by name
        self._server_names = [f"pserver.{index}" for index in range(launch.num_servers)]
        self._spare_names = [f"spare.{index}" for index in range(launch.num_spares)]
        self._supervisor = Supervisor(
            self._server_names,
            [
                *(f"trainer.{index}" for index in range(launch.num_workers)),
                *(f"heter.{index}" for index in range(launch.num_heter)),
            ],
            launch.policy,
            self._spare_names,
        )
        self._resumption = (
            Resumption(
                launch.checkpoints, is_asked=launch.is_resumed, has_metrics=launch.has_metrics
            )
            if launch.checkpoints and launch.policy.max_restarts
            else None
        )

    def run(self) -> int:
        self._start_all()
        while True:
            end = self._handle(self._cluster.next_event(self._supervisor.next_time()))
            if end is not None:
                return self._end(end)

    def report(self) -> dict[str, Any]:
        """Logs the number of restarts; returns it as a field of the result, if there may have been some."""
        if not self._launch.policy.max_restarts:
            return {}
        log.info("restarts: %d", self._supervisor.restarts)
        return {"restarts": self._supervisor.restarts}

    def _handle(self, event: Event | None) -> End | None:
        """Does what follows from an event; returns how the run ends if it does."""
        match self._supervisor.handle(event, time.monotonic()):
            case Warn(text):
                log.warning("%s", text)
            case Restart(name, number, reason):
                note = self._note(number)
                log.warning("%s: restarting it, %s", reason, note)
                self._start(self._specs[name], note)
            case RestartAll() as restart:
                return self._restart_all(restart)
            case OtherPorts(reason):
                log.warning(
                    "%s: port in use by another program, restarting with other ports", reason
                )
                return self._stop_and_start()
            case End() as end:
                return end
        return None

    def _restart_all(self, restart: RestartAll) -> End | None:
        assert self._resumption is not None, "the policy says that nothing can be resumed"
        log.warning("%s: stopping all processes", restart.reason)
        if signalled := self._cluster.stop():
            return self._handle(signalled)
        options, point = self._resumption.look()
        note = self._note(restart.number)
        log.warning("restarting all processes from %s, %s", point, note)
        return self._stop_and_start(options, note)

    def _stop_and_start(self, options: Sequence[str] = (), note: str = "") -> End | None:
        if signalled := self._cluster.stop():
            return self._handle(signalled)
        self._start_all(options, note)
        return None

    def _note(self, number: int) -> str:
        return f"restarted ({number} of {self._launch.policy.max_restarts})"

    def _start_all(self, options: Sequence[str] = (), note: str = "") -> None:
        """Starts all servers without a past, then all others; the commands of workers get `options`."""
        launch = self._launch
        self._prepare_update_logs()
        self._supervisor.started(self._drained)
        bound = self._endpoints(
            self._server_names
            + self._spare_names
            + [f"heter.{index}" for index in range(launch.num_heter)]
        )
        endpoints, others = bound[: launch.num_servers], bound[launch.num_servers :]
        spare, heter = others[: launch.num_spares], others[launch.num_spares :]
        plan = Plan(endpoints, launch.num_workers, heter)
        servers = plan.servers(launch.commands.server)
        spares = plan.spares(launch.commands.server, spare)
        if launch.update_logs:
            servers = with_update_logs(servers, launch.update_logs)
            spares = with_update_logs(spares, launch.update_logs, "spare")
        workers = plan.workers((*launch.commands.worker, *options))
        # Heter trainers share the machine of all others: with threads for all cores one trained 5,300
        # examples/s beside two workers and two servers on two busy cores, with one thread 19,200.
        threads = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}
        trainers = [
            replace(spec, variables=threads)
            for spec in plan.heter_trainers(launch.commands.heter, launch.heter_device)
        ]
        self._specs = {spec.name: spec for spec in (*servers, *spares, *trainers, *workers)}
        log.info(
            "servers %s, workers: %d%s%s, logs in %s",
            ",".join(endpoints),
            len(workers),
            f", spares {','.join(spare)}" if spare else "",
            f", heter trainers {','.join(heter)}" if heter else "",
            launch.log_dir,
        )
        for spec in self._specs.values():
            if spec.name not in self._drained:
                self._start(spec, note)

    def _endpoints(self, names: Sequence[str]) -> list[str]:
        """Returns endpoints; where an earlier run goes on, its own, which shard maps in its logs have."""
        if not self._goes_on:
            self._wanted = {}
        present = [name for name in names if name not in self._drained]
        bound = dict(zip(present, self._engine.endpoints(present, self._wanted), strict=True))
        for name, endpoint in bound.items():
            if self._wanted.setdefault(name, endpoint) != endpoint:
                log.warning(
                    "%s had %s, which is in use, and gets %s: if shards were moved, stop, and start again "
                    "when it is free",
                    name,
                    self._wanted[name],
                    endpoint,
                )
        if self._launch.update_logs:
            beside = self._kept.with_suffix(".next")
            beside.write_text(json.dumps({"endpoints": self._wanted}))
            beside.replace(self._kept)  # whole, whenever this process is killed
        return [bound.get(name, self._wanted[name]) for name in names]

    @property
    def _kept(self) -> Path:
        return self._launch.log_dir / "endpoints.json"

    def _take_over(self) -> None:
        """Takes over what an earlier run has kept."""
        if not (self._kept.exists() or self._drained):
            return
        try:
            self._wanted = dict(json.loads(self._kept.read_text())["endpoints"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise LogDirError(
                f"cannot read the endpoints of the earlier run in {self._kept}: {error}. If no shards were "
                f"moved, remove it; else remove {self._launch.update_logs}, to start fresh"
            ) from error

    def _start(self, spec: ProcessSpec, note: str) -> None:
        is_shown = spec.name == "trainer.0"
        self._cluster.start(spec, self._terminal if is_shown else None, note=note)

    def _end(self, end: End) -> int:
        update_logs = self._launch.update_logs
        if end.code == 0:
            if end.reason:
                log.warning("%s", end.reason)
            self._cluster.stop()
            if update_logs:
                self._engine.remove(update_logs)
            return 0
        log.error("%s: stopping all processes", end.reason)
        self._cluster.stop()
        if update_logs and self._can_go_on_from(*self._update_logs_in(update_logs)):
            log.error(
                "kept the update logs in %s: the same command resumes from them; to start fresh, remove them",
                update_logs,
            )
        if end.failed:
            path = self._cluster.log_path(end.failed)
            log.error("the end of %s:\n%s", path, tail(path))
        return end.code

    def _prepare_update_logs(self) -> None:
        folder = self._launch.update_logs
        if folder is None:
            return
        if self._goes_on is None:
            self._goes_on = self._resumes(folder)
        if not self._goes_on:
            self._engine.remove(folder)

    def _resumes(self, folder: Path) -> bool:
        """Whether the run goes on from update logs that an earlier one has left."""
        found, drained = self._update_logs_in(folder)
        if not found:
            return False
        self._drained = {each.replace("server-", "pserver.") for each in drained}
        self._take_over()
        num_spares = sum(each.startswith("spare-") for each in found)
        if num_spares > self._launch.num_spares:
            raise LogDirError(
                f"{folder} has update logs of {num_spares} spare servers, which may have been added: "
                f"give --spare-num {num_spares}"
            )
        if not self._can_go_on_from(found, drained):
            raise LogDirError(
                f"cannot resume {self._launch.num_servers} servers from the update logs of "
                f"{', '.join(sorted(found))} in {folder}: that needs the logs of all servers, and "
                'cluster.on_worker_loss = "wait". Remove the folder, or use another --log-dir'
            )
        log.warning(
            "resuming from the update logs of an earlier run in %s (start servers that were added by hand, "
            "too); to start fresh, remove them",
            folder,
        )
        return True

    def _update_logs_in(self, folder: Path) -> tuple[set[str], set[str]]:
        """Returns the names of update logs, and of those that servers had before they were drained."""
        files = {Path(each) for each in self._engine.find(self._server_names, folder, "*/*")}
        logs = {path.parts[0] for path in files if path.suffix == ".log"}
        return logs, {path.parts[0] for path in files if path.name == "DRAINED"}

    def _can_go_on_from(self, found: set[str], drained: set[str]) -> bool:
        servers = {f"server-{index}" for index in range(self._launch.num_servers)}
        found = {each for each in found | drained if each.startswith("server-")}
        return self._launch.waits_for_lost and found == servers


def tail(path: Path) -> str:
    """Returns the last lines of a log file, indented."""
    with path.open("rb") as lines:
        lines.seek(max(0, path.stat().st_size - TAIL_BYTES))
        last = deque(lines, TAIL_LINES)
    text = b"".join(last).decode(errors="replace").rstrip() or "(it is empty)"
    return textwrap.indent(text, "    ")


class Resumption:
    """What a restarted job of a folder of checkpoints resumes from.

    A run that did not ask to resume must not go on from a checkpoint of an earlier run, which may have the
    names of its own: what is there before the first start is remembered.
    """

    def __init__(self, folder: str, *, is_asked: bool, has_metrics: bool = False) -> None:
        """Looks into `checkpoint.dir`, a path or URL that need not exist.

        The job itself `is_asked` to resume, and `has_metrics` where it has a `run.dir`.
        """
        self._folder = folder
        self._has_metrics = has_metrics
        self._earlier = None if is_asked else newest(folder)

    def look(self) -> tuple[tuple[str, ...], str]:
        """Returns options with which workers go on now, and from what, in words."""
        found = newest(self._folder)
        if found is None:
            # Without LATEST a job finds a checkpoint that the run was just saving, or starts fresh.
            return RESUMES, f"the start: {self._folder} has no checkpoint yet"
        name, _ = found
        if found == self._earlier:
            # The metrics there are of this run, which the first start would not have replaced unasked.
            replaces = ("--set", "run.overwrite=true") if self._has_metrics else ()
            options = ("--set", "checkpoint.resume=false", *replaces)
            return options, f"the start: {name} in {self._folder} belongs to an earlier run"
        return RESUMES, f"{self._folder}/{name}"


def newest(folder: str) -> tuple[str, str] | None:
    """Returns the newest checkpoint of a folder; None: there is none that can be read.

    That is its name, of the file LATEST, and its data folder, which no other save has.
    """
    try:
        files, path = fsspec.url_to_fs(folder)
        name = files.cat_file(f"{path}/LATEST").decode().strip()
        manifest = json.loads(files.cat_file(f"{path}/{name}/MANIFEST.json"))
        return name, str(manifest["data_folder"])
    except Exception:  # each kind of storage has errors of its own
        return None


class LastLine:
    """Output whose last line is held back, so that a JSON object there can get further fields.

    OSError is raised if it cannot be passed on. For one thread at a time.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._held = b""

    def __call__(self, data: bytes) -> None:
        """Takes output."""
        held = self._held + data
        end = held.rfind(b"\n", 0, len(held) - 1) + 1
        self._held = held[end:]
        if end:
            self._sink(held[:end])

    def end(self, fields: Mapping[str, Any]) -> None:
        """Passes on the last line with `fields` added, if it is an object, and else before them."""
        held, self._held = self._held, b""
        try:
            result = json.loads(held)
        except ValueError:
            result = None
        if isinstance(result, dict):
            fields = {**result, **fields}
        else:
            self._sink(held if held.endswith(b"\n") or not held else held + b"\n")
        self._sink(json.dumps(fields).encode() + b"\n")
