from pathlib import Path

import pytest

from ctr_model.registry import build_model
from ctr_model.schema import Schema


def test_options_reach_the_model() -> None:
    model = build_model("ctr_dnn", Schema.numbered(2, 3), {"dim": 4, "hidden": [8], "table": "ads"})

    assert model.tables[0].name == "ads"
    assert model.tables[0].dim == 4
    assert model.segments[0].shape == (2 + 3 * 4, 8)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ctr_dn", {}, "unknown model 'ctr_dn', did you mean 'ctr_dnn'"),
        ("ctr_dnn", {"hiden": [4]}, "did you mean 'hidden'"),
        ("ctr_dnn", {"schema": 4}, "unknown option"),
        ("lr", {"dim": 4}, "unknown option of model 'lr': 'dim', it has none"),
        ("ctr_dnn", {"hidden": []}, "expected widths"),
        ("ctr_dnn", {"dim": 0}, "expected widths"),
        ("ctr_dnn", {"dim": "ten"}, "dim"),
        ("ctr_dnn", {"init_range": -1.0}, "init_range"),
    ],
)
def test_what_is_unknown_or_wrong_is_refused(name: str, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(name, Schema.numbered(2, 3), options)


OWN_MODEL = """
from ctr_model.models.ctr_dnn import CtrDnn

class MyModel(CtrDnn):
    def __init__(self, schema, *, dim: int = 4):
        super().__init__(schema, dim=dim, hidden=(8,))

class Demanding(CtrDnn):
    def __init__(self, schema, *, dim: int = 4, hidden: list[int]):
        super().__init__(schema, dim=dim, hidden=hidden)

class Half:
    def __init__(self, schema):
        self.tables = ()
"""


@pytest.fixture
def own_file(tmp_path: Path) -> str:
    path = tmp_path / "my_model.py"
    path.write_text(OWN_MODEL)
    return str(path)


def test_model_of_ones_own_is_a_class_in_a_file(own_file: str) -> None:
    model = build_model(f"{own_file}:MyModel", Schema.numbered(2, 3), {"dim": 5})

    assert type(model).__name__ == "MyModel"
    assert model.tables[0].dim == 5


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("{}:MyModel", {"dimm": 5}, "unknown option of model '.*:MyModel': 'dimm'.*'dim'"),
        ("{}:MyModel", {"dim": "ten"}, "dim is 'ten'"),
        ("{}:MyModell", {}, "no class 'MyModell', only .*'MyModel', 'Demanding', 'Half'"),
        ("{}:Demanding", {"dim": 4}, "'.*:Demanding' needs the option 'hidden'"),
        ("{}:Half", {}, "has no segments, num_params"),
        ("{}", {}, 'expected "path/of/file.py:ClassName"'),
        ("{}x:MyModel", {}, 'expected "path/of/file.py:ClassName"'),
        ("nowhere/my_model.py:MyModel", {}, "no file 'nowhere/my_model.py'"),
    ],
)
def test_faults_of_ones_own_model_are_named(
    own_file: str, name: str, options: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(name.format(own_file), Schema.numbered(2, 3), options)


def test_file_that_does_not_import_says_why(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("import no_such_module\n")

    with pytest.raises(ValueError, match=r"failed: ModuleNotFoundError: .*no_such_mod"):
        build_model(f"{path}:MyModel", Schema.numbered(2, 3), {})
