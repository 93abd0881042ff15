"""Prints the size of the project: lines of each package, and words of its pages.

    python -m benchmarks.size

Counts tracked files alone, and of Python no generated code.
"""

import ast
import subprocess
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("protos", "ps_server", "ps_worker", "ctr_model", "deploy", "ctr_ps")
OTHERS = ("benchmarks", "examples", "tests")
EXTRAS = "ps_worker/extras"


def tracked(pattern: str) -> list[Path]:
    """Returns the tracked files that match, without links and generated code."""
    listed = subprocess.check_output(["git", "ls-files", pattern], cwd=ROOT, text=True)
    paths = [ROOT / name for name in listed.splitlines()]
    return [path for path in paths if path.is_file() and "_pb2" not in path.name]


def lines_of(path: Path) -> Counter[str]:
    """Returns how many lines a module has in all, and of docstrings."""
    source = path.read_text()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
    docstrings = [node.body[0] for node in nodes if ast.get_docstring(node, clean=False)]
    return Counter(
        files=1,
        lines=len(source.splitlines()),
        docstrings=sum((each.end_lineno or 0) - each.lineno + 1 for each in docstrings),
    )


def package_of(path: Path) -> str:
    """Returns the row of a module: its package of the first two levels."""
    parts = path.relative_to(ROOT).parent.parts
    return "/".join(parts[: 3 if parts[:2] == tuple(EXTRAS.split("/")) else 2])


def main() -> None:
    rows: dict[str, Counter[str]] = {}
    for folder in (*PRODUCT, *OTHERS):
        for path in tracked(f"{folder}/*.py"):
            rows.setdefault(package_of(path), Counter()).update(lines_of(path))
    print(f"{'package':32}{'files':>8}{'lines':>8}{'docstrings':>12}")
    for package in sorted(rows):
        counts = rows[package]
        print(f"{package:32}{counts['files']:8,}{counts['lines']:8,}{counts['docstrings']:12,}")

    def total(*folders: str) -> int:
        return sum(rows[package]["lines"] for package in rows if package.startswith(folders))

    pages = [path for path in tracked("*.md") if path.parent.name != "decisions"]
    print(f"product {total(*PRODUCT):,}, of it extras {total(EXTRAS):,}; tests {total('tests'):,}")
    print(f"pages {sum(len(path.read_text().split()) for path in pages):,} words")


if __name__ == "__main__":
    main()
