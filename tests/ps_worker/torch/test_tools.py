"""Tools of PyTorch around a module and its optimizer work on tables, or are refused in a sentence."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")

from torch.optim import lr_scheduler  # noqa: E402

from ctr_ps.protos.errors import UsageError  # noqa: E402
from ctr_ps.ps_worker.torch import Embedding, PushOptimizer, Tables, open_tables  # noqa: E402
from tests.support.torch_loop import on_cluster  # noqa: E402

KEYS = torch.tensor([3, 5])


class Opened:
    """A net in tables with SGD of rate 1, and its optimizer."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.net = torch.nn.Sequential(Embedding(2, table="items"), torch.nn.Linear(2, 1))
        tables.attach(self.net)
        self.rows = PushOptimizer(tables)

    def loss(self) -> Any:
        return self.net(KEYS).sum()

    def weights(self) -> Any:
        return self.net[0](KEYS).detach().clone()


@pytest.fixture
def opened() -> Iterator[Opened]:
    with open_tables(optimizer={"name": "sgd", "learning_rate": 1.0}) as tables:
        yield Opened(tables)


@pytest.mark.parametrize("is_unscaled_first", [False, True])
def test_grad_scaler_unscales_rows_and_skips_a_step_that_is_not_finite(
    opened: Opened, is_unscaled_first: bool
) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = opened.weights()

    scaler.scale(opened.loss()).backward()
    if is_unscaled_first:
        scaler.unscale_(opened.rows)
        torch.nn.utils.clip_grad_norm_(opened.rows.param_groups[0]["params"], 1e-3)
    scaler.step(opened.rows)
    scaler.update()
    after = opened.weights()
    gradient = opened.net[1].weight.detach().expand(2, 2) / 1.0  # of each row
    if is_unscaled_first:
        gradient = gradient * (1e-3 / gradient.norm())
    torch.testing.assert_close(after, before - gradient, rtol=1e-4, atol=1e-7)

    scaler.scale(opened.loss() * float("inf")).backward()
    scaler.step(opened.rows)
    scaler.update()
    opened.rows.zero_grad()

    assert torch.equal(opened.weights(), after)
    assert scaler.get_scale() == 512.0


def test_grad_scaler_skips_the_rows_of_one_worker_and_not_its_step() -> None:
    """SGD of rate 1 on the mean over two workers, of which one overflows in the second of three steps."""
    rows_of: dict[int, Any] = {}
    scales: dict[int, float] = {}

    def work(tables: Tables) -> None:
        module = Embedding(2, table="items", init_range=0.0)
        tables.attach(module)
        rows, scaler = PushOptimizer(tables), torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(3):
            factor = float("inf") if (step, tables.worker) == (1, 0) else 2.0**tables.worker
            scaler.scale(module(KEYS[:1]).sum() * factor).backward()
            scaler.step(rows)
            scaler.update()
            assert tables.version == step + 1
        rows_of[tables.worker] = module(KEYS[:1]).detach()
        scales[tables.worker] = scaler.get_scale()

    on_cluster(work, optimizer={"name": "sgd", "learning_rate": 1.0})

    expected = torch.full((1, 2), -((1 + 2) / 2 + (0 + 2) / 2 + (1 + 2) / 2))
    assert torch.equal(rows_of[0], expected)
    assert torch.equal(rows_of[1], expected)
    assert scales == {0: 512.0, 1: 1024.0}


def test_grad_scaler_steps_without_gradients_of_rows(opened: Opened) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(opened.net[1](torch.ones(1, 2)).sum()).backward()

    scaler.step(opened.rows)
    scaler.update()

    assert opened.tables.version == 1
    assert scaler.get_scale() == 1024.0


def test_grad_scaler_divides_once_though_a_step_is_refused_and_repeated(opened: Opened) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = opened.weights()
    scaler.scale(opened.net[0](KEYS).sum()).backward()
    with pytest.raises(UsageError, match="key 9 of table 'items', which has no gradient"):
        scaler.step(opened.rows, clicked={"items": torch.tensor([9])})

    scaler.step(opened.rows)

    assert torch.equal(opened.weights(), before - 1.0)


def test_learning_rate_of_a_group_is_refused(opened: Opened) -> None:
    for group in opened.rows.param_groups:
        with pytest.raises(UsageError, match=r"no 'lr': .* schedule is open_tables\(schedule="):
            group["lr"] = 0.5


SCHEDULERS: dict[str, Callable[[Any], object]] = {
    "step": lambda rows: lr_scheduler.StepLR(rows, 1),
    "plateau": lr_scheduler.ReduceLROnPlateau,
    "lambda": lambda rows: lr_scheduler.LambdaLR(rows, lambda step: 0.5),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduler_of_torch_is_refused_with_the_setting_that_tables_have(
    opened: Opened, name: str
) -> None:
    with pytest.raises(UsageError, match=r"schedule is open_tables\(schedule="):
        SCHEDULERS[name](opened.rows)


def test_push_optimizer_is_one_of_torch_without_parameters_of_others(opened: Opened) -> None:
    assert isinstance(opened.rows, torch.optim.Optimizer)
    steps = []
    opened.rows.register_step_post_hook(lambda *_: steps.append(opened.tables.version))

    with pytest.raises(UsageError, match="takes no parameters: give them to"):
        opened.rows.add_param_group({"params": list(opened.net.parameters())})
    opened.loss().backward()
    opened.rows.step()

    assert steps == [1]
    assert "PushOptimizer" in repr(opened.rows)


def test_autocast_computes_behind_rows_of_float32(opened: Opened) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert opened.net[0](KEYS).dtype == torch.float32
        loss = opened.loss()
    assert loss.dtype == torch.bfloat16
    before = opened.weights()

    loss.backward()
    opened.rows.step()

    assert not torch.equal(opened.weights(), before)


@pytest.mark.parametrize("call", ["fullgraph", "export"])
def test_graph_without_a_break_is_refused_with_the_way_out(opened: Opened, call: str) -> None:
    if call == "export":
        with pytest.raises(UsageError, match=r"cannot be traced.*restore_embeddings"):
            torch.export.export(opened.net, (KEYS,))
        return
    compiled = torch.compile(opened.net, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="rows are in a table: compile without fullgraph=True"):
        compiled(KEYS)


@pytest.mark.slow  # a C++ compiler runs
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_code_has_the_same_gradients(opened: Opened, mode: str) -> None:
    inductor = pytest.importorskip("torch._inductor.config")
    gradients = []
    with inductor.patch(compile_threads=1):  # no processes that outlive the test
        for net in (opened.net, torch.compile(opened.net, mode=mode)):
            net(KEYS).sum().backward()
            gradients.append([each.grad.clone() for each in opened.rows.rows()])
            opened.rows.zero_grad()

    torch.testing.assert_close(*gradients)
