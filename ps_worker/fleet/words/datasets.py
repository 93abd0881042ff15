"""Datasets of files as Paddle's scripts make them, with `init`, or by a factory.

    dataset = fleet.DatasetFactory().create_dataset("QueueDataset")      # or fleet.QueueDataset()
    dataset.init(batch_size=32, thread_num=2, use_var=schema, pipe_command="python clicks.py")

The same as fleet.QueueDataset(schema, batch_size=32, thread_num=2) with set_pipe_command.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import UsageError
from ctr_ps.ps_worker.data import in_memory_dataset, queue_dataset
from ctr_ps.ps_worker.data.file_dataset import FileDataset
from ctr_ps.ps_worker.data.text.multislot import MultiSlotReader, Values
from ctr_ps.ps_worker.fleet.words.program import schema_of
from ctr_ps.ps_worker.fleet.words.unknown import unknown_name

_MULTI_SLOT = "cat"  # the command by which Paddle reads files that are multi-slot text already

_PARTS_OF_INIT = frozenset(
    {"set_use_var", "set_batch_size", "set_thread", "set_hdfs_config", "set_download_cmd"}
)


class _InitLater(FileDataset):
    """A dataset whose columns come with `init`, unless it has its arguments at once."""

    def __init__(
        self,
        schema: Schema | None = None,
        batch_size: int | None = None,
        thread_num: int = 1,
        **settings: Any,
    ) -> None:
        if schema is None:
            if batch_size is not None or settings:
                raise UsageError(
                    f"{self._name} needs a schema: {self._name}(schema, batch_size=32)"
                )
            return
        if batch_size is None:
            raise UsageError(
                f"{self._name} needs a batch_size: {self._name}(schema, batch_size=32)"
            )
        super().__init__(schema, batch_size, thread_num, **settings)

    def init(
        self,
        *,
        use_var: object = None,
        batch_size: int = 1,
        thread_num: int = 1,
        pipe_command: str = "",
        columns: Sequence[str] | None = None,
        values: Values = "keys",
        **of_paddle: Any,
    ) -> None:
        """Makes the dataset, as Paddle's `init`.

        `use_var` is a Schema, or variables of `paddle.static.data` in the order of the columns.
        `pipe_command`, `columns` and `values` are those of `set_pipe_command`; the command "cat" means that
        the files are multi-slot text, "" what their suffixes say. Paddle's other arguments may only ask for
        nothing.
        """
        if self._is_made:
            raise UsageError(f"{self._name} has its columns already: call init() only once")
        if not pipe_command and (columns is not None or values != "keys"):
            raise UsageError(
                f"columns and values of {self._name}.init() are those of multi-slot text, but pipe_command "
                "is ''"
            )
        if not isinstance(use_var, Schema):
            use_var, in_order = schema_of(use_var, f"use_var of {self._name}")
            slots = tuple(each for each in in_order if each in use_var.slots)
            if not pipe_command and slots != use_var.slots:
                raise UsageError(
                    f"use_var of {self._name} has the slots {', '.join(slots)}, expected them as declared, "
                    f"{', '.join(use_var.slots)}: only multi-slot text has columns in any order"
                )
            columns = columns or in_order
        for name, value in of_paddle.items():
            if value not in (None, "", 0) and (name, value) != ("download_cmd", "cat"):
                raise UsageError(
                    f"{name} of {self._name}.init() is {value!r}, but is not supported: leave it out "
                    "(docs/fleet.md)"
                )
        own: dict[str, Any] = {}
        if pipe_command == _MULTI_SLOT:
            own["format"] = partial(MultiSlotReader, columns=columns, values=values)
        _InitLater.__init__(self, use_var, batch_size, thread_num, **own)
        if pipe_command not in ("", _MULTI_SLOT):
            self.set_pipe_command(pipe_command, columns=columns, values=values)

    def __getattr__(self, name: str) -> NoReturn:
        """Says what to call, where something is missing since `init` was not called, or is part of it."""
        if name in _PARTS_OF_INIT or not (self._is_made or name.startswith(("__", "set_"))):
            what = f"{name}() is" if name in _PARTS_OF_INIT else "columns are"
            raise UsageError(
                f"{what} set by init(): call dataset.init(batch_size=32, thread_num=2, use_var=schema), or "
                f"write {self._name}(schema, batch_size=32, thread_num=2)"
            )
        raise unknown_name(
            self._name, name, (each for each in dir(self) if not each.startswith("_"))
        )

    @property
    def _is_made(self) -> bool:
        return "schema" in vars(self)

    @property
    def _name(self) -> str:
        return f"fleet.{type(self).__name__}"


class QueueDataset(_InitLater, queue_dataset.QueueDataset):
    """Files that are read while they are trained on; see `ps_worker.data.queue_dataset`."""


class InMemoryDataset(_InitLater, in_memory_dataset.InMemoryDataset):
    """Files that are read into memory first; see `ps_worker.data.in_memory_dataset`."""


class DatasetFactory:
    """Makes datasets by the names of their classes."""

    def create_dataset(self, datafeed_class: str = "QueueDataset") -> Any:
        """Returns a dataset, whose `init` is to be called; raises UsageError if there is no such class."""
        known = {each.__name__: each for each in (QueueDataset, InMemoryDataset)}
        if datafeed_class not in known:
            raise UsageError(
                f"no dataset {datafeed_class!r}, only {', '.join(known)}: the first reads files during "
                "training, the second before it"
            )
        return known[datafeed_class]()
