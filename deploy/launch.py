"""`ps-launch`: runs a job or script as a cluster, on this machine or on Ray, with a log file per process.

Examples:
    ps-launch --server-num 2 --worker-num 2 examples/demo.toml
    ps-launch --server-num 2 --worker-num 2 --dry-run job.toml
    ps-launch --server-num 2 --worker-num 2 --json job.toml --set train.epochs=2 | tail -n 1
    ps-launch --server-num 1 --worker-num 2 examples/ctr_dnn.py --epochs 2
    ps-launch --server-num 2 --worker-num 2 --heter-num 1 examples/torch_wide_deep.toml
    ps-launch --on ray --address auto --server-num 8 --worker-num 32 job.toml
    ps-launch --server-num 2 --worker-num 2 --max-restarts 3 --durability log job.toml
"""

import contextlib
import itertools
import logging
import os
import signal
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from ctr_ps.deploy.cluster import HOST, LogDirError, Terminal, to_descriptor
from ctr_ps.deploy.launcher import Launch, run
from ctr_ps.deploy.plan import ROLE_VARIABLES, commands_of_job, commands_of_script, is_script
from ctr_ps.deploy.supervisor import LEASE_SECONDS, Durability, Policy
from ctr_ps.protos.errors import OverloadedError
from ctr_ps.protos.runtime.environment import arguments, toml_value
from ctr_ps.protos.runtime.options import command_app

SERVER_COMMAND = f"ps-server --bind {HOST}"
RAY_SERVER_COMMAND = "ps-server"  # binds by POD_IP, which is its node's address
WORKER_COMMAND = "ps-worker train"
HETER_COMMAND = "ps-worker heter"

app = command_app()


class _LaunchCommand(TyperCommand):
    """Passes everything after a script to the script; after a job, options are the launcher's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Finds the program first, which decides whether options may follow it."""
        ctx.allow_interspersed_args = False
        found, _, _ = self.make_parser(ctx).parse_args(list(args))
        ctx.allow_interspersed_args = not is_script(found["program"])
        return super().parse_args(ctx, args)


@app.command(cls=_LaunchCommand)
def command(
    program: Annotated[
        Path,
        typer.Argument(
            help="Job (.toml), or script (.py), run once per server and worker.",
            metavar="JOB.toml|SCRIPT.py",
            exists=True,
            dir_okay=False,
            readable=True,
        ),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the script: everything after it.")
    ] = None,
    server_num: Annotated[int, typer.Option(min=1, help="Number of server processes.")] = 1,
    worker_num: Annotated[int, typer.Option(min=1, help="Number of worker processes.")] = 1,
    spare_num: Annotated[
        int,
        typer.Option(min=0, help="Jobs: number of servers more, which wait for `ps-cluster add`."),
    ] = 0,
    heter_num: Annotated[
        int,
        typer.Option(
            "--heter-num",
            "--heter_worker_num",
            min=0,
            help="Number of heter trainers, for the dense part of the model.",
        ),
    ] = 0,
    heter_device: Annotated[
        Literal["cpu", "gpu"],
        typer.Option("--heter-device", "--heter_devices", help="Device of the heter trainers."),
    ] = "cpu",
    log_dir: Annotated[
        Path,
        typer.Option(
            file_okay=False,
            help="Log folder; launchers that run at the same time need different ones.",
        ),
    ] = Path("log"),
    json: Annotated[
        bool,
        typer.Option("--json", help="Jobs: print the result of worker 0 as JSON on the last line."),
    ] = False,
    is_dry: Annotated[bool, typer.Option("--dry-run", help="Jobs: only check them.")] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Jobs: override a key; repeatable."),
    ] = None,
    server_command: Annotated[
        str | None, typer.Option(help=f"Jobs: command of a server; default: {SERVER_COMMAND}.")
    ] = None,
    worker_command: Annotated[
        str | None,
        typer.Option(
            help="Jobs: command of a worker; job and overrides are appended; "
            f"default: {WORKER_COMMAND}."
        ),
    ] = None,
    max_restarts: Annotated[
        int,
        typer.Option(
            min=0,
            help="Maximum number of restarts of processes killed by a signal or out of memory.",
        ),
    ] = 0,
    durability: Annotated[
        Durability,
        typer.Option(
            help="State used by restarts. checkpoint: all processes restart from the newest checkpoint; "
            "log: the killed process restarts, and a server recovers from its update log."
        ),
    ] = "checkpoint",
    on: Annotated[
        Literal["local", "ray"],
        typer.Option(
            "--on", help="Run on this machine (local) or on the nodes of a Ray cluster (ray)."
        ),
    ] = "local",
    address: Annotated[
        str,
        typer.Option(help="Ray cluster: HOST:PORT, or auto: that of this machine or Ray job."),
    ] = "auto",
) -> None:
    """Run a job or script as a cluster of servers and workers."""
    log_dir = log_dir.expanduser()
    logging.basicConfig(format="%(name)s: %(message)s", level=logging.INFO)
    if on == "ray" and heter_num:
        raise typer.BadParameter("--heter-num needs --on local")
    if is_script(program):
        of_jobs = {
            "--set": settings,
            "--json": json,
            "--dry-run": is_dry,
            "--server-command": server_command,
            "--worker-command": worker_command,
            "--spare-num": spare_num,
        }
        commands = commands_of_script(program, arguments or (), of_jobs)
        checkpoints, is_resumed, has_metrics, rule = "", False, False, None
        policy = Policy(is_script=True, why_no_resume="a script loads its checkpoints itself")
    else:
        commands = commands_of_job(
            program,
            arguments or (),
            server=server_command or (SERVER_COMMAND if on == "local" else RAY_SERVER_COMMAND),
            worker=worker_command or WORKER_COMMAND,
            heter=HETER_COMMAND,
            overrides=settings or (),
            as_json=json,
        )
        job = JobSettings(program, commands.worker)
        checkpoints = str(job.get("checkpoint", "dir") or "")
        is_resumed = job.get("checkpoint", "resume") is True
        has_metrics = bool(job.get("run", "dir"))
        rule = job.get("cluster", "on_worker_loss")
        lease = job.get("cluster", "lease_s")
        policy = Policy(
            why_no_resume="" if checkpoints else f"{program} has no checkpoint.dir",
            continues=rule == "continue",
            # One that is none is left to the workers' error.
            lease_seconds=lease if isinstance(lease, int | float) else LEASE_SECONDS,
        )
        if durability == "log" and not heter_num and rule is None:
            rule = "wait"
            commands = commands.with_setting("cluster.on_worker_loss=wait")
    if is_dry:
        environment = {k: v for k, v in os.environ.items() if k not in ROLE_VARIABLES}
        os.execve(commands.worker[0], [*commands.worker, "--dry-run"], environment)
    launch = Launch(
        commands=commands,
        num_servers=server_num,
        num_spares=spare_num,
        num_workers=worker_num,
        num_heter=heter_num,
        heter_device=heter_device,
        log_dir=log_dir if on == "local" else log_dir.absolute(),
        policy=replace(policy, max_restarts=max_restarts, durability=durability),
        waits_for_lost=rule == "wait",
        checkpoints=checkpoints,
        is_resumed=is_resumed,
        has_metrics=has_metrics,
        as_json=json and bool(max_restarts),
    )
    terminal = Terminal(to_descriptor(sys.stdout.fileno()), to_descriptor(sys.stderr.fileno()))
    try:
        code = run(launch, terminal) if on == "local" else _run_on_ray(launch, terminal, address)
    except LogDirError as error:
        raise typer.BadParameter(f"--log-dir: {error}") from error
    raise typer.Exit(code)


