"""Tables of embeddings in a training loop: looked up by modules, pushed by their optimizer."""

import json
import logging
import os
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from io import BytesIO
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ctr_ps.ctr_model.layers.pooling import require_range, require_widths
from ctr_ps.ctr_model.parameters import EmbeddingTable
from ctr_ps.protos.errors import CheckpointError, CtrPsError, UsageError, counted
from ctr_ps.protos.gradients import Gradients, SparseGrad, Values, require_counts, require_finite
from ctr_ps.protos.keys import Keys, unique_keys
from ctr_ps.protos.store import (
    Future,
    Missing,
    ModelState,
    Pulled,
    ReduceOp,
    SaveRequest,
    Store,
    Version,
)
from ctr_ps.ps_server.checkpoint.files.manifest import MANIFEST, TOKEN_CHARACTERS
from ctr_ps.ps_server.checkpoint.publish import write_latest
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.checkpoint.storage.folders import folder_at, place_of
from ctr_ps.ps_worker.communicators.push_ids import PushIds
from ctr_ps.ps_worker.job import Job
from ctr_ps.ps_worker.job.model import specs_of_tables
from ctr_ps.ps_worker.run.membership import Membership
from ctr_ps.ps_worker.run.run import log_shrunk
from ctr_ps.ps_worker.torch.gradients import PendingGradients
from ctr_ps.ps_worker.torch.prefetch import B, KeysOfBatch, Prefetcher, keys_of

logger = logging.getLogger(__name__)

_STATE = "state.pt"  # attachment of a checkpoint
_ROWS_OF_A_WRITE = 100_000


class TableModule(nn.Module):
    """A module with rows in a table."""

    def __init__(self, spec: EmbeddingTable) -> None:
        """Declares the table; raises ValueError for an empty name, a width below 1, or a negative range."""
        super().__init__()
        if not spec.name:
            raise ValueError("table is '', expected the name of the table")
        require_widths(dim=spec.dim)
        require_range(spec.init_range)
        self.spec = spec  # its table. Modules of the same table share its rows.
        self.num_embeddings: int | None = None  # keys are less; None: a key is any number
        self._parameters["weight"] = nn.Parameter(torch.empty(0, spec.dim))
        self.tables: Tables | None = None  # the attached tables, if any

    @property
    def parameter(self) -> nn.Parameter:
        """Its parameter `weight`, float32[0, D]: freezes or trains the rows by its `requires_grad`.

        Its dtype is that of outputs. Between `swap_embeddings` and `Tables.attach` it has the first rows.
        """
        return self._parameters["weight"]

    def get_extra_state(self) -> Tensor:
        """Returns the entry of `state_dict`: name and shape of the table, as JSON in uint8[L]."""
        keys = {} if self.num_embeddings is None else {"num_embeddings": self.num_embeddings}
        text = json.dumps({"table": self.spec.name, "dim": self.spec.dim, **keys})
        return torch.tensor(list(text.encode()), dtype=torch.uint8)  # tools expect tensors

    def set_extra_state(self, state: Tensor | Mapping[str, str | int]) -> None:
        """Checks that a `state_dict` is of this table; in older ones it is a mapping. Rows come from `load`.

        Raises CheckpointError if it is of another one.
        """
        found = json.loads(bytes(state.tolist())) if isinstance(state, Tensor) else state
        own = json.loads(bytes(self.get_extra_state().tolist()))
        if found not in (own, {"table": self.spec.name, "dim": self.spec.dim}):
            raise CheckpointError(f"the state is of {found}, but this module is of {own}")

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not self.parameter.numel():
            del destination[f"{prefix}weight"]  # the rows are in a checkpoint

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any,
        unexpected: list[str], errors: Any,
    ) -> None:  # fmt: skip
        name = f"{prefix}weight"
        own = {**state_dict, name: self.parameter}
        if name in state_dict and self.parameter.numel():  # until these are rows
            own = {f"{prefix}_extra_state": self.get_extra_state(), **state_dict}
        elif strict and name in state_dict:
            unexpected.append(name)
        super()._load_from_state_dict(own, prefix, metadata, strict, missing, unexpected, errors)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Does it, unless it is another weight of an attached module: raises UsageError."""
        if name == "weight" and self.tables is not None and param is not self.parameter:
            raise UsageError(f"{self!r}.weight is in a table: set it before attach(module)")
        super().register_parameter(name, param)

    def extra_repr(self) -> str:
        """Returns the table's settings, for `print`."""
        return f"{self.spec.dim}, table={self.spec.name!r}"


