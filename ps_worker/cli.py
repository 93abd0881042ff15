"""`ps-worker`: trains alone or in a cluster, and predicts.

ps-worker train examples/ctr_dnn.toml --set data.train='train/part-*'     # alone: no role in the environment
ps-worker train job.toml --dry-run                                        # checks a job by one step
ps-launch --server-num 2 --worker-num 2 examples/ctr_dnn.toml             # a cluster on this machine
ps-worker heter job.toml --device cuda                                    # dense part, for other workers
ps-worker compare job.toml --models lr,fm,deepfm                          # on the same rows
ps-worker example deepfm my_folder                                        # an example of the package
ps-worker infer --model output/model --data 'test/part-*'                 # with a saved model
ps-worker importance --model output/model                                 # of each feature
ps-worker export --model output/model --output model.onnx                 # to ONNX, from PyTorch
ps-worker report output/run-1 output/run-2                                # an HTML report
"""

import json
import logging
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ctr_ps.protos.errors import CtrPsError, RoleError, UsageError
from ctr_ps.protos.role import HeterRole, WorkerRole, role_from_environment
from ctr_ps.protos.runtime.environment import keep_freed_memory
from ctr_ps.protos.runtime.logs import LogFormat, LogLevel, configure_logs, errors_as_exit_codes
from ctr_ps.protos.runtime.options import (
    LogFormatOption,
    LogLevelOption,
    Metrics,
    command_app,
    run_command,
)
from ctr_ps.ps_worker.job import Job, load_job

logger = logging.getLogger(__name__)

app = command_app(__doc__.replace("\n\n", "\n\n\b\n"))  # keeps the lines of a block as they are

Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="SECTION.KEY=VALUE", help="Override a key of the job; repeatable."
    ),
]
AllowCode = Annotated[
    bool,
    typer.Option(
        "--allow-code",
        help="Run code named by a checkpoint: a model's file, data.pipe_command.",
    ),
]
ModelOption = Annotated[
    str, typer.Option("--model", help="Checkpoint, or the checkpoint.dir of a job.")
]
DataOption = Annotated[
    list[str] | None,
    typer.Option("--data", help="Pattern of files; repeatable; default: test files of the job."),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON on the last line of stdout.")
]


@app.command()
def train(
    job: Annotated[Path, typer.Argument(help="Job file (TOML).", metavar="JOB.toml")],
    overrides: Set = None,
    is_dry: Annotated[
        bool, typer.Option("--dry-run", help="Only check: train a step here, and save nothing.")
    ] = False,
    as_json: Json = False,
    metrics: Metrics = None,
    log_format: LogFormatOption = None,
    log_level: LogLevelOption = None,
) -> None:
    """Train a job, as a worker of the cluster set in the environment, or alone without one."""
    _start(log_format, log_level)
    with errors_as_exit_codes():
        _report(_train(load_job(job, overrides or []), metrics, is_dry=is_dry), as_json)


@app.command()
def compare(
    jobs: Annotated[list[Path], typer.Argument(help="Job files (TOML).", metavar="JOB.toml...")],
    models: Annotated[
        str, typer.Option(help="Models to train each job with, as lr,fm; default: the job's.")
    ] = "",
    overrides: Set = None,
    as_json: Json = False,
) -> None:
    """Train several models here, one after another, and compare them on the same rows."""
    from ctr_ps.ps_worker.extras.compare import compare  # late: as below

    _start()
    keep_freed_memory()
    with errors_as_exit_codes():
        names = [*filter(None, map(str.strip, models.split(",")))]
        _report(compare(jobs, names, overrides or []), as_json)


@app.command()
def heter(
    job: Annotated[Path, typer.Argument(help="Job file (TOML).", metavar="JOB.toml")],
    device: Annotated[
        str | None,
        typer.Option(help="cpu or cuda; default: HETER_DEVICE_TYPE, else cpu."),
    ] = None,
    overrides: Set = None,
    as_json: Json = False,
    log_format: LogFormatOption = None,
    log_level: LogLevelOption = None,
) -> None:
    """Run a heter trainer, which trains the dense part of the model for the workers."""
    _start(log_format, log_level)
    with errors_as_exit_codes():
        _report(_heter(load_job(job, overrides or []), device), as_json)