def _run_on_ray(launch: Launch, terminal: Terminal, address: str) -> int:
    try:
        from ctr_ps.deploy.ray_engine import AddressError, PlacementError, ray_engine
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise typer.BadParameter(
            "--on ray needs the package ray: install the extra, pip install 'ctr-ps[ray]'"
        ) from error
    try:
        # Ray tells of lost actors on stdout, whose last line is the result.
        with (
            contextlib.redirect_stdout(sys.stderr),
            ray_engine(
                address,
                num_servers=launch.num_servers + launch.num_spares,
                num_workers=launch.num_workers,
            ) as engine,
        ):
            return run(launch, terminal, engine)
    except AddressError as error:
        raise typer.BadParameter(f"--address {address}: {error}") from error
    except PlacementError as error:
        typer.echo(f"error: {error}", err=True)
        return OverloadedError.exit_code
    except KeyboardInterrupt:  # before the launcher heeds signals itself
        return 128 + signal.SIGINT


class JobSettings:
    """Settings of a job that the launcher heeds, as its workers will read them.

    A file or an override that is wrong is left to the workers, whose error says why.
    """

    def __init__(self, job: Path, words: Sequence[str] = ()) -> None:
        """Reads the job; of `words`, a command line, `--set section.key=value` count."""
        try:
            self._tree: dict[str, Any] = tomllib.loads(job.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self._tree = {}
        for option, override in itertools.pairwise(words):
            if option == "--set":
                self._override(override)

    def get(self, section: str, key: str) -> Any:
        """Returns a setting; None: it is not set."""
        values = self._tree.get(section)
        return values.get(key) if isinstance(values, Mapping) else None

    def _override(self, override: str) -> None:
        path, _, text = override.partition("=")
        section, _, key = path.strip().partition(".")
        if not key:
            self._tree[section] = toml_value(text)
        elif isinstance(values := self._tree.setdefault(section, {}), dict):
            values[key.strip()] = toml_value(text)


def main() -> None:
    """Entry point of `ps-launch`."""
    arguments()  # for --version; those of a script stay as they are
    app()


if __name__ == "__main__":
    main()
