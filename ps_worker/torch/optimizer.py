"""The optimizer of rows in a training loop: it pushes, and the store applies each table's optimizer."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ctr_ps.ps_worker.torch.gradients import leaf_with
from ctr_ps.ps_worker.torch.tables import Tables


class PushOptimizer:
    """Has the methods of a torch.optim.Optimizer; its parameters are the looked-up rows.

    Learning rates and schedules are those of `open_tables`: no learning rate scheduler works on it.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def step(self, closure: Callable[[], object] | None = None) -> object:
        """Pushes the gradients since the last step, summed by key; see `Tables.push`.

        `closure` is called first, with gradients enabled; its result is returned.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        self._tables.push()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients since the last step; `set_to_none` has no effect."""
        self._tables.pending.clear()

    def rows(self) -> list[Tensor]:
        """Returns a tensor per table whose `.grad` float32[N, D] is the waiting gradient.

        Writes to `.grad` change the push. So all gradients are clipped together by
        `torch.nn.utils.clip_grad_norm_([*model.parameters(), *optimizer.rows()], 1.0)`. The tensors have no
        values, and are valid until the next backward().
        """
        return [leaf_with(grad) for grad in self._tables.pending.merged().values()]

    def state_dict(self) -> dict[str, object]:
        """Returns the names of the tables and of the checkpoint of their rows and optimizer state.

        Raises UsageError after steps since the last `Tables.save` or `load`.
        """
        return self._tables.state()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Checks that the rows are those of the state's checkpoint, which `Tables.load` has read.

        Raises CheckpointError for other rows or tables.
        """
        self._tables.require_state(state)
