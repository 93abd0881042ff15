"""Embeddings of torch.nn in anybody's module, moved into tables and back.

    swap_embeddings(module) --> tables.attach(module) --> training --> restore_embeddings(module)
    weights stay in memory      worker 0 writes them      in tables     weights again, with the trained rows

An embedding stays the same object with the same parameter, of another class: so references to it elsewhere,
hooks and optimizers stay valid.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ctr_ps.ctr_model.parameters import EmbeddingTable
from ctr_ps.protos.errors import UsageError
from ctr_ps.ps_worker.torch.embedding import Embedding, EmbeddingBag

_OURS = {nn.Embedding: Embedding, nn.EmbeddingBag: EmbeddingBag}
_OF_INIT = {"__init__", "reset_parameters", "extra_repr"}  # methods that a subclass may lose


def swap_embeddings(module: nn.Module, tables: Mapping[str, str] | None = None) -> nn.Module:
    """Turns each nn.Embedding and nn.EmbeddingBag of a module, in place, into one with rows in a table.

    `Tables.attach` then writes the weights into the tables, row i as that of key i, and empties them; so the
    module computes what it did. Keys beyond the weight are refused. Embeddings of one weight share one table.

    Args:
        module: Any module; it is returned.
        tables: Name of the table of each embedding, by its path among the module's attributes, such as
            {"user.embedding": "users"}; others stay as they are. None: all of them, named by their paths.

    Raises:
        UsageError: If an embedding has no counterpart, its weight is used elsewhere too, or names are
            unknown or do not fit. Nothing was changed.
    """
    found: dict[str, Any] = {
        path or "embedding": each
        for path, each in module.named_modules(remove_duplicate=False)
        if isinstance(each, tuple(_OURS))
    }
    unknown = sorted((tables or {}).keys() - found.keys())
    if unknown or not found:
        where = ".".join([type(module).__name__, *unknown[:1]])
        raise UsageError(f"{where} is or has no embedding of torch.nn, only {list(found)}")
    chosen = {path: each for path, each in found.items() if tables is None or path in tables}
    names: dict[nn.Parameter, str] = {}  # of tables, by weight
    for path, each in chosen.items():
        _require_counterpart(path, each)
        first = names.get(each.weight, re.sub("[^A-Za-z0-9_.-]", "_", path)[-100:])
        name = first if tables is None else tables[path]
        if names.setdefault(each.weight, name) != name:
            raise UsageError(f"{path} would be in {name!r}, its weight in {names[each.weight]!r}")
    if len(set(names.values())) < len(names):
        raise UsageError(f"tables is {tables}, expected a table of its own for each weight")
    for path, each in module.named_modules():
        for own, parameter in each.named_parameters(recurse=False):
            if parameter in names and each not in chosen.values():
                raise UsageError(
                    f"the weight in {names[parameter]!r} is also {path}.{own}, which cannot be in a table: "
                    "untie them, or leave the embedding out by tables="
                )
    for each in chosen.values():
        if type(each) not in _OURS.values():  # else it was at another path
            spec = EmbeddingTable(name=names[each.weight], dim=each.embedding_dim, init_range=0.0)
            each.spec, each.tables, each.plain = spec, None, type(each)
            each.__class__ = next(_OURS[kind] for kind in _OURS if isinstance(each, kind))
    return module


def _require_counterpart(path: str, embedding: Any) -> None:
    for option in ("max_norm", "scale_grad_by_freq"):
        if value := getattr(embedding, option):
            raise UsageError(f"{path} has {option} = {value}: leave it out by tables=, or unset it")
    base = next(each for each in _OURS if isinstance(embedding, each))
    below = type(embedding).__mro__[: type(embedding).__mro__.index(base)]
    own = {name for each in below for name, value in vars(each).items() if callable(value)}
    forward = getattr(embedding.forward, "__func__", None)
    is_same = forward is base.forward and not any(hasattr(base, name) for name in own - _OF_INIT)
    if not is_same or "weight" not in embedding._parameters:
        kind = type(embedding).__name__
        raise UsageError(f"{path}, a {kind}, looks up in a way of its own: leave it out by tables=")


def restore_embeddings(module: nn.Module) -> nn.Module:
    """Turns swapped embeddings back, in place, with the rows as weights, and returns the module.

    So it can be exported, or saved as torch.nn does. To train on, restore a `copy.deepcopy`.

    Raises UsageError if none is swapped, or one is not attached; nothing was changed.
    """
    swapped = [each for each in module.modules() if isinstance(each, Embedding) and each.plain]
    if not swapped:
        raise UsageError(f"{type(module).__name__} has no embedding of swap_embeddings")
    if any(each.tables is None for each in swapped):
        raise UsageError("the swapped embeddings are not attached: call attach(module) first")
    with torch.no_grad():
        rows = {each.parameter: each.weight.clone() for each in swapped}
    for each in swapped:
        each.__class__ = each.plain  # type: ignore[assignment]  # as it has been
        each.weight.data, each.weight.grad = rows[each.weight], None
        del each.spec, each.tables, each.plain
    return module
