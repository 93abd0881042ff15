"""Build context of the image."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_build_context_holds_every_package_of_the_wheel() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = pyproject["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    allowed = (ROOT / ".dockerignore").read_text().splitlines()

    assert allowed.index("*") < allowed.index("!pyproject.toml")
    for package in packages:
        assert f"!{package}" in allowed or f"!{package}/*.py" in allowed
