"""Faults of a model of the user's own are errors with shapes, never a wrong gradient."""

from typing import Any

import numpy as np
import pytest

from ctr_ps.ctr_model.models.click_model import ClickModel
from ctr_ps.ctr_model.models.ctr_dnn import CtrDnn
from ctr_ps.ctr_model.models.model import StepResult
from ctr_ps.ctr_model.parameters import EmbeddingTable, ModelInputError, Segment
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.job import Job
from tests.support.model_cases import SCHEMA, ModelCase
from tests.support.training import worker_run


class Own(ClickModel):
    """z = dense w, with a table that is not used, and one fault."""

    def __init__(self, schema: Any, *, fault: str = "") -> None:
        self.fault = fault
        super().__init__(
            schema,
            tables=[EmbeddingTable(name="items", dim=2)],
            segments=[Segment(name="w", shape=(schema.num_dense,), init_std=0.1)],
        )

    def forward(self, tensors: Any, batch: Any, lookups: Any, buffers: Any, logits: Any) -> None:
        if self.fault == "shapes":
            logits[:] = batch.dense @ tensors[0][:2]
        elif self.fault == "broadcast":
            logits[:] = batch.dense * tensors[0]
        elif self.fault == "no logits":
            logits = batch.dense @ tensors[0]
        elif self.fault == "last logit":
            logits[:-1] = (batch.dense @ tensors[0])[:-1]
        elif self.fault == "name":
            logits[:] = lookups["item"].rows.sum()
        else:
            logits[:] = batch.dense @ tensors[0]

    def backward(
        self,
        tensors: Any,
        batch: Any,
        lookups: Any,
        buffers: Any,
        logit_grad: Any,
        tensor_grads: Any,
        sparse_grads: Any,
    ) -> None:
        grad = batch.dense.T @ logit_grad
        if self.fault == "rebound tensor":
            tensor_grads[0] = grad
        elif self.fault == "added to":
            tensor_grads[0][:] += grad
        elif self.fault == "wrong tensor":
            tensor_grads[0][:] = grad[:2]
        else:
            tensor_grads[0][:] = grad
        if self.fault == "rebound table":
            sparse_grads["items"] = np.zeros_like(lookups["items"].rows)
        elif self.fault != "no table":
            sparse_grads["items"][:] = 0


def case_of(fault: str) -> ModelCase:
    return ModelCase(Own(SCHEMA, fault=fault), SCHEMA, seed=1)


SHAPES = r"its arguments were 5 examples, dense .*, table 'items' with rows \[\d+, 2\] of 4 slots, w \[3\]$"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            "shapes",
            rf"forward failed in .*test_own_models.py, line \d+: ValueError: matmul.*; {SHAPES}",
        ),
        ("broadcast", rf"forward failed .*: ValueError: could not broadcast .* {SHAPES}"),
        ("name", rf"forward failed .*: KeyError: 'item'; {SHAPES}"),
        ("no logits", r"forward did not write 5 of 5 numbers of the logits, float32\[5\]"),
        ("last logit", r"forward did not write 1 of 5 numbers of the logits"),
        ("rebound tensor", rf"backward failed .*TypeError: 'tuple' object does not .* {SHAPES}"),
        (
            "added to",
            r"backward did not write 3 of 3 numbers of the gradient of w, float32\[3\]",
        ),
        ("wrong tensor", rf"backward failed .*: ValueError: could not broadcast .* {SHAPES}"),
        ("rebound table", rf"backward failed .*TypeError: 'mappingproxy' object does .* {SHAPES}"),
        (
            "no table",
            r"backward did not write \d+ of \d+ numbers of the gradient of table 'items', float32",
        ),
    ],
)
def test_a_fault_says_where_it_is_and_of_which_shapes(fault: str, message: str) -> None:
    with pytest.raises(ModelInputError, match=message):
        case_of(fault).gradient()


def test_prediction_says_the_same() -> None:
    with pytest.raises(ModelInputError, match=rf"forward failed .* {SHAPES}"):
        case_of("shapes").predict()


def test_a_fault_of_this_package_is_not_the_users() -> None:
    case = ModelCase(CtrDnn(SCHEMA, dim=2, hidden=[4]), SCHEMA, seed=1)
    case.model._mlp.forward = None  # type: ignore[attr-defined]

    with pytest.raises(TypeError):
        case.gradient()


class Plain:
    """A model that does not derive from `ClickModel`."""

    tables = (EmbeddingTable(name="items", dim=1),)
    segments = ()
    num_params = 0

    def __init__(self, returned: Any) -> None:
        self.returned = returned

    def workspace(self, max_batch_size: int) -> Any:
        return type("Workspace", (), {"max_batch_size": max_batch_size})

    def predict(self, params: Any, batch: Any, lookups: Any, workspace: Any) -> Any:
        return self.returned(batch)

    def gradient(self, params: Any, batch: Any, lookups: Any, *others: Any) -> Any:
        return self.returned(batch)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda _: 0.5, "gradient returned a float, expected StepResult"),
        (
            lambda batch: StepResult(0.5, np.zeros(batch.size)),
            r"gradient returned probabilities as float64\[5\], expected float32\[5\] for a batch of 5",
        ),
        (
            lambda batch: StepResult(0.5, np.zeros((batch.size, 1), np.float32)),
            r"gradient returned probabilities as float32\[5, 1\], expected float32\[5\]",
        ),
        (lambda batch: np.zeros(3) + np.zeros(batch.size), "gradient failed in .*ValueError: oper"),
    ],
)
def test_what_a_class_of_ones_own_returns_is_checked(returned: Any, message: str) -> None:
    model: Any = Plain(returned)
    batch = case_of("").batch

    with (
        worker_run(ParameterStore(), model, Job()) as run,
        pytest.raises(ModelInputError, match=message),
    ):
        run.train([batch])


def test_predictions_of_another_shape_are_refused() -> None:
    model: Any = Plain(lambda batch: np.zeros((batch.size, 2), np.float32))

    with (
        worker_run(ParameterStore(), model, Job()) as run,
        pytest.raises(ModelInputError, match=r"predict returned probabilities as float32\[5, 2\]"),
    ):
        run.evaluate([case_of("").batch])


def test_a_module_of_pytorch_says_the_same() -> None:
    torch = pytest.importorskip(
        "torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'"
    )
    from ctr_ps.ctr_model.torch import SlotEmbedding, TorchModel

    class Net(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self, schema: Any) -> None:
            super().__init__()
            self.items = SlotEmbedding(["C1"], dim=2)
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, batch: Any) -> Any:
            return self.layer(self.items(batch).flatten(1))

    model = TorchModel(SCHEMA, Net)

    with (
        worker_run(ParameterStore(), model, Job()) as run,
        pytest.raises(
            ModelInputError, match=r"gradient failed in .*test_own_models.py, line \d+: Run"
        ),
    ):
        run.train([case_of("").batch])