@app.command()
def infer(
    model: ModelOption,
    data: DataOption = None,
    output: Annotated[
        Path | None, typer.Option(help="File to write, with one click probability per row.")
    ] = None,
    id_column: Annotated[
        str | None,
        typer.Option(
            "--id",
            metavar="COLUMN",
            help="Column to write before each probability, with a tab; default: id of the schema.",
        ),
    ] = None,
    overrides: Set = None,
    allow_code: AllowCode = False,
    as_json: Json = False,
) -> None:
    """Predict and evaluate with a saved model, without servers."""
    from ctr_ps.ps_worker.predict.inference import infer  # late: --help should not wait for numba

    _start()
    with errors_as_exit_codes():
        result = infer(
            model,
            data or [],
            output=output,
            id_column=id_column,
            overrides=overrides or [],
            allow_code=allow_code,
        )
        _report(result, as_json)


@app.command()
def importance(
    model: ModelOption,
    data: DataOption = None,
    rows: Annotated[int, typer.Option(min=2, help="First rows to use.")] = 20_000,
    overrides: Set = None,
    allow_code: AllowCode = False,
    as_json: Json = False,
) -> None:
    """Show how much a saved model loses when the values of a feature are permuted among rows."""
    from ctr_ps.ps_server.checkpoint.reader import Checkpoint  # late: as above
    from ctr_ps.ps_worker.extras.report.importance import importance_of_checkpoint

    _start()
    with errors_as_exit_codes():
        checkpoint, changes = Checkpoint.open(model), overrides or []
        found = importance_of_checkpoint(
            checkpoint, data or [], rows=rows, overrides=changes, allow_code=allow_code
        )
        _report(asdict(found), as_json)


@app.command()
def export(
    model: ModelOption,
    output: Annotated[Path, typer.Option(help="File to write, .onnx or .pt2.")],
    allow_code: AllowCode = False,
    as_json: Json = False,
) -> None:
    """Convert the dense part of a PyTorch model to ONNX or torch.export."""
    from ctr_ps.ps_worker.predict.export import export  # late: --help should not wait for numba

    _start()
    with errors_as_exit_codes():
        _report(export(model, output, allow_code=allow_code), as_json)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="run.dir of each run.", metavar="RUN...")],
    output: Annotated[Path, typer.Option(help="File to write.")] = Path("report.html"),
    importance_rows: Annotated[
        int, typer.Option(min=0, help="Rows for feature importance; 0: none.")
    ] = 20_000,
    allow_code: AllowCode = False,
    as_json: Json = False,
) -> None:
    """Write an HTML report about runs: curves, calibration, features, tables, time."""
    _start()
    with errors_as_exit_codes():
        try:
            from ctr_ps.ps_worker.extras.report.report import report as write  # late: as above
        except ModuleNotFoundError as error:
            raise UsageError(
                f"a report needs {error.name}, which is not installed: pip install 'ctr-ps[report]'"
            ) from error
        result = write(runs, output, importance_rows=importance_rows, allow_code=allow_code)
        _report(result, as_json)


@app.command()
def example(
    name: Annotated[
        str | None, typer.Argument(help="Name of the example; default: list all.")
    ] = None,
    folder: Annotated[
        Path, typer.Argument(help="Output folder, created if it does not exist.")
    ] = Path(),
) -> None:
    """List the examples of the package, or write one with its files."""
    from ctr_ps.ps_worker.job.shipped_examples import example_names, write_example

    with errors_as_exit_codes():
        if name is None:
            for each, text in example_names().items():
                print(f"{each:<18}{text}")
            return
        for path in write_example(name, folder):
            print(f"wrote {path}")


