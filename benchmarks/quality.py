"""AUC of every model with its name alone, beside its best of tuned settings, other tools, and in each mode.

    python -m benchmarks.quality                                # planted rows
    python -m benchmarks.quality --sample ROWS/part-*.tsv.gz    # and real ones, tested on the last
    python -m benchmarks.quality --data histories --models din bst --seeds 1
    python -m benchmarks.quality --data planted --rows 40000 --modes sync async --set train.batch_size=256

Settings are varied one at a time, on the rows that are tested: what is found is the best that somebody could
have found. The table has means over the seeds; (!) where the defaults are more than 0.002 below. Logistic
regression is scikit-learn's, `lightgbm` needs that package; "plain" is `ctr_dnn` in PyTorch alone.

With `--modes`, jobs of nothing but data and a model's name train as commands: one worker by itself, or two
and two servers. A cell has AUC / log loss / log loss of the first pass, of each batch before it is trained
on: medians over the seeds.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix, hstack
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, roc_auc_score

from benchmarks.figures import say
from benchmarks.report import table
from ctr_ps import Schema, Trainer, criteo_schema
from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.registry import MODELS, TASK_MODELS, ZOO
from ctr_ps.protos.runtime.environment import toml_value
from ctr_ps.ps_worker.data.queue_dataset import QueueDataset

GAP = 0.002
HISTORY_MODELS = ("din", "bst")
FLAT_MODELS = (*MODELS, *(name for name in ZOO if name not in (*HISTORY_MODELS, "two_towers")))
SPARSE_RATES, DENSE_RATES = (0.005, 0.02, 0.1, 0.3), (0.0003, 0.003)
MODES = ("sync", "half_async", "async", "geo", "bounded_staleness")
OF_A_MODE = ("auc", "log_loss", "pass_log_loss")
LIMIT_S = 1800.0

Settings = Mapping[str, Any]


def variants(name: str) -> list[Settings]:
    """Returns the settings to try, the defaults first."""
    tried: list[Settings] = [{}]
    tried += [{"optimizer.sparse": {"name": "adagrad", "learning_rate": x}} for x in SPARSE_RATES]
    tried += [{"train.batch_size": size} for size in (64, 512)]
    if name != "lr":
        tried += [{"model.dim": dim} for dim in (4, 16)]
    if name not in ("lr", "fm"):
        tried += [{"optimizer.dense": {"name": "adam", "learning_rate": x}} for x in DENSE_RATES]
        tried += [{"model.hidden": [64, 32]}]
    return tried


@dataclass(frozen=True)
class Data:
    """Rows to train on and to test on, and the models for them."""

    name: str
    schema: Schema
    train: Sequence[str]
    test: Sequence[str]
    models: Sequence[str]
    best_auc: float | None = None  # of the model that the rows are drawn from
    task: int = 0  # whose AUC counts
    others: Mapping[str, Callable[["Data", int], np.ndarray]] = field(default_factory=dict)

    def batches(self, files: Sequence[str]) -> list[Batch]:
        """Returns the rows of files."""
        dataset = QueueDataset(self.schema, 4096)
        dataset.set_filelist(files)
        return list(dataset)

    def labels(self) -> np.ndarray:
        """Returns those of the rows to test on, by which the AUC is."""
        labels = np.concatenate([batch.all_labels for batch in self.batches(self.test)])
        if not self.task:
            return labels if labels.ndim == 1 else labels[:, 0]
        return np.where(labels[:, 0] == 1, labels[:, self.task], np.nan)  # of clicked rows


def predictions(data: Data, model: str, settings: Settings, seed: int) -> np.ndarray:
    """Returns those for the test rows after training by the defaults but `settings`."""
    sections: dict[str, dict[str, Any]] = {"model": {}, "train": {"seed": seed}}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    options = sections.pop("model")
    with Trainer(model, options, schema=data.schema, **sections) as trainer:
        trainer.train(data.train)
        found = trainer.predict(data.test)
    return found if found.ndim == 1 else found[:, data.task]


def one_hot(data: Data) -> tuple[csr_matrix, np.ndarray, csr_matrix]:
    """Returns rows to train on, their labels, and rows to test on: a one for each key, then the numbers."""
    places: dict[int, int] = {}

    def rows_of(files: Sequence[str]) -> tuple[csr_matrix, np.ndarray]:
        batches = data.batches(files)
        keys = np.concatenate([batch.keys for batch in batches])
        counts = [np.diff(batch.offsets[:: batch.num_slots]) for batch in batches]
        if not places:
            places.update((key, place) for place, key in enumerate(np.unique(keys).tolist()))
        columns = np.array([places.get(key, -1) for key in keys.tolist()])
        rows = np.repeat(np.arange(sum(map(len, counts))), np.concatenate(counts))
        known = columns >= 0
        ones = np.ones(known.sum(), np.float32)
        shape = (sum(batch.size for batch in batches), len(places))
        found = csr_matrix((ones, (rows[known], columns[known])), shape=shape)
        dense = csr_matrix(np.concatenate([batch.dense for batch in batches]))
        return hstack([found, dense], "csr"), np.concatenate([batch.labels for batch in batches])

    train, labels = rows_of(data.train)
    return train, labels, rows_of(data.test)[0]


def of_regression(data: Data, seed: int) -> np.ndarray:
    train, labels, test = one_hot(data)
    model = LogisticRegression(C=0.1, max_iter=300, random_state=seed)
    return model.fit(train, labels).predict_proba(test)[:, 1]


def codes(data: Data, files: Sequence[str], known: list[dict[int, int]]) -> np.ndarray:
    """Returns a column a slot, the number of its first key, then the numbers; unknown keys are missing."""
    columns, dense = [], []
    for batch in data.batches(files):
        first = batch.keys[np.minimum(batch.offsets[:-1], batch.keys.size - 1)]
        columns.append(first.reshape(batch.size, batch.num_slots))
        dense.append(batch.dense)
    keys = np.concatenate(columns)
    if not known:
        known += [{key: i for i, key in enumerate(np.unique(each).tolist())} for each in keys.T]
    coded = [
        [places.get(key, np.nan) for key in each]
        for places, each in zip(known, keys.T.tolist(), strict=True)
    ]
    return np.column_stack([np.array(coded).T, np.concatenate(dense)])


def of_lightgbm(data: Data, seed: int) -> np.ndarray:
    import lightgbm

    known: list[dict[int, int]] = []
    train, test = codes(data, data.train, known), codes(data, data.test, known)
    labels = np.concatenate([batch.labels for batch in data.batches(data.train)])
    model = lightgbm.LGBMClassifier(
        n_estimators=200, learning_rate=0.05, random_state=seed, n_jobs=2, verbose=-1
    )
    model.fit(train, labels, categorical_feature=list(range(len(known))))
    return model.predict_proba(test)[:, 1]


def of_plain_pytorch(data: Data, seed: int) -> np.ndarray:
    """Trains `ctr_dnn` with an nn.EmbeddingBag in batches of 128 by Adam."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    known: list[dict[int, int]] = []
    train, test = codes(data, data.train, known), codes(data, data.test, known)
    labels = torch.from_numpy(np.concatenate([b.labels for b in data.batches(data.train)]))
    sizes = [len(places) + 1 for places in known]
    starts = np.cumsum([0, *sizes[:-1]])

    def tensors(rows: np.ndarray) -> tuple[Any, Any]:
        keys = np.nan_to_num(rows[:, : len(sizes)] + 1).astype(np.int64) + starts
        return torch.from_numpy(keys), torch.from_numpy(rows[:, len(sizes) :].astype(np.float32))

    table = nn.Embedding(sum(sizes), 10)
    nn.init.uniform_(table.weight, -0.01, 0.01)
    with torch.no_grad():
        table.weight[torch.from_numpy(starts)] = 0.0  # of unknown keys, which are never trained
    widths = [len(sizes) * 10 + data.schema.num_dense, 400, 400, 400]
    layers = [part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    net = nn.Sequential(*layers, nn.Linear(400, 1))
    optimizer = torch.optim.Adam([*table.parameters(), *net.parameters()])
    order = torch.randperm(len(labels))

    def logits(keys: Any, numbers: Any) -> Any:
        return net(torch.cat([table(keys).flatten(1), numbers], 1)).squeeze(1)

    keys, numbers = tensors(train)
    for part in order.split(128):
        loss = nn.functional.binary_cross_entropy_with_logits(
            logits(keys[part], numbers[part]), labels[part]
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return logits(*tensors(test)).sigmoid().numpy()


OTHERS = {
    "scikit-learn's logistic regression": of_regression,
    "LightGBM, 200 trees": of_lightgbm,
    "plain PyTorch, `ctr_dnn`": of_plain_pytorch,
}


def line_of(name: str, labels: np.ndarray, found: Sequence[np.ndarray]) -> list[str]:
    """Returns name, AUC with its range, and log loss: means over seeds."""
    aucs = [roc_auc_score(labels, each) for each in found]
    losses = [log_loss(labels, each.astype(np.float64)) for each in found]
    return [name, f"{mean(aucs):.4f} ± {(max(aucs) - min(aucs)) / 2:.4f}", f"{mean(losses):.4f}"]


def measured(data: Data, models: Sequence[str], seeds: int, *, tunes: bool) -> list[list[str]]:
    """Returns a line a model or tool: as `line_of`, then the best of tuned settings and these."""
    labels = data.labels()
    known = ~np.isnan(labels)  # a conversion without a click has none
    labels = labels[known]

    def runs(name: str, settings: Settings, number: int) -> list[np.ndarray]:
        return [predictions(data, name, settings, seed)[known] for seed in range(number)]

    def auc(found: Sequence[np.ndarray]) -> float:
        return mean(float(roc_auc_score(labels, each)) for each in found)

    lines = []
    for name in [each for each in data.models if not models or each in models]:
        defaults = runs(name, {}, seeds)
        line = line_of(f"`{name}`", labels, defaults)
        if tunes:
            by_variant = [(auc(runs(name, each, 1)), each) for each in variants(name)]
            settings = max(by_variant, key=lambda it: it[0])[1]
            best = auc(runs(name, settings, seeds)) if settings else auc(defaults)
            gap = best - auc(defaults)
            shown = ", ".join(
                f"{key} = {value['learning_rate'] if isinstance(value, dict) else value}"
                for key, value in settings.items()
            )
            line += [f"{best:.4f}{' (!)' if gap > GAP else ''}", shown or "the defaults"]
        say("quality", data=data.name, line=line)
        lines.append(line)
    for name, predict in data.others.items() if not models else ():
        try:
            found = [predict(data, seed)[known] for seed in range(seeds)]
        except ModuleNotFoundError as error:
            print(f"# {name} is left out: {error}", file=sys.stderr)
            continue
        lines.append([*line_of(name, labels, found), *["", ""][: 2 * tunes]])
        say("quality", data=data.name, line=lines[-1])
    return lines


def run_command(main: str, *arguments: object) -> str:
    """Runs a command of the package, by the module of its `main`; returns what it prints."""
    program = f"from ctr_ps.{main} import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{main} {arguments} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def by_command(data: Data, model: str, settings: Settings, workers: int) -> dict[str, float]:
    """Returns the figures of a job with so many workers, and as many servers if several."""
    job = {"data.train": data.train, "data.test": data.test, **settings}
    overrides = [f"--set={key}={json.dumps(value)}" for key, value in job.items()]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "job.toml")
        path.write_text(f'model = "{model}"\n', encoding="utf-8")
        numbers = ("--server-num", workers, "--worker-num", workers, "--log-dir", f"{folder}/log")
        program: tuple[object, ...] = ("ps_worker.cli", "train")
        if workers > 1:
            program = ("deploy.launch", *numbers)
        found = json.loads(run_command(*program, "--json", path, *overrides).splitlines()[-1])
    found["pass_log_loss"] = found["passes"][0]["log_loss"]
    return {name: found[name] for name in OF_A_MODE}


def mode_table(data: Data, models: Sequence[str], options: argparse.Namespace) -> str:
    """Trains models in modes; returns a line a model."""
    columns = list(itertools.product(options.modes, options.workers))
    words = (each.partition("=") for each in options.settings)
    own = {key: toml_value(text) for key, _, text in words}
    lines = []
    for model in models:
        line = [f"`{model}`"]
        for mode, workers in columns:
            of_seeds = [
                by_command(data, model, {"strategy.mode": mode, "train.seed": seed, **own}, workers)
                for seed in range(options.seeds)
            ]
            figures = {
                name: round(median(each[name] for each in of_seeds), 4) for name in OF_A_MODE
            }
            say("quality", data=data.name, model=model, mode=mode, workers=workers, **figures)
            line.append(" / ".join(f"{figure:.4f}" for figure in figures.values()))
        lines.append(line)
    return table([data.name, *(f"{mode}, {workers}" for mode, workers in columns)], lines)


def planted(folder: Path, rows: int) -> Data:
    """Writes rows of a known click model, and a tenth as many to test on."""
    sizes = ("--rows", rows, "--test-rows", rows // 10, "--files", 4, "--seed", 1)
    run_command("ps_worker.extras.data_tools.cli", "generate", folder, *sizes)
    best = json.loads((folder / "planted.json").read_text())["best_auc"]
    parts = [sorted(map(str, folder.glob(f"{kind}/part-*"))) for kind in ("train", "test")]
    return Data("planted", criteo_schema(), *parts, FLAT_MODELS, best, others=OTHERS)


def by_script(folder: Path, rows: int, name: str, script: str, *figures: Any) -> Data:
    """Writes the rows of an example."""
    place = [f"examples/{script}.py", str(folder)]
    command = [sys.executable, *place, "--rows", str(rows), "--test-rows", str(rows // 10)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    schema = Schema.from_dict(
        tomllib.loads(Path(f"examples/schemas/{name}.toml").read_text(encoding="utf-8"))
    )
    parts = [sorted(map(str, folder.glob(f"{kind}/*"))) for kind in ("train", "test")]
    return Data(name, schema, *parts, *figures)


def data_sets(folder: Path, options: argparse.Namespace) -> Iterator[Data]:
    """Yields the data sets that are wanted, and writes their rows before."""

    def is_wanted(name: str) -> bool:
        return name in (options.data or [name])

    if options.sample and is_wanted("clicks"):
        *train, test = options.sample
        yield Data("clicks", criteo_schema(), train, [test], FLAT_MODELS, others=OTHERS)
    if is_wanted("planted"):
        yield planted(folder / "planted", options.rows)
    for name, script, *figures in (
        ("histories", "history_clicks", (*HISTORY_MODELS, "ctr_dnn"), 0.8, 0),
        ("conversions", "conversions", tuple(TASK_MODELS), 0.838, 1),
    ):
        if is_wanted(name) and not options.modes:
            yield by_script(folder / name, options.rows, name, script, *figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", nargs="+", default=[], help="files; the last one is to test on")
    parser.add_argument("--rows", type=int, default=200_000, help="planted rows")
    parser.add_argument("--data", nargs="+", default=[], help="names of data sets; all")
    parser.add_argument("--models", nargs="+", default=[], help="all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--no-tuning", action="store_true")
    parser.add_argument("--modes", nargs="+", default=[], choices=MODES, help="to compare")
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2], help="of each mode")
    parser.add_argument(
        "--set", dest="settings", action="append", default=[], help="of modes' jobs"
    )
    options = parser.parse_args()
    tunes = not options.no_tuning
    with tempfile.TemporaryDirectory() as folder:
        for data in data_sets(Path(folder), options):
            if options.modes:
                print(mode_table(data, options.models or list(MODELS), options), flush=True)
                continue
            lines = measured(data, options.models, options.seeds, tunes=tunes)
            best = f"best possible AUC {data.best_auc:.3f}" if data.best_auc else ""
            header = [f"{data.name} {best}".strip(), "AUC", "log loss", "tuned AUC", "by"]
            print(table(header[: 3 + 2 * tunes], lines), flush=True)


if __name__ == "__main__":
    main()
