"""The examples that come with the package: jobs, models, scripts, and the files that they need."""

import re
from pathlib import Path

from ctr_ps.protos.errors import UsageError, did_you_mean

_FOLDER = Path(__file__).parents[2] / "examples"

_SUFFIXES = (".toml", ".py", ".sh")
_NAMED = re.compile(r"\bexamples/([\w/]+\.(?:toml|py|sh))\b")


def example_names() -> dict[str, str]:
    """Returns the description of each example, by name; UsageError if this installation has none."""
    names = sorted({path.stem for path in _FOLDER.glob("*") if path.suffix in _SUFFIXES})
    if not names:
        raise UsageError(f"{_FOLDER} has no examples: install ctr-ps again")
    return {name: _first_line(_own_files(name)[0]) for name in names}


def write_example(name: str, folder: Path) -> list[Path]:
    """Writes the files of an example, and those that they name; paths in them lead to `folder`.

    Returns the files written, that of the example first. Raises UsageError if there is no such example, a
    file exists already, or `folder` cannot be written; no file is replaced.
    """
    names = list(example_names())
    if name not in names:
        hint = did_you_mean(name, names, likeness=0)
        raise UsageError(f"no example {name!r}{hint} there are {', '.join(names)}")
    sources = _with_named(_own_files(name))
    targets = [folder / source.relative_to(_FOLDER) for source in sources]
    if there := [str(target) for target in targets if target.exists()]:
        raise UsageError(
            f"{', '.join(there)} exist already and are not replaced: name another folder, as in "
            f"ps-worker example {name} my_folder"
        )
    try:
        for source, target in zip(sources, targets, strict=True):
            _write(source, target, folder)
    except OSError as error:
        raise UsageError(f"cannot write into {folder}: {error}") from error
    return targets


def _own_files(name: str) -> list[Path]:
    paths = [_FOLDER / f"{name}{suffix}" for suffix in _SUFFIXES]
    return [path for path in paths if path.is_file()]


def _with_named(paths: list[Path]) -> list[Path]:
    """Returns files of the examples, and all that they name, which they need or recommend."""
    found = list(paths)
    for path in found:  # and those that are appended meanwhile
        names = _NAMED.findall(path.read_text(encoding="utf-8"))
        found.extend(dict.fromkeys(_FOLDER / name for name in names if _FOLDER / name not in found))
    return found


def _write(source: Path, target: Path, folder: Path) -> None:
    prefix = "" if folder == Path() else f"{folder}/"
    text = source.read_text(encoding="utf-8").replace("examples/", prefix)
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("x", encoding="utf-8") as file:
        file.write(text)
    if source.suffix == ".sh":
        target.chmod(0o755)


def _first_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    first = next(line for line in lines if not line.startswith("#!"))
    return first.lstrip('#r" ').rstrip('" ')
