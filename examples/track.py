"""Sends what a run measures to MLflow or to Weights & Biases, while it trains or afterwards.

    python examples/track.py output/run-1 --to mlflow     # pip install mlflow-skinny; MLFLOW_TRACKING_URI
    python examples/track.py output/run-1 --to wandb      # pip install wandb; WANDB_PROJECT, WANDB_MODE

Reads the folder of a run, `run.dir` (docs/evaluation.md): the settings of job.json, and the numbers of
metrics.jsonl by step. It ends with the run, or when that has written nothing for `--idle-limit` seconds.
It is a process of its own, so a tracking server that is slow or away costs no training. Each call makes a
run.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

Log = Callable[[Mapping[str, float], int], object]
"""Sends numbers by name, of a step."""

End = Callable[[bool, Mapping[str, Any]], object]
"""Ends a run, which has reached its end or not, with the texts of its result by name."""


def mlflow_run(name: str, settings: Mapping[str, Any]) -> tuple[Log, End]:
    """Starts a run of MLflow; settings are its parameters, the result its tags."""
    import mlflow

    mlflow.start_run(run_name=name)
    mlflow.log_params({key: str(value)[:6000] for key, value in settings.items()})

    def end(is_whole: bool, result: Mapping[str, Any]) -> None:
        mlflow.set_tags(result)
        mlflow.end_run("FINISHED" if is_whole else "FAILED")

    return lambda numbers, step: mlflow.log_metrics(dict(numbers), step=step), end


def wandb_run(name: str, settings: Mapping[str, Any]) -> tuple[Log, End]:
    """Starts a run of Weights & Biases; settings are its configuration, the result is in its summary."""
    import wandb

    run = wandb.init(name=name, config=dict(settings))

    def end(is_whole: bool, result: Mapping[str, Any]) -> None:
        run.summary.update(result)
        run.finish(exit_code=0 if is_whole else 1)

    return lambda numbers, step: run.log(dict(numbers), step=step), end


def flat(tree: Mapping[str, Any], within: str = "", by: str = ".") -> Iterator[tuple[str, Any]]:
    """Yields the values in nested tables by their path."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{within}{name}{by}", by)
        else:
            yield f"{within}{name}", value


def records(path: Path, idle_limit_s: float) -> Iterator[dict[str, Any]]:
    """Yields the whole lines of a file as they are written, up to the end of the run or the limit."""
    with path.open("rb") as file:
        torn, last = b"", time.monotonic()
        while True:
            if not (read := file.readline()):
                if time.monotonic() - last >= idle_limit_s:
                    return
                time.sleep(min(1.0, idle_limit_s))
                continue
            torn, last = torn + read, time.monotonic()
            if torn.endswith(b"\n"):
                record, torn = json.loads(torn), b""
                is_end = record["kind"] == "end"
                yield record
                if is_end:
                    return


def track(folder: Path, to: str, idle_limit_s: float) -> bool:
    """Sends a run; returns whether it came to its end."""
    settings = dict(flat(json.loads((folder / "job.json").read_text())))
    log, end = {"mlflow": mlflow_run, "wandb": wandb_run}[to](folder.name, settings)
    is_whole, result = False, {}
    try:
        for record in records(folder / "metrics.jsonl", idle_limit_s):
            kind, step = record.pop("kind"), record.pop("step")
            figures = dict(flat(record, f"{kind}/", "/"))
            if kind == "end":
                is_whole = True
                result = {name: each for name, each in figures.items() if isinstance(each, str)}
            del figures[f"{kind}/time"]
            numbers = {name: each for name, each in figures.items() if type(each) in (int, float)}
            log(numbers, step)  # of a resumed run, the steps after its checkpoint come again
    finally:
        end(is_whole, result)
    return is_whole


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="run.dir")
    parser.add_argument("--to", choices=("mlflow", "wandb"), required=True)
    parser.add_argument(
        "--idle-limit", type=float, default=3600.0, help="seconds; 0: what is there"
    )
    options = parser.parse_args()
    os.environ.setdefault("WANDB_SILENT", "true")
    sys.exit(not track(options.folder, options.to, options.idle_limit))
