"""The optimizer of tables, in a loop that knows torch.optim."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ctr_ps.protos.errors import CheckpointError, UsageError
from ctr_ps.ps_worker.torch.tables import Tables


class _Group(dict[str, Any]):
    """The one parameter group; a learning rate scheduler looks for more in it."""

    def __setitem__(self, name: str, value: object) -> None:
        self.__missing__(name)

    def __missing__(self, name: str) -> None:
        raise UsageError(
            f"PushOptimizer has no {name!r}: learning rates of tables are those of open_tables, and their "
            "schedule is open_tables(schedule=...)"
        )


class PushOptimizer(torch.optim.Optimizer):
    """A torch.optim.Optimizer whose parameters are the looked-up rows that have a gradient.

    Learning rates and schedules are those of `open_tables`: no learning rate scheduler works on it.
    """

    # so a GradScaler calls step() also after an overflow, with `found_inf` and `grad_scale` set
    _step_supports_amp_scaling = True

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        super().__init__([{"params": []}], {})

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """One group, whose parameters are `rows()`: so a GradScaler finds the gradients."""
        nothing = torch.zeros(0, requires_grad=True)
        nothing.grad = torch.zeros(0)
        return [_Group(params=self.rows() or [nothing])]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        """Drops the groups of the base class."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises UsageError for any parameter."""
        if param_group["params"]:
            raise UsageError("PushOptimizer takes no parameters: give them to one of torch.optim")

    def step(
        self,
        closure: Callable[[], object] | None = None,
        *,
        clicked: Mapping[str, Tensor] | None = None,
    ) -> object:
        """Pushes the gradients since the last step, summed by key, and `clicked`; see `Tables.push`.

        `closure` is called first, with gradients enabled; its result is returned. A step that a GradScaler
        skips pushes no gradients, and drops them.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        scale = self.__dict__.get("grad_scale")  # None: they are unscaled already
        if float(self.__dict__.get("found_inf", 0.0)):
            self._tables.pending.clear()
            clicked = None
        try:
            self._tables.push(clicked=clicked, scale=1.0 if scale is None else float(scale))
        except BaseException:
            self.__dict__.pop("grad_scale", None)  # the scaler would multiply it
            self.__dict__.pop("found_inf", None)
            raise
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
        leaves = []
        for grad in self._tables.pending.merged().values():
            leaf = torch.zeros(()).expand(grad.values.shape).requires_grad_()
            leaf.grad = torch.from_numpy(grad.values)  # the same memory
            leaves.append(leaf)
        return leaves

    def state_dict(self) -> dict[str, object]:
        """Returns the names of the tables and of the checkpoint of their rows and optimizer state.

        Raises UsageError after steps since the last `Tables.save` or `load`.
        """
        tables = self._tables
        if tables._num_pushes != tables._pushes_saved:
            raise UsageError(
                f"rows have changed since {tables.checkpoint or 'they were made'}: call Tables.save first, "
                "so that the state can name their checkpoint"
            )
        dims = {name: table.dim for name, table in sorted(tables._declared.items())}
        return {"tables": dims, "checkpoint": tables.checkpoint, "token": tables._token}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Checks that the rows are those of the state's checkpoint, which `Tables.load` has read.

        Raises CheckpointError for other rows or tables.
        """
        own = self.state_dict()
        if own["tables"] != state.get("tables"):
            raise CheckpointError(
                f"the state is of tables {state.get('tables')}, but the open tables are {own['tables']}"
            )
        if own["token"] != state.get("token"):
            raise CheckpointError(
                f"the state belongs to the rows in {state.get('checkpoint') or 'no checkpoint'!r}, but the "
                f"open tables have the rows of {own['checkpoint'] or 'no checkpoint'!r}: first load the "
                "state's checkpoint with Tables.load"
            )
