"""`ps-data init`: writes a schema and a first job for files that nobody has prepared."""

import glob
import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from ctr_ps.protos.errors import DataError, UsageError, counted
from ctr_ps.ps_worker.data.bad_rows import silent_bad_rows
from ctr_ps.ps_worker.data.columnar.column_values import is_list_type, split_texts
from ctr_ps.ps_worker.data.files.content import errors_of_writing, write_text
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.data.files.listing import is_url, matching_files, natural_order, size_of
from ctr_ps.ps_worker.data.formats import format_of, guessed_format, reader_of
from ctr_ps.ps_worker.extras.data_tools.roles import Proposal, propose
from ctr_ps.ps_worker.extras.data_tools.samples import Sample, names_of, sample_of

SCHEMA_FILE, JOB_FILE, MODEL_FOLDER = "schema.toml", "job.toml", "model"

_MAX_BYTES_IN_MEMORY = 1 << 29  # of rows that are shuffled there
_BAD_ROWS = 100  # malformed for other reasons than a missing label
_STEPS = 200  # of an epoch, at least: few rows need small batches
_MIN_BATCH, _MAX_BATCH = 16, 512


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstJob:
    """What was written: paths of both files, the role of each column and the sample that tells it, the files.

    Without files to test there is no test.
    """

    schema_file: Path
    job_file: Path
    proposal: Proposal
    sample: Sample
    train: Sequence[str]
    test: Sequence[str]


def write_first_job(
    # files to train on, with names of columns: `formats.NAMED`. Without `test` the last of several is
    # held out for the test
    patterns: Sequence[str],
    out: Path,  # folder of both files, made if necessary; the job saves its model there, too
    *,
    label: str = "",  # see `propose`; likewise `ignore`, `slots` and `numbers`
    ignore: Collection[str] = (),  # names of columns to leave out
    slots: Collection[str] = (),
    numbers: Collection[str] = (),
    overwrite: bool = False,  # whether both files may exist
    test: Sequence[str] = (),  # files to evaluate on
    format: str | None = None,  # of the files; None: determined by the suffix
) -> FirstJob:
    """Writes `schema.toml` and `job.toml`, with a comment for each choice.

    Raises:
        UsageError: If one of the files exists, a name does not, or the label or the slots are not clear.
        DataError: If a file cannot be read or written.
    """
    files = sorted(matching_files(patterns), key=natural_order)  # a shell names day-10 before day-9
    format = format or guessed_format(files[0])
    held_out = matching_files(test) if test else files[1:][-1:]
    places = {_place_of(path) for path in held_out}
    train = [path for path in files if _place_of(path) not in places]
    if not train:
        raise UsageError("--test names all files: leave some files to train on")
    for name in (SCHEMA_FILE, JOB_FILE):
        if (out / name).exists() and not overwrite:
            raise UsageError(
                f"{str(out / name)!r} exists: give --overwrite, or choose another folder with --out"
            )
    sample = sample_of(train, format)
    proposal = propose(sample, label=label, ignore=ignore, slots=slots, numbers=numbers)
    if (found := proposal.label) and sample.is_complete and found.click_rate in (0.0, 1.0):
        raise UsageError(
            f"the label {found.name!r} is {found.click_rate:g} in all {sample.num_rows:,} rows: there is "
            f"nothing to learn"
        )
    for tested in held_out:
        _require_rows(tested, proposal, format)
    first = FirstJob(
        schema_file=out / SCHEMA_FILE,
        job_file=out / JOB_FILE,
        proposal=proposal,
        sample=sample,
        train=train,
        test=held_out,
    )
    texts = {
        first.schema_file: _schema_text(first, format),
        first.job_file: _job_text(first, format, test),
    }
    with errors_of_writing(out):
        out.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            write_text(path, text)
    return first


def _require_rows(path: str, proposal: Proposal, format: str | None) -> None:
    """Refuses a file to test on of which the job would notice after its training that it has no good row."""
    names_of(path, format)  # refuses files of keys, and without names
    bad_rows = silent_bad_rows()
    remedy = "name other files with --test, or leave the column out with --ignore"
    try:
        blocks = reader_of(path, proposal.schema(), bad_rows, format).blocks(FileSplit(path))
        has_rows = any(block.rows.size for block in blocks)
    except DataError as error:
        raise UsageError(
            f"a test file has other columns than the training files: {error}; {remedy}"
        ) from error
    if not has_rows:
        fault = f": {bad_rows.first}; {remedy}" if bad_rows.first else ": name others with --test"
        raise UsageError(
            f"test file {path} has no row that fits the schema of the training files{fault}"
        )


def _place_of(path: str) -> str:
    """Returns what two names of one file have in common."""
    return path if is_url(path) else str(Path(path).resolve())


