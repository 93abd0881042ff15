"""Layers of the zoo compute what published packages do with the same weights."""

import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest.mock import MagicMock

import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")

from torch import Tensor, nn  # noqa: E402

from ctr_ps.ctr_model.registry import build_model  # noqa: E402
from ctr_ps.ctr_model.schema import Schema  # noqa: E402
from ctr_ps.ctr_model.torch import Batch  # noqa: E402
from ctr_ps.ctr_model.torch.batch import Rows  # noqa: E402
from tests.support.needs import lacking  # noqa: E402

B, T, D = 7, 3, 4
HISTORY = Schema(dense=(), slots=("item", "history"), shares={"history": "item"})


NOT_NEEDED = ("h5py", "fuxictr.preprocess.build_dataset", "deepctr_torch.utils")
"""Modules that they import for files of theirs; the last one asks PyPI for a newer version."""


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Returns a module of a package that is only there to be compared with."""
    for each in NOT_NEEDED:
        if each not in sys.modules:
            monkeypatch.setitem(sys.modules, each, MagicMock())

    def module(name: str) -> Any:
        package = name.partition(".")[0]
        if find_spec(package) is None:
            lacking(f"needs {package}, of torch-rechub, deepctr-torch or fuxictr")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return import_module(name)

    return module


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(3)


def module_of(name: str, schema: Schema, **options: Any) -> Any:
    """Returns a module with random parameters, whose embeddings know their slots."""
    module = build_model(name, schema, options).workspace(1).module
    for parameter in module.parameters():
        parameter.data = 0.5 * torch.randn(parameter.shape)
    return module.eval()


def copy(layer: nn.Module, other: nn.Module) -> None:
    """Copies a linear layer of the zoo, or with weights [in, out], to one of another package."""
    weight = layer.weight if layer.weight.shape == other.weight.shape else layer.weight.mT
    other.weight.data, other.bias.data = weight.data.clone(), layer.bias.data.clone()


def batch_of(rows: Tensor, counts: list[int]) -> Batch:
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    own = Rows(weights=rows, inverse=None, offsets=offsets, num_slots=len(counts) // B)
    return Batch(dense=torch.empty(B, 0), labels=None, rows={"embedding": own})


def test_attention_of_auto_int_is_that_of_deepctr_torch(published: Callable[[str], Any]) -> None:
    layers = published("deepctr_torch.layers")
    model = module_of("auto_int", Schema.numbered(0, 5), dim=D, layers=1, heads=2, head_dim=D // 2)
    own = model.layers[0]
    theirs = layers.InteractingLayer(D, head_num=2)
    theirs.W_Query.data, theirs.W_key.data = own.query.weight.data.T, own.key.weight.data.T
    theirs.W_Value.data, theirs.W_Res.data = own.value.weight.data.T, own.residual.weight.data.T
    x = torch.randn(B, 5, D)

    torch.testing.assert_close(own(x), theirs(x))


def test_interest_of_din_is_that_of_deepctr_torch(published: Callable[[str], Any]) -> None:
    """Its weights do not start at 1, and it has the target before the key."""
    layers = published("deepctr_torch.layers.sequence")
    din = module_of("din", HISTORY, dim=D, hidden=[2 * D], attention_hidden=[5])
    theirs = layers.AttentionSequencePoolingLayer([5], "relu", embedding_dim=D)
    first, last = din.attention.history.children()
    copy(first, theirs.local_att.dnn.linears[0])
    copy(last, theirs.local_att.dense)
    h, t, difference, product = first.weight.data.T.split(D, dim=1)
    theirs.local_att.dnn.linears[0].weight.data = torch.cat([t, h, -difference, product], dim=1)
    theirs.local_att.dense.bias.data += 1
    din.fc1.weight.data, din.fc1.bias.data = torch.eye(2 * D), torch.full((2 * D,), 100.0)
    din.fc2.weight.data[:D] = 0
    lengths = torch.tensor([3, 1, 2, 0, 3, 1, 2])
    rows = torch.randn(B + int(lengths.sum()), D)
    counts = [count for length in lengths.tolist() for count in (1, length)]
    batch = batch_of(rows, counts)
    target = batch.rows["embedding"].weights[batch.rows["embedding"].offsets[:-1:2].long()]
    _, _, history, _ = next(din.inputs.histories(batch))

    expected = theirs(target.unsqueeze(1), history, lengths.unsqueeze(1)).squeeze(1) + 100.0
    torch.testing.assert_close(din(batch), expected @ din.fc2.weight[D:] + din.fc2.bias)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_bst_is_that_of_torch_rechub(published: Callable[[str], Any]) -> None:
    """It numbers positions from the first key on, and has batch norm, which does nothing at the start.

    Its layers normalize after each sum by default.
    """
    models, features = (
        published("torch_rechub.models.ranking.bst"),
        published("torch_rechub.basic.features"),
    )
    own = module_of("bst", HISTORY, dim=D, hidden=[6], feed_forward=2048, layers=2, max_length=T)
    item = features.SparseFeature("item", vocab_size=50, embed_dim=D, padding_idx=0)
    history = features.SequenceFeature(
        "history", vocab_size=50, embed_dim=D, pooling="concat", shared_with="item", padding_idx=0
    )
    user = features.DenseFeature("user")
    theirs = models.BST(
        [user],
        [history],
        [item],
        {"dims": [6]},
        nhead=2,
        dropout=0,
        num_layers=2,
        max_seq_len=T + 1,
    ).eval()
    for layer, other in zip(own.transformers[0], theirs.transformer_layers.layers, strict=True):
        other.load_state_dict(layer.state_dict())
        other.norm_first = True
    positions = own.positions[0].data
    theirs.pos_embedding.weight.data = torch.cat([positions[:T].flip(0), positions[T:]])
    copy(own.mlp.out, theirs.mlp.mlp[-1])
    copy(own.mlp.hidden[0], theirs.mlp.mlp[0])
    t, h = own.mlp.hidden[0].weight.data.split(D, dim=1)
    theirs.mlp.mlp[0].weight.data = torch.cat([h, t, torch.zeros(6, 1)], dim=1)
    keys = torch.randint(1, 50, (B, 1 + T))
    table = theirs.embedding.embed_dict["item"].weight

    found = own(batch_of(table[keys].flatten(0, 1), [1, T] * B)).sigmoid().squeeze(1)

    expected = theirs({"item": keys[:, 0], "history": keys[:, 1:], "user": torch.zeros(B)})
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_final_mlp_is_made_of_the_layers_of_fuxictr(published: Callable[[str], Any]) -> None:
    layers = published("model_zoo.LongCTR.FinalMLP.FinalMLP")
    own = module_of("final_mlp", Schema.numbered(0, 3), dim=D, hidden=[6], gate_hidden=[5])
    select = layers.FeatureSelection(None, 3 * D, D, [5])
    for k, gate in enumerate(own.gates, start=1):
        getattr(select, f"fs{k}_ctx_bias").data = gate.constant.data
        first, _, last, _ = getattr(select, f"fs{k}_gate").mlp
        copy(gate.mlp.hidden[0], first)
        copy(gate.mlp.out, last)
    aggregate = layers.InteractionAggregation(6, 6, num_heads=2)
    of_first, of_second = own.out.weight.data.split(6, dim=1)
    aggregate.w_x.weight.data, aggregate.w_y.weight.data = of_first, of_second
    aggregate.w_x.bias.data, aggregate.w_y.bias.data = own.out.bias.data, torch.zeros(1)
    aggregate.w_xy.data = own.products.data.reshape(-1, 1)
    batch = batch_of(torch.randn(3 * B, D), [1] * 3 * B)

    selected = select(None, own.fields(batch).flatten(1))
    expected = aggregate(*(mlp(each) for mlp, each in zip(own.streams, selected, strict=True)))
    torch.testing.assert_close(own(batch), expected.squeeze(1))
