"""`ps-worker`: trains, alone or as one of a cluster, and predicts.

ps-worker train examples/ctr_dnn.toml --set data.train='train/part-*'     # alone: no role in the environment
ps-launch --server-num 2 --worker-num 2 examples/ctr_dnn.toml             # as a cluster on this machine
ps-worker heter job.toml --device cuda                                    # the dense part, for other workers
ps-worker infer --model output/model --data 'test/part-*'                 # with a saved model
ps-worker export --model output/model --output model.onnx                 # of PyTorch, for other runtimes
"""

import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from protos.errors import CtrPsError, RoleError
from protos.role import (
    HeterRole,
    WorkerRole,
    address_to_bind,
    default_bind,
    role_from_environment,
)
from protos.runtime.malloc import keep_freed_memory
from ps_worker.job import Job, load_job

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__
)

Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="SECTION.KEY=VALUE", help="Override a key of the job; repeatable."
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="End with one JSON object on the last line of stdout.")
]


@app.command()
def train(
    job: Annotated[Path, typer.Argument(help="Job file (TOML).", metavar="JOB.toml")],
    overrides: Set = None,
    as_json: Json = False,
) -> None:
    """Train the job: a worker of a cluster if the environment says so, else alone on this machine."""
    _start()
    with _errors_as_exit_codes():
        _report(_train(load_job(job, overrides or [])), as_json)


@app.command()
def heter(
    job: Annotated[Path, typer.Argument(help="Job file (TOML).", metavar="JOB.toml")],
    device: Annotated[
        str | None,
        typer.Option(help="cpu or cuda; default: what HETER_DEVICE_TYPE says, else cpu."),
    ] = None,
    overrides: Set = None,
    as_json: Json = False,
) -> None:
    """Train the dense part of the job's model for its workers: a heter trainer of a cluster."""
    _start()
    with _errors_as_exit_codes():
        _report(_heter(load_job(job, overrides or []), device), as_json)


@app.command()
def infer(
    model: Annotated[str, typer.Option(help="Checkpoint, or the checkpoint.dir of a job.")],
    data: Annotated[
        list[str] | None,
        typer.Option(help="Pattern of files; repeatable. Default: the test files of the job."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write one click probability a line, in row order.")
    ] = None,
    overrides: Set = None,
    as_json: Json = False,
) -> None:
    """Predict and evaluate with a saved model, without servers."""
    from ps_worker.serving.inference import infer  # late: --help should not wait for numba

    _start()
    with _errors_as_exit_codes():
        _report(infer(model, data or [], output=output, overrides=overrides or []), as_json)


@app.command()
def export(
    model: Annotated[str, typer.Option(help="Checkpoint, or the checkpoint.dir of a job.")],
    output: Annotated[Path, typer.Option(help="File to write: model.onnx or model.pt2.")],
    as_json: Json = False,
) -> None:
    """Write the dense part of a model in PyTorch as a program for other runtimes."""
    from ps_worker.serving.export import export  # late: --help should not wait for numba

    _start()
    with _errors_as_exit_codes():
        _report(export(model, output), as_json)


def _train(job: Job) -> Mapping[str, Any]:
    from ps_worker.cluster.open_store import LOCAL, is_in_process, open_store
    from ps_worker.heter.connect import heter_trainers, require_heter
    from ps_worker.run.abort import job_ends_by_errors
    from ps_worker.run.plan import plan_of
    from ps_worker.run.precompile import precompile
    from ps_worker.run.run import Run
    from ps_worker.run.termination import Termination
    from ps_worker.run.train_job import train_job

    role = role_from_environment(os.environ) or LOCAL
    if not isinstance(role, WorkerRole):
        raise _other_role("ps-worker train")
    if not job.data.train:
        raise job.error(
            "data.train", "data.train is empty: name files, as by --set data.train='train/part-*'"
        )
    keep_freed_memory()
    with job_ends_by_errors(role):
        plan = plan_of(job)
        if role.heter_endpoints:
            require_heter(job, plan.model)
        precompile(plan)
    with ExitStack() as stack:
        termination = None if is_in_process(role) else stack.enter_context(Termination())
        store = stack.enter_context(open_store(role, job.cluster))

        def on_joined(run: Run) -> None:
            if termination is not None:
                run.end_by(termination)

        summary = train_job(
            plan,
            store,
            worker=role.worker_index,
            num_workers=role.num_workers,
            num_heter=len(role.heter_endpoints),
            heter=heter_trainers(role.heter_endpoints, job, worker=role.worker_index),
            is_in_process=is_in_process(role),
            on_joined=on_joined,
            is_told_to_end=lambda: termination is not None and termination.is_told_to_end,
        )
    return summary.as_json()


def _heter(job: Job, device: str | None) -> Mapping[str, Any]:
    from ps_worker.cluster.open_store import open_store
    from ps_worker.run.abort import job_ends_by_errors
    from ps_worker.run.heter_job import train_heter
    from ps_worker.run.plan import model_of_job
    from ps_worker.run.termination import Termination

    role = role_from_environment(os.environ)
    if not isinstance(role, HeterRole):
        raise _other_role("ps-worker heter")
    if device is not None:
        role = replace(role, device=device)
    keep_freed_memory()
    with job_ends_by_errors(role):
        _, model = model_of_job(job)
    with Termination() as termination, open_store(role, job.cluster) as store:
        return train_heter(
            job,
            model,
            store,
            role,
            address=address_to_bind(default_bind(role.endpoint), role.port),
            on_joined=lambda run: run.end_by(termination),
            is_told_to_end=lambda: termination.is_told_to_end,
        )


def _other_role(command: str) -> RoleError:
    role = os.environ.get("TRAINING_ROLE", "not set")
    return RoleError(
        f"TRAINING_ROLE is {role}, but this is {command}: start ps-server for PSERVER, ps-worker train for "
        f"TRAINER and ps-worker heter for HETER_TRAINER"
    )


def _report(result: Mapping[str, Any], as_json: bool) -> None:
    """Prints the result: for people, or as JSON."""
    if as_json:
        print(json.dumps(result), flush=True)
        return
    for name, value in result.items():
        if value is not None:
            print(
                f"{name:>16}  {f'{value:.5f}' if isinstance(value, float) else value}", flush=True
            )


def _start() -> None:
    """Logs to stderr, and ends on SIGTERM, which a container's first process would ignore."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )


@contextlib.contextmanager
def _errors_as_exit_codes() -> Iterator[None]:
    try:
        yield
    except CtrPsError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise typer.Exit(error.exit_code) from error


def main() -> None:
    """Runs the command line."""
    app()
