"""The tables of a module: its embeddings, grouped by table."""

from collections.abc import Sequence

from torch import nn

from ctr_ps.ctr_model.models.model import EmbeddingTable
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.ctr_model.torch.embedding import SlotEmbedding

_NO_SLOT = -1
DENSE = "dense"


def name_tables(module: nn.Module) -> None:
    """Names the table of each embedding without one after its place in the module."""
    for name, embedding in _embeddings(module):
        embedding.table = embedding.table or name.replace(".", "_")
        if embedding.table == DENSE:
            raise ValueError(
                f"a table cannot be called {DENSE!r}, as the dense parameters are: give it a name by table="
            )


def tables_of(module: nn.Module, schema: Schema) -> tuple[EmbeddingTable, ...]:
    """Returns the tables of a module, and assigns its embeddings their parts.

    Raises ValueError for an unknown slot, or embeddings that disagree about a shared table.
    """
    shared: dict[str, list[SlotEmbedding]] = {}
    for _, embedding in _embeddings(module):
        shared.setdefault(embedding.table or "", []).append(embedding)
    return tuple(_table(name, each, schema) for name, each in shared.items())


def _embeddings(module: nn.Module) -> list[tuple[str, SlotEmbedding]]:
    return [
        (name or "embedding", each)
        for name, each in module.named_modules()
        if isinstance(each, SlotEmbedding)
    ]


def _table(name: str, embeddings: Sequence[SlotEmbedding], schema: Schema) -> EmbeddingTable:
    first = embeddings[0]
    for other in embeddings[1:]:
        for what in ("dim", "init_range", "optimizer"):
            ours, theirs = getattr(first, what), getattr(other, what)
            if ours != theirs:
                raise ValueError(
                    f"embeddings of table {name!r} have {what} {ours!r} and {theirs!r}, expected the same"
                )
    sources = [embedding.sources(schema) for embedding in embeddings]
    union = sorted(
        dict.fromkeys(source for each in sources for source in each),
        key=lambda source: source[1] != _NO_SLOT,  # crosses come behind the slots
    )
    for embedding, own in zip(embeddings, sources, strict=True):
        embedding.take_part(name, None if own == union else [union.index(each) for each in own])
    plain = tuple(slot for slot, second in union if second == _NO_SLOT)
    return EmbeddingTable(
        name=name,
        dim=first.dim,
        init_range=first.init_range,
        slots=None if plain == tuple(range(len(schema.slots))) else plain,
        crosses=tuple(source for source in union if source[1] != _NO_SLOT),
        optimizer=first.optimizer,
    )