def _schema_text(first: FirstJob, format: str | None) -> str:
    proposal = first.proposal
    comments = {each.name: each.why for each in proposal.numbers}
    comments |= {each.name: each.why for each in (*proposal.slots, *proposal.vectors)}
    if proposal.label is not None:
        comments[proposal.label.name] = f"0 and 1, {proposal.label.click_rate:.2%} are 1"
    comments = {name: _line(comment) for name, comment in comments.items()}
    schema = proposal.schema()
    others = [each.name for each in proposal.ignored if "labels = [" in each.why]
    labels = [] if proposal.label is None else [proposal.label.name, *others]
    lines = [
        f"# Columns of {_line(first.train[0])}{' and others' if len(first.train) > 1 else ''}, found by "
        f"`ps-data init` in {counted(first.sample.num_rows, 'row', ',')}.",
        "# If a column is wrong, move it between `slots` and `dense`, or remove it; docs/schema.md has",
        "# all settings. A trained model keeps its schema: add new slots at the end.",
        "",
        *(
            [f"# In the place of label, for models esmm and mmoe: labels = {json.dumps(labels)}"]
            if others
            else []
        ),
        schema.to_toml(comments),
    ]
    if (format or format_of(first.train[0])) in ("json", "paddlerec"):
        lines.append("# Names that only lines after the first 1,000 of a file have are not here.")
    if proposal.ignored:
        lines.append("# Ignored:")
        lines += [f"#   {_text(each.name)}: {_line(each.why)}" for each in proposal.ignored]
        lines.append("")
    return "\n".join(lines)


def _job_text(first: FirstJob, format: str | None, test: Sequence[str]) -> str:
    sample, label = first.sample, first.proposal.label
    rows = f"{'' if sample.is_complete else 'about '}{counted(sample.total_rows, 'row', ',')}"
    if test:
        why_test = "as --test says"
    elif first.test:
        why_test = "the last file, which the model does not train on"
    else:
        why_test = "only one file; `ps-data split` distributes its rows to files for both"
    lines = [
        "# A first job, written by `ps-data init`. Run it in the folder of that command:",
        "#",
        f"#   ps-worker train {_line(str(first.job_file))}",
        "#",
        "# docs/job.md has all settings.",
        "",
        "[model]",
        'name = "deepfm"    # weights, pairs of slots and a small network; docs/models.md has others',
        "dim = 8            # numbers in the embedding of a value",
        "hidden = [64, 32]",
        *_about_histories(first),
        "",
        "[data]",
        f"train = {_listed(first.train)} # {rows}",
        f"test = {_listed(first.test)} # {why_test}",
        f"schema = {_text(str(first.schema_file))}",
    ]
    if format:
        lines.append(f"format = {_text(format)}")
    if label is not None and label.missing_rate:
        # Of a pass over the larger set.
        train_size, test_size = (sum(map(size_of, files)) for files in (first.train, first.test))
        most_rows = sample.total_rows * max(1.0, test_size / max(train_size, 1))
        limit = math.ceil(2 * label.missing_rate * most_rows) + _BAD_ROWS
        lines.append(
            f"bad_row_limit = {limit} # {label.missing_rate:.1%} of the rows have no label and are skipped; "
            f"the limit is twice as many, and {_BAD_ROWS}"
        )
    if sample.total_rows * _row_bytes(first) <= _MAX_BYTES_IN_MEMORY:
        lines += [
            "in_memory = true   # the rows fit into memory",
            'shuffle = "local"  # files are often sorted, which would harm training',
        ]
    wanted = max(sample.total_rows / _STEPS, 1)
    batch_size = min(max(2 ** math.floor(math.log2(wanted)), _MIN_BATCH), _MAX_BATCH)
    lines += [
        "",
        "[train]",
        f"batch_size = {batch_size} # {counted(math.ceil(sample.total_rows / batch_size), 'step', ',')} an "
        f"epoch",
        "epochs = 1         # more than one often overfits",
        "",
        "[checkpoint]",
        f"dir = {_text(str(first.job_file.parent / MODEL_FOLDER))}",
        "",
    ]
    return "\n".join(lines)


def _about_histories(first: FirstJob) -> list[str]:
    """Returns a comment on a list that may be in order of time; empty without lists."""
    columns, slots = first.sample.columns, first.proposal.schema().slots
    lists = [_text(name) for name in slots if is_list_type(columns[name].type)]
    return [
        f"# If {name} is in order of time: docs/models.md#histories on `din` (pip install 'ctr-ps[torch]')"
        for name in lists[:1]
    ]


def _row_bytes(first: FirstJob) -> float:
    """Returns the mean size of a row in memory: label and numbers as float32, keys as uint64."""
    schema, columns = first.proposal.schema(), first.sample.columns
    slots = [split_texts(columns[name], schema.split.get(name)) for name in schema.slots]
    lists = [array for array in slots if is_list_type(array.type)]
    num_values = sum(len(array.flatten()) + array.null_count for array in lists)
    num_keys = len(slots) - len(lists) + num_values / first.sample.num_rows
    bounds = 8 + 2 * len(slots) if lists else 0  # of the keys of a row
    size: float = 4 * (1 + schema.num_dense) + 8 * num_keys + bounds
    return size


def _listed(files: Sequence[str]) -> str:
    patterns = [_text(path if is_url(path) else glob.escape(path)) for path in files]
    if len(patterns) <= 1:
        return f"[{', '.join(patterns)}]"
    return "\n".join(["[", *(f"    {pattern}," for pattern in patterns), "]"])


def _text(text: str) -> str:
    """Returns a text in TOML: JSON, with what TOML forbids escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _line(comment: str) -> str:
    """Returns a comment as one line without control characters."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in comment)