def _train(job: Job, metrics: str | None, *, is_dry: bool) -> Mapping[str, Any]:
    from ctr_ps.protos.metrics.metrics_port import metrics_address
    from ctr_ps.ps_worker.checkpoints.resume import require_free_folder
    from ctr_ps.ps_worker.cluster.open_store import LOCAL, open_store
    from ctr_ps.ps_worker.extras.device_pass import new_pass_trainer
    from ctr_ps.ps_worker.extras.heter.connect import before_the_cut, heter_trainers, require_heter
    from ctr_ps.ps_worker.run.dry_run import dry_run
    from ctr_ps.ps_worker.run.membership import job_ends_by_errors
    from ctr_ps.ps_worker.run.plan import plan_of
    from ctr_ps.ps_worker.run.precompile import precompile
    from ctr_ps.ps_worker.run.run import Run
    from ctr_ps.ps_worker.run.termination import Termination
    from ctr_ps.ps_worker.run.training_job.train_job import train_job
    from ctr_ps.ps_worker.run.worker_metrics import metrics_port

    role = role_from_environment(os.environ) or LOCAL
    if not isinstance(role, WorkerRole):
        raise _other_role("ps-worker train")
    if not job.data.train and not job.data.stream:
        raise job.error(
            "data.train", "data.train is empty: name files, as by --set data.train='train/part-*'"
        )
    keep_freed_memory()
    if is_dry:
        plan = plan_of(job, role, new_pass_trainer=new_pass_trainer)
        if role.heter_endpoints:
            require_heter(job, plan.model)
        return dry_run(plan)
    with job_ends_by_errors(role):
        plan = plan_of(job, role, new_pass_trainer=new_pass_trainer)
        if role.is_in_process:
            require_free_folder(job)  # before kernels are compiled
        if role.heter_endpoints:
            require_heter(job, plan.model)
        precompile(plan)
    with ExitStack() as stack:
        termination = None
        if role.is_in_process:
            _tell_of_interruptions(job)
        if not role.is_in_process or job.saves_when_told:
            termination = stack.enter_context(Termination())
        store = stack.enter_context(open_store(role, job.cluster))
        heter = heter_trainers(role.heter_endpoints, job, worker=role.worker_index)

        def on_joined(run: Run) -> None:
            stack.enter_context(metrics_port(run, metrics_address(metrics)))
            if termination is not None:
                run.end_by(termination)
            if run.is_first and not job.checkpoint.dir:
                logger.warning(
                    "no checkpoint will be saved, so the model is lost when %s: set checkpoint.dir",
                    "this run ends" if run.is_in_process else "the servers end",
                )

        summary = train_job(
            before_the_cut(plan, heter),
            store,
            heter=heter,
            on_joined=on_joined,
            is_told_to_end=lambda: termination is not None and termination.is_told_to_end,
        )
    return summary.as_json()


def _tell_of_interruptions(job: Job) -> None:
    """Prints, on the first Ctrl-C or SIGTERM, the newest checkpoint and how to resume it; then exits."""
    from ctr_ps.ps_server.checkpoint.publish import resolve

    by_default = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.getsignal(signal.SIGTERM),
    }

    def tell(number: int, frame: Any) -> None:
        ends = by_default[signal.Signals(number)]
        signal.signal(number, ends)
        text = "nothing is saved: checkpoint.dir is not set"
        if job.checkpoint.dir:
            try:
                newest = resolve(f"{job.checkpoint.dir}/LATEST").url
                text = (
                    f"the newest checkpoint is {newest}; resume with --set checkpoint.resume=true"
                )
            except CtrPsError:
                text = f"there is no checkpoint in {job.checkpoint.dir} yet"
        sys.stderr.write(f"interrupted: {text}\n")
        if callable(ends):
            ends(number, frame)

    for number in by_default:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as in the background of a shell
            signal.signal(number, tell)


def _heter(job: Job, device: str | None) -> Mapping[str, Any]:
    from ctr_ps.ps_worker.extras.heter.heter_job import run_heter
    from ctr_ps.ps_worker.run.membership import job_ends_by_errors
    from ctr_ps.ps_worker.run.plan import heter_plan_of

    role = role_from_environment(os.environ)
    if not isinstance(role, HeterRole):
        raise _other_role("ps-worker heter")
    if device is not None:
        role = replace(role, device=device)
    keep_freed_memory()
    with job_ends_by_errors(role):
        plan = heter_plan_of(job, role)
    return run_heter(plan)


def _other_role(command: str) -> RoleError:
    role = os.environ.get("TRAINING_ROLE", "not set")
    return RoleError(
        f"TRAINING_ROLE is {role}, but this is {command}: start ps-server for PSERVER, ps-worker train for "
        f"TRAINER and ps-worker heter for HETER_TRAINER"
    )


def _report(result: Mapping[str, Any], as_json: bool) -> None:
    from ctr_ps.ps_worker.run.result_tables import print_result
    from ctr_ps.ps_worker.training.evaluation.evaluator import json_value

    if as_json:
        print(json.dumps(json_value(result)), flush=True)
    else:
        print_result(result)


def _start(log_format: LogFormat | None = None, log_level: LogLevel | None = None) -> None:
    """Logs to stderr, and ends on SIGTERM, which a container's first process would ignore."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with errors_as_exit_codes():
        configure_logs(log_format, log_level)


def main() -> None:
    """Runs the command line."""
    run_command(app)


if __name__ == "__main__":
    main()
