"""The packages' rooms: no circles, and imports between top-level packages in one direction."""

import pytest

from tests import import_map


def test_packages_have_no_circles_and_no_imports_upwards():
    assert import_map.problems() == []


def test_layers_put_each_room_above_those_that_it_imports():
    arrows = {"top": {"middle", "low"}, "middle": {"low"}, "low": set(), "other": set()}

    assert import_map.layers(arrows) == [["low", "other"], ["middle"], ["top"]]


def test_a_circle_is_found_through_other_rooms():
    arrows = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}

    assert import_map.circles(arrows) == ["a <-> b", "a <-> c", "b <-> c"]


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A source tree of one package, `protos`, with rooms by name; imports are read from it alone."""

    def write(**sources):
        (tmp_path / "protos").mkdir()
        (tmp_path / "protos/__init__.py").touch()
        for name, source in sources.items():
            (tmp_path / "protos" / f"{name}.py").write_text(source)

    monkeypatch.setattr(import_map, "ROOT", tmp_path)
    cached = [import_map.modules, import_map.imports_of]
    for each in cached:
        each.cache_clear()
    yield write
    for each in cached:
        each.cache_clear()


def test_late_imports_and_those_for_types_count(tree):
    tree(
        a="def f():\n    from ctr_ps.protos import b\n",
        b="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import ctr_ps.protos.c\n",
        c="",
    )

    assert import_map.arrows_within("ctr_ps.protos") == {"a": {"b"}, "b": {"c"}, "c": set()}


def test_a_re_exported_name_counts_for_the_module_that_defines_it(tree):
    tree(__init__="from ctr_ps.protos.a import x\n", a="", b="from ctr_ps.protos import x\n")

    assert import_map.arrows_within("ctr_ps.protos") == {"a": set(), "b": {"a"}}


def test_an_import_upwards_is_a_problem(tree):
    tree(a="import ctr_ps.ps_worker.cluster\n", b="")
    (import_map.ROOT / "ps_worker").mkdir()
    (import_map.ROOT / "ps_worker/cluster.py").touch()

    assert import_map.problems() == ["ctr_ps.protos.a imports ctr_ps.ps_worker.cluster"]
