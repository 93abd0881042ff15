"""Map of imports: the rooms of every package, and which room imports which.

    python -m tests.import_map

A room is a module or a subpackage, without `__init__` and generated code. Every import counts, wherever it is
written: in a function, under TYPE_CHECKING, or anywhere below a subpackage. A name that a package re-exports
counts as imported from the module that defines it. Exits with 1 if a rule of `problems` is broken.
"""

import ast
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
GENERATED = "protos/v1"
ALLOWED = {
    "ctr_ps.protos": set(),
    "ctr_ps.ctr_model": set(),
    "ctr_ps.deploy": {"ctr_ps.protos"},
    "ctr_ps.ps_server": {"ctr_ps.protos"},
    "ctr_ps.ps_worker": {"ctr_ps.protos", "ctr_ps.ctr_model", "ctr_ps.ps_server"},
}
"""For each of the five packages those that it may import."""

Arrows = dict[str, set[str]]


@cache
def modules() -> dict[str, Path]:
    """Returns all modules and packages by dotted name."""
    folders = (name.removeprefix("ctr_ps.") for name in ALLOWED)
    paths = (path.relative_to(ROOT) for each in folders for path in (ROOT / each).rglob("*.py"))
    return {
        ".".join(("ctr_ps", *path.with_suffix("").parts)).removesuffix(".__init__"): ROOT / path
        for path in sorted(paths)
        if not path.is_relative_to(GENERATED)
    }


def package_of(module: str) -> str:
    """Returns which of the five packages a module is in, such as `ctr_ps.protos`."""
    return ".".join(module.split(".")[:2])


def defining_module(module: str, name: str) -> str:
    """Returns the module that `from module import name` loads."""
    if f"{module}.{name}" in modules():
        return f"{module}.{name}"
    if modules()[module].name == "__init__.py":
        for node in ast.parse(modules()[module].read_text()).body:
            is_ours = isinstance(node, ast.ImportFrom) and node.module in modules()
            if is_ours and name in (alias.asname or alias.name for alias in node.names):
                return defining_module(node.module, name)
    return module


@cache
def imports_of(module: str) -> set[str]:
    """Returns the modules of ours that a module imports."""
    found = set()
    for node in ast.walk(ast.parse(modules()[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in modules()}
        elif isinstance(node, ast.ImportFrom) and node.module in modules():
            found |= {defining_module(node.module, alias.name) for alias in node.names}
    return found


def arrows_within(package: str) -> Arrows:
    """Returns for each room of a package the other rooms that it imports."""

    def rooms(names: set[str]) -> set[str]:
        inside = {name for name in names if name.startswith(f"{package}.")}
        return {name.removeprefix(f"{package}.").split(".")[0] for name in inside}

    arrows: Arrows = {}
    for module in modules():
        for room in rooms({module}):
            arrows.setdefault(room, set()).update(rooms(imports_of(module)) - {room})
    return arrows


def layers(arrows: Arrows) -> list[list[str]]:
    """Returns the rooms in layers, lowest first: each imports only lower ones. Circles come last."""
    left, done = dict(arrows), list[list[str]]()
    while left:
        layer = [room for room, targets in left.items() if not targets & left.keys()] or list(left)
        done.append(sorted(layer))
        left = {room: targets for room, targets in left.items() if room not in layer}
    return done


def circles(arrows: Arrows) -> list[str]:
    """Returns the pairs of rooms that import each other, directly or through others."""
    reached = {room: set(targets) for room, targets in arrows.items()}
    for middle in arrows:
        for room in arrows:
            reached[room] |= reached[middle] if middle in reached[room] else set()
    pairs = ((a, b) for a in sorted(arrows) for b in sorted(reached[a]) if a < b)
    return [f"{a} <-> {b}" for a, b in pairs if a in reached[b]]


def packages() -> dict[str, Arrows]:
    """Returns the arrows of every package with two or more rooms."""
    names = (name for name, path in modules().items() if path.name == "__init__.py")
    return {name: arrows for name in sorted(names) if len(arrows := arrows_within(name)) > 1}


def problems() -> list[str]:
    """Returns each broken rule in words: circles, and imports not in `ALLOWED`."""
    found = []
    for package, arrows in packages().items():
        found += [f"{package}: circle {pair}" for pair in circles(arrows)]
    for module in modules():
        allowed = {package_of(module), *ALLOWED[package_of(module)]}
        refused = {name for name in imports_of(module) if package_of(name) not in allowed}
        found += [f"{module} imports {name}" for name in sorted(refused)]
    return found


def main() -> int:
    """Prints the rooms by layer, the highest first, and what each imports; then the problems."""
    for package, arrows in packages().items():
        print(f"{package}: {len(arrows)} rooms, {sum(map(len, arrows.values()))} arrows")
        for number, layer in reversed(list(enumerate(layers(arrows)))):
            for room in layer:
                print(f"  {number}  {room:20} {', '.join(sorted(arrows[room]))}".rstrip())
    print(*(found := problems()), sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
