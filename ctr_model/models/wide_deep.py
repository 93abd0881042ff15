"""Logistic regression, alone (LR) and beside a multilayer perceptron (wide & deep).

    sigmoid(first-order part)                                     LR
    sigmoid(first-order part + perceptron)                        wide & deep; see summed.py

Only wide & deep has crosses, and keeps the table of weights sparse by FTRL; its deep part has embeddings in a
table of its own. Both parts are trained jointly.

Cheng et al., "Wide & deep learning for recommender systems", DLRS 2016. As there, the wide part covers
categorical features and crosses; in PaddlePaddle's examples it only covers the numbers.
"""

from collections.abc import Mapping, Sequence

from ctr_ps.ctr_model.layers.pooling import PooledSlots, Pooling, SlotOptions
from ctr_ps.ctr_model.models.model import EmbeddingTable, keeps_origin
from ctr_ps.ctr_model.models.summed import SummedModel
from ctr_ps.ctr_model.schema import Schema


@keeps_origin
class LogisticRegression(SummedModel):
    """Logistic regression."""

    refused_options = dict.fromkeys(
        ("pooling", "slots"), "it has one weight for each key, and adds the weights of all keys"
    )

    def __init__(self, schema: Schema) -> None:
        super().__init__(schema, linear=EmbeddingTable(name="linear", dim=1, learning_rate=0.1))


# Gradients are means over a batch, so this `beta` corresponds to 1 in the formula with sums for batches of
# about 30 examples; larger batches need smaller `beta` and `l1`.
_WIDE_OPTIMIZER: Mapping[str, str | float] = {
    "name": "ftrl",
    "learning_rate": 0.1,
    "beta": 0.03,
    "l1": 0.01,
}


@keeps_origin
class WideDeep(SummedModel):
    """Wide & deep."""

    def __init__(
        self,
        schema: Schema,
        *,
        dim: int = 10,
        hidden: Sequence[int] = (400, 400, 400),
        init_range: float = 0.01,
        pooling: Pooling = "sum",
        slots: Mapping[str, SlotOptions] = {},
        crosses: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Builds the network; `crosses` are pairs of slots in the wide part, other options as in `CtrDnn`."""
        x = PooledSlots(schema, dim=dim, init_range=init_range, pooling=pooling, slots=slots)
        pairs = tuple(
            (schema.slot_index(a, where="crosses"), schema.slot_index(b, where="crosses"))
            for a, b in crosses
        )
        wide = EmbeddingTable(name="wide", dim=1, crosses=pairs, optimizer=_WIDE_OPTIMIZER)
        super().__init__(schema, linear=wide, x=x, hidden=hidden)