class Tables:
    """The tables of this worker's modules. For one thread; created by `open_tables`.

    All workers make collective calls in the same order.
    """

    def __init__(
        self,
        store: Store,
        membership: Membership,
        job: Job,
        *,
        num_workers: int,
        max_pending_bytes: int,
    ) -> None:
        """Waits for all workers; of the job, sections [train], [optimizer] and [strategy] count."""
        self.worker = membership.member.worker  # index of this worker
        self.num_workers = num_workers
        self._is_sync = job.strategy.is_sync
        self.checkpoint = ""  # the checkpoint that was saved or loaded last; empty: none
        self._token = ""  # of the save that made it
        self.pending = PendingGradients(max_pending_bytes)  # gradients since the last push
        self._store = store
        self._job = job
        self._push_ids = PushIds(membership.member)
        self._declared: dict[str, EmbeddingTable] = {}
        self._counting = set[str]()  # tables whose rows have statistics
        self._prefetcher = Prefetcher(self._ask, self._declared, is_exact=self._is_sync)
        self._oldest_pull: Version | None = None  # since the last push
        self.copies: dict[str, tuple[Tensor, Tensor]] = {}  # by table: of all rows, and they
        self._num_rows: dict[str, int] = {}  # of tables of a weight
        self._filled = set[str]()  # those that have its rows, or loaded ones
        self._num_pushes = 0
        self._pushes_saved = 0  # pushes in `checkpoint`
        self._num_barriers = 0
        self._is_closed = False
        self._process = os.getpid()
        self.version: Version = 0  # steps of synchronous training done; 0 in the asynchronous mode
        self._rejoin(store.barrier("start", self.worker, step=0).result())

    @property
    def _at(self) -> Version | None:
        """The step of pulls and pushes; None: they are applied on arrival."""
        return self.version if self._is_sync else None

    def attach(self, module: nn.Module) -> None:
        """Declares the tables of a module's embeddings, which are looked up here from now on.

        After `swap_embeddings` it is collective: worker 0 writes the first rows, and the weights are emptied.

        Raises:
            UsageError: If there are no embeddings, or a table with first rows is attached already.
            SpecError: If a table is invalid, or exists with another width, range or optimizer.
        """
        self._require_open()
        embeddings = [each for each in module.modules() if isinstance(each, TableModule)]
        if not embeddings:
            raise UsageError(
                f"{type(module).__name__} has no embedding of ctr_ps.torch, so nothing can be attached"
            )
        first = {each.spec.name: each.parameter for each in embeddings if each.parameter.numel()}
        if known := sorted(first.keys() & self._declared.keys()):
            raise UsageError(
                f"the table {known[0]!r} has rows already, and the module brings others: give its embedding "
                "another name with swap_embeddings(module, {path: name})"
            )
        specs = specs_of_tables([each.spec for each in embeddings], self._job)
        for spec in specs:
            if spec.name in first and (spec.statistics or spec.admission or spec.expiry):
                raise UsageError(
                    f"life has the table {spec.name!r}, which starts with all rows of a weight: leave it out"
                )
        for spec in specs:
            self._store.create_table(spec)
            if spec.statistics is not None:
                self._counting.add(spec.name)
        if first:
            self._by_first(lambda: self._write(first), "write the first rows")
            self._filled.update(first)
        for embedding in embeddings:
            embedding.tables = self
            self._declared[embedding.spec.name] = embedding.spec
            if embedding.num_embeddings is not None:
                self._num_rows[embedding.spec.name] = embedding.num_embeddings
            parameter = embedding.parameter  # which an optimizer may have
            parameter.data, parameter.grad = parameter.data[:0].clone(), None

    def _write(self, first: Mapping[str, Tensor]) -> str:
        """Writes row i of each weight as that of key i, with the state of a new row."""
        for table, weight in first.items():
            for start in range(0, len(weight), _ROWS_OF_A_WRITE):
                part = weight.detach()[start : start + _ROWS_OF_A_WRITE].cpu().float().numpy()
                keys = np.arange(start, start + len(part), dtype=np.uint64)
                fresh = self._store.pull_state({table: keys}, []).result().rows[table]
                push_id = self._push_ids.next(examples=0, batches=0, pulled=self.version, whole=())
                state = ModelState({table: replace(fresh, weights=np.ascontiguousarray(part))})
                self._store.push_state(state, push_id).result()
        return "-" * TOKEN_CHARACTERS

    def pull(self, table: str, keys: Keys, *, trains: bool) -> Values:
        """Returns rows float32[N, D] of unique keys uint64[N], as they are after the last step.

        A key without a row reads its initial value, or zeros unless it `trains`; it gets no row.
        """
        self._require_open()
        if self._num_rows.get(table) and table not in self._filled:
            raise UsageError(
                f"table {table!r} has no rows here, but in earlier tables: load() them"
            )
        if not trains:
            answer = self._store.pull_sparse({table: keys}, missing=Missing.ZEROS, at=self._at)
            return answer.result().rows[table]
        pulled = self._prefetcher.rows_of(table, keys) or self._ask({table: keys}).result()
        oldest = self._oldest_pull
        self._oldest_pull = pulled.version if oldest is None else min(oldest, pulled.version)
        return pulled.rows[table]

    def require_unwritten(self, *tables: str) -> None:
        """Raises UsageError if a copy of all rows was written to, of these tables or of any."""
        for table in tables or list(self.copies):
            copy, rows = self.copies.pop(table, (torch.empty(0), torch.empty(0)))
            if not torch.equal(copy.view(torch.uint8), rows.to(copy.dtype).view(torch.uint8)):
                raise UsageError(
                    f"{table}.weight is a copy of rows: write to it before attach(module)"
                )

    def watch(
        self, table: str, keys: Keys, rows: Tensor, places: NDArray[np.int32], skipped: int | None
    ) -> None:
        """Lets backward() note the gradient of rows, a leaf float32[N, D], of unique keys uint64[N].

        `places` int32[n] are the keys' occurrences: the index of each among the unique ones, of which one is
        `skipped`.
        """
        kept = slice(None) if skipped is None else np.arange(keys.size) != skipped
        counts = None
        if table in self._counting:
            shows = np.bincount(places, minlength=keys.size).astype(np.uint32)
            counts = np.stack([shows, np.zeros_like(shows)], axis=1)[kept]
        self.pending.watch(table, keys[kept], rows, counts, kept)

    def _ask(self, keys: Mapping[str, Keys]) -> Future[Pulled]:
        return self._store.pull_sparse(keys, missing=Missing.INITIAL, at=self._at)

    def prefetching(self, loader: Iterable[B], keys_of_batch: KeysOfBatch[B]) -> Iterator[B]:
        """Yields the batches of a loader, and requests the rows of each while the previous one is trained.

        In sync mode `step()` requests them, and they are exact. In async mode they are requested before it,
        and miss one push of this worker at most. A batch is taken from the loader before the previous one is
        yielded.

        Args:
            loader: Any iterable. Rows are requested by the training process, not by a DataLoader's workers.
            keys_of_batch: Returns the keys of a batch by table, int64 or uint64 of any shape; omitted ones
                are pulled by the lookup. Anything else is a UsageError with the batch.
        """
        return self._prefetcher.batches(loader, keys_of_batch)

    def push(self, *, clicked: Mapping[str, Tensor] | None = None, scale: float = 1.0) -> None:
        """Pushes the waiting gradients, divided by `scale`, and returns when the servers have them.

        `clicked` are the looked-up keys of the examples with a click, by table, each as often as it was
        looked up: for tables with statistics, whose rows have no clicks without it.

        In sync mode this is the worker's part of the step, even without gradients; the next lookup waits for
        the others' parts. In async mode nothing is pushed without gradients. Raises GradientError if a
        gradient is infinite or not a number; nothing was pushed, all still wait.
        """
        self._require_open()
        self.require_unwritten()
        sparse = dict(self.pending.merged())  # which stay as they are if the push is refused
        if not sparse and not self._is_sync:
            return
        for table, keys in (clicked or {}).items():
            if (found := keys_of(keys)).size:
                sparse[table] = _with_clicks(table, sparse.get(table), found)
        if scale != 1.0:
            factor = np.float32(1.0 / scale)
            sparse = {table: replace(g, values=g.values * factor) for table, g in sparse.items()}
        gradients = Gradients(sparse=sparse)
        require_finite(gradients)  # before the push has a number
        push_id = self._push_ids.next(
            examples=1,
            batches=1,
            pulled=self.version if self._oldest_pull is None else self._oldest_pull,
            whole=[self._push_ids.take(None)],
        )
        self.pending.clear(
            are_pushed=True
        )  # before it is sent, as a push that fails may be applied
        self._oldest_pull = None
        self._store.push_grad(gradients, push_id, at=self._at).result()
        self._num_pushes += 1
        self.version += self._is_sync
        self._prefetcher.pushed()

    def barrier(self) -> None:
        """Waits for every worker; collective."""
        self._require_open()
        self.warn_of_waiting("a barrier")
        answer = self._store.barrier(self._next_barrier(), self.worker, step=self.version)
        self._rejoin(answer.result())

    def save(
        self,
        url: str,
        *,
        state: Mapping[str, Any] | None = None,
        base: str = "",
        overwrite: bool = False,
    ) -> None:
        """Saves the rows and their optimizer's state, with the pushes of all workers; collective.

        The folder above then has a file LATEST with its name.

        Args:
            url: A path or URL that does not exist, or a checkpoint that these tables saved or loaded last:
                it is replaced when the new one is complete.
            state: What worker 0 saves with them, such as the `state_dict` of the model and of the optimizer
                of its dense parameters: tensors, numbers, text, dicts and lists.
            base: The checkpoint saved or loaded last, in the same folder: the new one is a delta to it.
            overwrite: Whether any checkpoint at `url` is replaced.

        Raises:
            UsageError: If `state` has something else in it.
            CheckpointError: On all workers, if it cannot be written.
        """
        self.require_unwritten()
        attachments = {} if state is None else {_STATE: _state_bytes(state)}

        def save() -> str:
            folder = folder_at(url)
            if not overwrite and folder.url != self.checkpoint and folder.has(MANIFEST):
                raise CheckpointError(
                    f"there is a checkpoint at {url}: save elsewhere, load it first, or replace it by "
                    f"overwrite=True"
                )
            self._store.save(SaveRequest(url=url, base=base, attachments=attachments))
            saved = Checkpoint.open(url)
            write_latest(saved.url.rpartition("/")[0] or "/", saved.name)
            return saved.token

        self.barrier()
        self._token = self._by_first(save, f"save {url}")
        self.checkpoint, self._pushes_saved = place_of(url), self._num_pushes

    def load(self, url: str, *, resume: bool = False) -> dict[str, Any]:
        """Replaces the rows by those of a checkpoint, before the first step; collective.

        Returns the `state` that was saved with them, on the CPU; empty without one.

        Args:
            url: A checkpoint of the same tables, or a folder of checkpoints, for the latest.
            resume: Whether steps and schedules of learning rates continue from there instead of 0.

        Raises:
            UsageError: If this worker has pushed, or attached nothing.
            CheckpointError: On all workers, if there is no such checkpoint, or it does not fit.
            ProtocolError: If another checkpoint was resumed before.
        """
        self._require_open()
        if self._num_pushes:
            raise UsageError(
                f"{url} cannot be loaded after {counted(self._num_pushes, 'step')}: load it first"
            )
        if not self._declared:
            raise UsageError(f"{url} cannot be loaded before attach(model): attach it first")

        def load() -> str:
            found = Checkpoint.open(url)
            found.require(self._declared)
            whole = found.chain[0].manifest  # a delta has only changed rows
            rows = {table: whole.num_rows(table) for table in sorted(found.tables)}
            expected = {
                table: self._num_rows.get(table, rows[table]) for table in sorted(self._declared)
            }
            if rows != expected:
                raise CheckpointError(
                    f"checkpoint {found.url} has rows {rows}, the model {expected}"
                )
            self._store.load(found.url, token=found.token)
            batches = found.manifest.batches
            if resume:
                self._store.resume(found.manifest.version, {}, batches=batches)
            elif batches and self._job.optimizer.has_schedule:
                logger.info(
                    "the schedule of the learning rates starts at step 0 after the load of %s: to "
                    "continue it at step %d, load with resume=True",
                    found.url,
                    batches,
                )
            return found.token

        self._token = self._by_first(load, f"load {url}")
        self._prefetcher.clear()
        self._filled.update(self._declared)
        saved = Checkpoint.open(url)
        self.checkpoint, self._pushes_saved = saved.url, self._num_pushes
        if saved.token != self._token:
            raise CheckpointError(f"{url} was replaced while it was loaded: load it again")
        if _STATE not in saved.attachments:
            return {}
        state: dict[str, Any] = torch.load(
            BytesIO(saved.attachment(_STATE)), map_location="cpu", weights_only=True
        )
        return state

    def shrink(self) -> None:
        """Ends a pass of the rows' statistics, and removes rows by the rules of `life`; collective."""

        def shrink() -> str:
            log_shrunk(self._store.shrink())
            return "-" * TOKEN_CHARACTERS

        self.barrier()
        self._by_first(shrink, "end the pass")
        self._pushes_saved = -1  # the rows are not those of the checkpoint
        self._prefetcher.clear()  # of rows that may be gone

    def _by_first(self, work: Callable[[], str], what: str) -> str:
        """Has worker 0 act for all; the others wait for its token, or its failure."""
        failure: CtrPsError | None = None
        told = np.zeros(TOKEN_CHARACTERS)
        if self.worker == 0:
            try:
                told[:] = np.frombuffer(work().encode("ascii"), np.uint8)
            except CheckpointError as error:
                failure = error
        name = self._next_barrier()
        answer = self._store.all_reduce(
            name, self.worker, told, ReduceOp.MAX, step=self.version
        ).result()
        self._rejoin(answer.version)
        if failure is not None:
            raise failure
        if not answer.values.any():
            raise CheckpointError(f"worker 0 could not {what}: see its log")
        return answer.values.astype(np.uint8).tobytes().decode("ascii")

    def _next_barrier(self) -> str:
        self._num_barriers += 1
        return f"barrier-{self._num_barriers}"

    def _rejoin(self, version: Version) -> None:
        if self._is_sync and version != self.version:
            self.version = version
            self._prefetcher.rejoined()

    def warn_of_waiting(self, event: str) -> None:
        """Warns of gradients without a `step()`, at calls that usually follow one."""
        if self.pending.num_bytes:
            waiting = (
                f"{counted(grad.keys.size, 'key')} of {table!r}"
                for table, grad in self.pending.merged().items()
            )
            logger.warning(
                "%s is called while gradients of %s wait: push them with PushOptimizer.step(), or drop them "
                "with zero_grad()",
                event,
                ", ".join(waiting),
            )

    def _require_open(self) -> None:
        if self._is_closed:
            raise UsageError("the tables are closed: look up and push inside `with open_tables()`")
        if os.getpid() != self._process:
            raise UsageError(
                "the tables belong to another process, and the copy in this one (such as a DataLoader's "
                "worker) would never change: look up in the process that trains"
            )

    def close(self) -> None:
        """Refuses all later calls."""
        self._is_closed = True
        self._prefetcher.clear()
        self.pending.clear()

    def __deepcopy__(self, memo: object) -> "Tables":
        """Shares the tables: a copied module looks up in the same ones."""
        return self

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Restores to no tables: a module saved as a whole is detached."""
        return type(None), ()


def _with_clicks(table: str, grad: SparseGrad | None, keys: Keys) -> SparseGrad:
    """Returns a gradient with the clicks of its keys; raises UsageError for a key that is none of them."""
    unique, inverse = unique_keys(keys)
    known = np.empty(0, np.uint64) if grad is None else grad.keys
    _, own, theirs = np.intersect1d(known, unique, assume_unique=True, return_indices=True)
    if grad is None or own.size < unique.size:
        stranger = np.setdiff1d(unique, known)[0]
        raise UsageError(
            f"clicked has key {stranger} of table {table!r}, which has no gradient: give the keys that the "
            "model looked up"
        )
    if grad.counts is None:
        raise UsageError(
            f"clicked has table {table!r}, which keeps no statistics: open_tables(life={{...}}) turns them on"
        )
    counts = grad.counts.copy()
    counts[own, 1] = np.bincount(inverse)[theirs]
    counted_grad = replace(grad, counts=counts)
    require_counts(table, counted_grad, keeps_statistics=True)
    return counted_grad


def _state_bytes(state: Mapping[str, Any]) -> bytes:
    """Returns a state as a file of PyTorch, which can be loaded without running code."""
    file = BytesIO()
    try:
        torch.save(dict(state), file)
        file.seek(0)
        torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        raise UsageError(
            f"state has {found[1] if found else 'a Python object'}, expected only tensors, numbers, text, "
            "dicts and lists, as loading anything else could run code"
        ) from error
    return file.getvalue()
