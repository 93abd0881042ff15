"""The optimizer of rows as a training loop sees it: it pushes, and the store applies that of each table."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ps_worker.torch.gradients import leaf_with
from ps_worker.torch.tables import Tables


class PushOptimizer:
    """Has the methods of a torch.optim.Optimizer; its parameters are the rows that were looked up.

    Learning rates are those of the tables, so no learning rate scheduler works on it; their schedule is that
    of `open_tables`.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def step(self, closure: Callable[[], object] | None = None) -> object:
        """Pushes the gradients since the last step, each key's summed, once; see `Tables.push`.

        Args:
            closure: Called first, with gradients enabled; its result is returned.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        self._tables.push()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients since the last step; `set_to_none` is there for its callers."""
        self._tables.pending.clear()

    def rows(self) -> list[Tensor]:
        """Returns tensors whose `.grad` float32[N, D] are the gradients that wait, one for each table.

        What is written to `.grad` in place is pushed. So all gradients are clipped together by
        `torch.nn.utils.clip_grad_norm_([*model.parameters(), *optimizer.rows()], 1.0)`. The tensors have no
        other use: they hold no weights, and are good until the next backward().
        """
        return [leaf_with(grad) for grad in self._tables.pending.merged().values()]

    def state_dict(self) -> dict[str, object]:
        """Returns the names of the tables and of the checkpoint that has their rows and optimizer state.

        Raises:
            UsageError: If there were steps since the last `Tables.save` or `load`.
        """
        return self._tables.state()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Checks that the rows are those of the state's checkpoint, which `Tables.load` has read.

        Raises:
            CheckpointError: If they are of another one, or the tables are others.
        """
        self._tables.require_state(state)
