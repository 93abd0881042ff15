"""The cut of a module: layers before it run beside the rows, the rest may run elsewhere.

    batch, rows --fronts--> their outputs | the rest of the module --> loss

Embeddings are fronts. So is a user's class that derives from `Front`: its output then crosses the cut in
place of that of the embeddings inside it.
"""

from torch import nn


class Front(nn.Module):
    """A layer before the cut: called with the batch only, without dense parameters.

    `forward(batch)` returns a tensor, or a tuple of at least two, each [B, ...]. Gradients flow through
    float32.
    """


def fronts_of(module: nn.Module) -> dict[str, Front]:
    """Returns the layers before the cut by name, without nested ones.

    Raises ValueError if one has dense parameters, or nothing is behind the cut.
    """
    found: dict[str, Front] = {}
    for name, layer in module.named_modules():  # those inside a layer come after it
        if isinstance(layer, Front) and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = layer
    of = type(module).__name__
    if "" in found:
        raise ValueError(f"{of} is a front as a whole, so nothing of it can run elsewhere")
    for name, front in found.items():
        if owned := [each for each, _ in front.named_parameters()]:
            raise ValueError(
                f"{of}: {name} is before the cut and has the dense parameters {owned}, which are trained "
                f"behind it: move them out of the {type(front).__name__}"
            )
    return found
