import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ctr_ps.ctr_model.registry import build_model
from ctr_ps.ctr_model.schema import Schema
from tests.support.model_cases import SCHEMA, ModelCase, assert_gradients_agree


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
        ("fm", {"dim": 0}, "dim is 0"),
        ("fm", {"init_range": -1.0}, "init_range is -1"),
    ],
)
def test_what_is_unknown_or_wrong_is_refused(name: str, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(name, Schema.numbered(2, 3), options)


@pytest.mark.parametrize("name", ["deepfm", "wide_deep", "dcn_v2"])
@pytest.mark.parametrize(("option", "value"), [("dim", 0), ("hidden", []), ("init_range", -1.0)])
def test_wrong_option_is_named_by_every_model_that_has_it(
    name: str, option: str, value: object
) -> None:
    with pytest.raises(ValueError, match=f"{option} is "):
        build_model(name, Schema.numbered(2, 3), {option: value})


OWN_MODEL = """
from ctr_ps.ctr_model.models.click_model import ClickModel
from ctr_ps.ctr_model.models.ctr_dnn import CtrDnn

class MyModel(CtrDnn):
    def __init__(self, schema, *, dim: int = 4):
        super().__init__(schema, dim=dim, hidden=(8,))

class Demanding(CtrDnn):
    def __init__(self, schema, *, dim: int = 4, hidden: list[int]):
        super().__init__(schema, dim=dim, hidden=hidden)

class Plain:
    def __init__(self):
        self.tables = ()

class Half:
    def __init__(self, schema):
        self.tables = ()

class Ordinary(CtrDnn):
    def __init__(self, schema, dim: int, hidden=(2,), *more, **others):
        super().__init__(schema, dim=dim, hidden=hidden)

class OneWay(ClickModel):
    def forward(self, tensors, batch, lookups, buffers, logits):
        pass
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


def test_options_may_be_ordinary_arguments(own_file: str) -> None:
    options = {"dim": 5, "hidden": [3, 4]}

    model = build_model(f"{own_file}:Ordinary", Schema.numbered(2, 3), options)

    assert model.tables[0].dim == 5
    assert [each.shape for each in model.segments][:3] == [(17, 3), (3,), (3, 4)]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("{}:MyModel", {"dimm": 5}, "unknown option of model '.*:MyModel': 'dimm'.*'dim'"),
        ("{}:MyModel", {"dim": "ten"}, "dim is 'ten'"),
        (
            "{}:MyModell",
            {},
            "class 'MyModell', did you mean 'MyModel'. known: MyModel, Demanding, .*, Ordinary, OneWay$",
        ),
        (
            "{}:DEMANDING",
            {},
            "does not define it: unknown class 'DEMANDING', did you mean 'Demanding'",
        ),
        ("{}:Demanding", {"dim": 4}, "'.*:Demanding' needs the option 'hidden'"),
        ("{}:Ordinary", {"hidden": [4]}, "'.*:Ordinary' needs the option 'dim'"),
        ("{}:Ordinary", {"dim": "ten"}, "dim is 'ten'"),
        ("{}:Ordinary", {"schema": 1, "dim": 1}, "unknown option of .*'schema'.* known: dim, hid"),
        ("{}:Plain", {}, "TypeError in its __init__.schema, ....: .*takes 1 positional argument"),
        (
            "{}:Half",
            {},
            "has no segments, num_params, .*: see the interface .*Model, or derive from torch.nn.Module",
        ),
        ("{}:OneWay", {}, "has no backward: see the interface .*ClickModel$"),
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


# z = the sum of an example's numbers times one weight.
PLAIN_MODEL = """
import numpy as np
from ctr_ps.ctr_model.layers.losses import binary_cross_entropy, sigmoid_probabilities
from ctr_ps.ctr_model.models.model import StepResult
from ctr_ps.ctr_model.parameters import EmbeddingTable
from ctr_ps.ctr_model.parameters import Segment

class Plain:
    tables = (EmbeddingTable(name="unused", dim=1),)
    segments = (Segment(name="weight", shape=(1,), init_std=0.0),)
    num_params = 1

    def __init__(self, schema):
        pass

    def workspace(self, max_batch_size):
        return None

    def predict(self, params, batch, lookups, workspace):
        probabilities = np.empty(batch.size, np.float32)
        sigmoid_probabilities(batch.dense.sum(axis=1) * params, probabilities)
        return probabilities

    def gradient(self, params, batch, lookups, workspace, dense_grad, sparse_grads):
        numbers = batch.dense.sum(axis=1)
        probabilities, grad = np.empty_like(numbers), np.empty_like(numbers)
        loss = binary_cross_entropy(
            numbers * params, batch.labels, np.ones_like(batch.labels), probabilities, grad
        )
        dense_grad[:] = grad @ numbers
        sparse_grads["unused"][:] = 0
        return StepResult(loss, probabilities)
"""


def test_model_of_ones_own_needs_no_base_class(tmp_path: Path) -> None:
    path = tmp_path / "plain.py"
    path.write_text(PLAIN_MODEL)

    model = build_model(f"{path}:Plain", SCHEMA, {})

    assert_gradients_agree(
        ModelCase(model, SCHEMA, seed=1),
        lambda dense, slots, tensors: 1 / (1 + np.exp(-dense.sum() * tensors["weight"][0])),
    )


def test_file_that_does_not_import_says_why(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("import no_such_module\n")

    with pytest.raises(ValueError, match=r"failed: ModuleNotFoundError: .*no_such_mod"):
        build_model(f"{path}:MyModel", Schema.numbered(2, 3), {})


@pytest.mark.parametrize("beside", ["helpers.py", "helpers/__init__.py"])
def test_file_that_imports_one_beside_it_says_that_a_model_is_one_file(
    beside: str, tmp_path: Path
) -> None:
    (tmp_path / beside).parent.mkdir(exist_ok=True)
    (tmp_path / beside).write_text("x = 1\n")
    path = tmp_path / "importing.py"
    path.write_text("from helpers import x\n")

    with pytest.raises(ValueError, match=r"'helpers'; a checkpoint carries one file for a model"):
        build_model(f"{path}:MyModel", Schema.numbered(2, 3), {})


TABLES = """
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ctr_ps.ctr_model.jit import kernel
from ctr_ps.ctr_model.models.ctr_dnn import CtrDnn
from ctr_ps.ctr_model.models.model import EmbeddingTable

if TYPE_CHECKING:
    from ctr_ps.ctr_model.schema import Schema


@kernel
def twice(x: float) -> float:
    return 2.0 * x


@dataclass
class Part:
    name: str = "t"


class MyModel(CtrDnn):
    def __init__(self, schema: Schema, *, slots=None, crosses=(), names=("t",), optimizer=None):
        super().__init__(schema)
        assert twice(2.0) == 4.0
        self.tables = tuple(
            EmbeddingTable(name=name, dim=1, slots=slots, crosses=crosses, optimizer=optimizer)
            for name in names
        )
"""


@pytest.fixture
def own_tables(tmp_path: Path) -> str:
    path = tmp_path / "my_tables.py"
    path.write_text(TABLES)
    return f"{path}:MyModel"


def test_own_file_may_have_kernels_and_dataclasses_and_is_read_again(own_tables: str) -> None:
    for _ in range(2):
        model = build_model(
            own_tables, Schema.numbered(1, 3), {"slots": [0, 2], "crosses": [[0, 1]]}
        )

    assert model.tables[0].slots == (0, 2)
    assert model.tables[0].crosses == ((0, 1),)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": [3]}, "'t' has slot 3, expected slots from 0 to 2"),
        ({"slots": [-1]}, "has slot -1"),
        ({"slots": [0], "crosses": [[0, 3]]}, "has slot 3"),
        ({"slots": []}, "neither slots nor crosses"),
        ({"names": ["a", "a"]}, "table 'a' occurs twice"),
        ({"optimizer": {"learning_rate": 0.1}}, "optimizer without a name"),
    ],
)
def test_tables_that_cannot_be_looked_up_are_refused(
    own_tables: str, options: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(own_tables, Schema.numbered(1, 3), options)


@pytest.mark.parametrize("name", ["fm", "ctr_dnn", "wide_deep", "deepfm", "dcn_v2"])
def test_embeddings_start_in_the_range_that_is_asked_for(name: str) -> None:
    model = build_model(name, Schema.numbered(1, 3), {"init_range": 0.25})

    assert 0.25 in {table.init_range for table in model.tables}


WITHOUT_TORCH = """
import importlib, sys
sys.modules["torch"] = None  # as where it is not installed
from ctr_ps.ctr_model.registry import build_model, with_compute
from ctr_ps.ctr_model.schema import criteo_schema
model = build_model("ctr_dnn", criteo_schema(), {})
try:
    build_model("examples/torch_wide_deep.py:WideDeep", criteo_schema(), {})
except ValueError as error:
    print(error)
try:
    with_compute(model, "bfloat16")
except ValueError as error:
    print(error)
for needing in sys.argv[1:]:
    try:
        importlib.import_module(needing)
    except ModuleNotFoundError as error:
        assert error.name == "torch"
        print(error)
"""


def test_what_needs_pytorch_says_which_extra_to_install() -> None:
    modules = ["ctr_ps.ctr_model.torch", "ctr_ps.ps_worker.torch"]
    modules += ["examples.torch_ddp", "examples.heter_wide_deep"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *modules], capture_output=True, text=True, check=False
    )

    needs = "needs PyTorch, which is not installed: pip install 'ctr-ps[torch]'"
    assert done.stdout.splitlines() == [
        f"model 'examples/torch_wide_deep.py:WideDeep': 'examples/torch_wide_deep.py' {needs}",
        f"bfloat16 {needs}",
        *[f"ctr_ps.ctr_model.torch {needs}" for _ in modules],
    ]


ALL_MODULES = """
import importlib, importlib.util, sys
from tests.import_map import modules
extras = {"torch", "device_pass"}
if importlib.util.find_spec("ray") is None:
    extras.add("ray_engine")
for module in modules():
    if not extras & set(module.split(".")):
        importlib.import_module(module)
assert "torch" not in sys.modules
"""


def test_nothing_imports_pytorch_without_need() -> None:
    subprocess.run([sys.executable, "-c", ALL_MODULES], check=True)
