"""Factorization machines: FM, and DeepFM with a multilayer perceptron over the same embeddings.

    sigmoid(first-order part + pairs)                    FM
    sigmoid(first-order part + pairs + perceptron)       DeepFM; see summed.py

Rendle, "Factorization machines", ICDM 2010. Guo, Tang, Ye, Li and He, "DeepFM: a factorization-machine based
neural network for CTR prediction", IJCAI 2017.
"""

from collections.abc import Mapping, Sequence

from ctr_ps.ctr_model.layers.pooling import (
    PooledSlots,
    Pooling,
    SlotOptions,
    require_range,
    require_widths,
)
from ctr_ps.ctr_model.models.model import EmbeddingTable, keeps_origin
from ctr_ps.ctr_model.models.summed import SummedModel
from ctr_ps.ctr_model.schema import Schema

_LINEAR = EmbeddingTable(name="linear", dim=1)


@keeps_origin
class Fm(SummedModel):
    """A factorization machine."""

    refused_options = dict.fromkeys(
        ("pooling", "slots"),
        "it multiplies the embeddings of all pairs of keys, so nothing is pooled and all slots have one dim",
    )

    def __init__(self, schema: Schema, *, dim: int = 10, init_range: float = 0.01) -> None:
        """Builds the model; raises ValueError if the width is less than 1, or the range negative."""
        require_widths(dim=dim)
        require_range(init_range)
        embedding = EmbeddingTable(name="embedding", dim=dim, init_range=init_range)
        super().__init__(schema, linear=_LINEAR, pairs=embedding)


@keeps_origin
class DeepFm(SummedModel):
    """DeepFM."""

    def __init__(
        self,
        schema: Schema,
        *,
        dim: int = 10,
        hidden: Sequence[int] = (400, 400, 400),
        init_range: float = 0.01,
        pooling: Pooling = "sum",
        slots: Mapping[str, SlotOptions] = {},
    ) -> None:
        """Builds the network; options and errors as for `CtrDnn`, but `slots` may set `pooling` only."""
        x = PooledSlots(schema, dim=dim, init_range=init_range, pooling=pooling, slots=slots)
        for name, options in slots.items():
            if options.get("dim", dim) != dim:
                raise ValueError(
                    f"slots.{name}.dim is {options['dim']}, but the factorization machine multiplies the "
                    f"embeddings of all slots, so all must have dim = {dim}"
                )
        super().__init__(schema, linear=_LINEAR, pairs=x.tables[0], x=x, hidden=hidden)
