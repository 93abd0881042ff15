"""Benchmarks run seldom: what they import must be there all the same."""

import importlib
from pathlib import Path

import pytest

import benchmarks

MODULES = sorted(path.stem for path in Path(benchmarks.__path__[0]).glob("*.py"))


@pytest.mark.parametrize("name", MODULES)
def test_benchmark_finds_what_it_imports(name: str) -> None:
    if name in {"torch_models", "bench_device"}:
        pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")
    assert importlib.import_module(f"benchmarks.{name}").__doc__
