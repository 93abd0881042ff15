"""Every model in every mode, with nothing but data and the model's name: what the defaults are worth.

    python -m benchmarks.bench_defaults --sample ROWS/part-*.tsv   # tests on the last file
    python -m benchmarks.bench_defaults --planted 1000000          # rows of a known model, with its best AUC
    python -m benchmarks.bench_defaults --models fm --modes geo --workers 2 --set train.batch_size=64
    python -m benchmarks.bench_defaults --fresh 40000 --workers 2 --set train.batch_size=256

Prints a line of JSON a run, and at the end a table in Markdown. One worker is a process by itself, two are
a cluster with two servers, as commands of the package. A run has learnt if its log loss on the test rows is
below that of the base rate, and its AUC at least what the data can be expected to give.

`--fresh` is about the first steps: its table has the log loss of the first pass, of each batch before it is
trained on, beside that on the test rows, and marks what is more than 0.005 above sync with as many workers.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from sklearn.metrics import log_loss

from benchmarks.report import table as markdown_table

MODELS = ("lr", "fm", "wide_deep", "ctr_dnn", "deepfm", "dcn_v2")
MODES = ("sync", "half_async", "async", "geo", "bounded_staleness")
SAMPLE_AUC = 0.685
PLANTED_GAP = 0.01
FRESH_GAP = 0.005
LIMIT_S = 1800.0

_DATA = "from ctr_ps.ps_worker.extras.data_tools.cli import main; main()"
_TRAIN = "from ctr_ps.ps_worker.cli import main; main()"
_LAUNCH = "from ctr_ps.deploy.launch import main; main()"


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Rows in Criteo's layout."""

    name: str
    train: Sequence[str]  # files to train on
    test: Sequence[str]  # files to test on
    least_auc: float  # which a run has to reach

    def base_log_loss(self) -> float:
        """Returns the log loss on the test rows of predicting their share of clicks for each."""
        texts = (Path(path).read_text(encoding="ascii") for path in self.test)
        labels = [line[0] == "1" for text in texts for line in text.splitlines()]
        return float(log_loss(labels, [sum(labels) / len(labels)] * len(labels)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is trained, how, and by how many workers; as many servers, if several."""

    model: str
    mode: str
    workers: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Figures of a case on the test rows, and whether they are good enough."""

    case: Case
    auc: float
    log_loss: float
    pass_log_loss: float
    has_learnt: bool


def planted(folder: Path, num_rows: int) -> Data:
    """Writes rows of a known click model, and a tenth as many to test on."""
    sizes = f"--rows {num_rows} --test-rows {num_rows // 10} --files 4 --seed 1"
    command = [sys.executable, "-c", _DATA, "generate", str(folder), *sizes.split()]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    best = json.loads((folder / "planted.json").read_text())["best_auc"]
    return Data(
        name=f"{num_rows:,} planted rows",
        train=sorted(map(str, folder.glob("train/part-*"))),
        test=sorted(map(str, folder.glob("test/part-*"))),
        least_auc=best - PLANTED_GAP,
    )


def summary_of(data: Data, case: Case, settings: Sequence[str]) -> dict[str, Any]:
    """Trains and tests in processes of its own; returns the summary."""
    job = {"data.train": data.train, "data.test": data.test, "train.seed": case.seed}
    overrides = [f"{key}={json.dumps(value)}" for key, value in job.items()]
    overrides = [*overrides, f'strategy.mode="{case.mode}"', *settings]
    arguments = [each for override in overrides for each in ("--set", override)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "job.toml")
        path.write_text(f'model = "{case.model}"\n', encoding="utf-8")
        if case.workers == 1:
            program = [_TRAIN, "train"]
        else:
            numbers = ["--server-num", str(case.workers), "--worker-num", str(case.workers)]
            program = [_LAUNCH, *numbers, "--log-dir", str(Path(folder, "log"))]
        done = subprocess.run(
            [sys.executable, "-c", *program, "--json", str(path), *arguments],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"{case} failed:\n{done.stderr[-3000:]}")
    summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return summary


def results(data: Data, cases: Sequence[Case], settings: Sequence[str]) -> Iterator[Result]:
    """Yields the figures of each case, and prints them."""
    base = data.base_log_loss()
    for case in cases:
        found = summary_of(data, case, settings)
        auc, loss = found["auc"], found["log_loss"]
        result = Result(
            case=case,
            auc=auc,
            log_loss=loss,
            pass_log_loss=found["passes"][0]["log_loss"],
            has_learnt=loss < base and auc >= data.least_auc,
        )
        line = {
            "bench": "defaults",
            "data": data.name,
            **asdict(case),
            "auc": round(auc, 4),
            "log_loss": round(loss, 4),
            "pass_log_loss": round(result.pass_log_loss, 4),
            "staleness": round(found["staleness"]["mean"], 1),
            "calibration": round(found["calibration"], 3),
            "has_learnt": result.has_learnt,
        }
        print(json.dumps(line), flush=True)
        yield result
    print(f"# log loss of the base rate {base:.4f}, least AUC {data.least_auc:.4f}")


Runs = dict[tuple[str, int], list[Result]]
"""The runs of a model by mode and workers."""


def table(data: Data, found: Sequence[Result], cells: Callable[[Runs], Iterable[str]]) -> str:
    """Returns a line for each model, with cells by mode and workers."""
    columns = list(dict.fromkeys((each.case.mode, each.case.workers) for each in found))
    by_model: dict[str, Runs] = {}
    for each in found:
        runs = by_model.setdefault(each.case.model, {column: [] for column in columns})
        runs[each.case.mode, each.case.workers].append(each)
    header = [data.name, *(f"{mode}, {workers}" for mode, workers in columns)]
    rows = [[f"`{model}`", *cells(runs)] for model, runs in by_model.items()]
    return markdown_table(header, rows)


def learnt(by_column: Runs) -> Iterator[str]:
    """Yields lowest AUC / highest log loss; (!) where a run has not learnt."""
    for runs in by_column.values():
        auc, loss = min(each.auc for each in runs), max(each.log_loss for each in runs)
        mark = "" if all(each.has_learnt for each in runs) else " (!)"
        yield f"{auc:.3f} / {loss:.4f}{mark}"


def of_first_pass(by_column: Runs) -> Iterator[str]:
    """Yields log loss of the pass / on the test rows, medians of the seeds; (!) where sync is far below."""
    by_losses = {
        column: (
            median(each.pass_log_loss for each in runs),
            median(each.log_loss for each in runs),
        )
        for column, runs in by_column.items()
    }
    for (_, workers), losses in by_losses.items():
        of_sync = by_losses.get(("sync", workers), losses)
        is_far = any(a > b + FRESH_GAP for a, b in zip(losses, of_sync, strict=True))
        yield f"{losses[0]:.4f} / {losses[1]:.4f}{' (!)' if is_far else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", nargs="+", default=[], help="files; the last one is to test on")
    parser.add_argument("--planted", type=int, default=0, help="rows to plant")
    parser.add_argument("--fresh", type=int, default=0, help="rows to plant for a first pass")
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--set", dest="settings", action="append", default=[])
    options = parser.parse_args()
    cases = [
        Case(model=model, mode=mode, workers=workers, seed=seed)
        for model in options.models
        for mode in options.modes
        for workers in options.workers
        for seed in range(options.seeds)
    ]
    if options.sample:
        *train, test = options.sample
        data = Data(name="sample", train=train, test=[test], least_auc=SAMPLE_AUC)
        print(table(data, list(results(data, cases, options.settings)), learnt), flush=True)
    for num_rows, cells in ((options.planted, learnt), (options.fresh, of_first_pass)):
        if num_rows:
            with tempfile.TemporaryDirectory() as folder:
                data = planted(Path(folder), num_rows)
                print(table(data, list(results(data, cases, options.settings)), cells), flush=True)


if __name__ == "__main__":
    main()
