"""State of a process in a run: the object behind the functions of `ps_worker.fleet`.

    a server:  init -> minimize -> init_server -> run_server
    a worker:  init -> minimize -> init_worker -> train, infer, barrier, save in any order -> stop_worker
    a heter trainer:  init -> minimize -> init_heter_worker -> run_heter_worker

Without a role everything is in this process: it is worker 0 of 1, and has the parameters, too.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path, PurePath
from typing import Literal, NoReturn, TypeVar, overload

from ctr_ps.ctr_model.models.model import Model, origin_of
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import RoleError, UsageError
from ctr_ps.protos.metrics.metrics_port import metrics_address
from ctr_ps.protos.role import HeterRole, Role, ServerRole, WorkerRole
from ctr_ps.protos.runtime.logs import configure_logs, errors_as_exit_codes
from ctr_ps.protos.store import (
    InferenceDtype,
    InferenceSettings,
    Numbers,
    ReduceOp,
    SaveRequest,
    Shrunk,
)
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.settings import ServerSettings
from ctr_ps.ps_worker.checkpoints.attachments import values_of_checkpoint
from ctr_ps.ps_worker.checkpoints.resume import require_batches
from ctr_ps.ps_worker.cluster.open_store import LOCAL, open_store
from ctr_ps.ps_worker.data.blocks import DataPosition
from ctr_ps.ps_worker.data.files.file_split import FileSplit, file_splits, split_files
from ctr_ps.ps_worker.data.files.listing import signature_of, stamp_of
from ctr_ps.ps_worker.data.formats import Format, splitter
from ctr_ps.ps_worker.data.global_shuffle import Peers
from ctr_ps.ps_worker.data.slot_values import SlotValues
from ctr_ps.ps_worker.extras.device_pass import new_pass_trainer
from ctr_ps.ps_worker.extras.heter.connect import before_the_cut, heter_trainers, require_heter
from ctr_ps.ps_worker.fleet.task import Task
from ctr_ps.ps_worker.fleet.words.roles import PaddleCloudRoleMaker, RoleMaker
from ctr_ps.ps_worker.fleet.words.unknown import called_as
from ctr_ps.ps_worker.run.membership import abort_before_joining
from ctr_ps.ps_worker.run.plan import model_plan_of
from ctr_ps.ps_worker.run.precompile import precompile_script
from ctr_ps.ps_worker.run.run import Run
from ctr_ps.ps_worker.run.termination import Place
from ctr_ps.ps_worker.run.worker_metrics import metrics_port

_MOST_LISTS = 16

R = TypeVar("R", ServerRole, WorkerRole, HeterRole)

_WHOSE: Mapping[type[Role], tuple[str, str]] = {
    ServerRole: ("servers", "is_server"),
    WorkerRole: ("workers", "is_worker"),
    HeterRole: ("heter trainers", "is_heter_worker"),
}
"""Who has a role, and the function that says whether this process does."""


class Fleet:
    """One process's part of a run. For one thread."""

    def __init__(self, *, on_role: Callable[["Fleet"], object] | None = None) -> None:
        """Has no role yet; `on_role` is called when it is known."""
        self._on_role = on_role
        self._role: Role | None = None
        self._forget()

    def _forget(self) -> None:
        self._limits: Mapping[str, float] = {}
        self._task: Task | None = None
        self._is_server_ready = False
        self._server_load: str | None = None
        self._run: Run | None = None
        self._resources = ExitStack()  # the run, and the store that it is on
        self._has_called = False  # the servers, as a worker
        self._file_lists: list[str] = []  # signatures of those divided before training
        self._has_agreed = False
        self._is_over = False
        self._values: list[SlotValues] = []  # of what was trained on

    @property
    def place(self) -> Place | None:
        """This worker's store and index; None: it takes part in no run."""
        return None if self._run is None else (self._run.store, self._run.worker)

    @property
    def needs_stop_worker(self) -> bool:
        """Whether this worker has a model to train, and others to wait for it until `stop_worker`."""
        has_failed_to_join = self._has_called and self._run is None
        return self._task is not None and not (self._is_over or has_failed_to_join)

    @property
    def has_served(self) -> bool:
        """Whether this server has served."""
        return self._is_over

    def init(
        self,
        role_maker: RoleMaker | None = None,
        *,
        is_collective: bool = False,
        connect_timeout_s: float = 120.0,
        rpc_timeout_s: float = 60.0,
        wait_timeout_s: float = 600.0,
    ) -> None:
        """Sets the role of this process, which the environment has unless a role maker is given.

        A worker waits up to `connect_timeout_s` for servers that are not up yet, `rpc_timeout_s` for an
        answer to a pull or a push, and `wait_timeout_s` for other workers. Raises RoleError if a role is not
        described whole.
        """
        if self._run is not None:
            raise UsageError("call fleet.stop_worker() before another fleet.init()")
        role = (role_maker or PaddleCloudRoleMaker(is_collective)).role()
        self._forget()
        self._role = role or LOCAL
        self._limits = {
            "connect_timeout_s": connect_timeout_s,
            "rpc_timeout_s": rpc_timeout_s,
            "wait_timeout_s": wait_timeout_s,
        }
        if self._on_role is not None:
            self._on_role(self)

    def is_server(self) -> bool:
        """Whether this process holds parameters."""
        return isinstance(self._known_role("fleet.is_server()"), ServerRole)

    def is_worker(self) -> bool:
        """Whether this process trains."""
        return isinstance(self._known_role("fleet.is_worker()"), WorkerRole)

    def is_heter_worker(self) -> bool:
        """Whether this process trains dense parameters for workers: a heter trainer."""
        return isinstance(self._known_role("fleet.is_heter_worker()"), HeterRole)

    def is_first_worker(self) -> bool:
        """Whether this process is worker 0, which loads, saves and shrinks for all."""
        role = self._known_role("fleet.is_first_worker()")
        return isinstance(role, WorkerRole) and role.worker_index == 0

    def worker_index(self) -> int:
        """Index of this worker, from 0."""
        return self._role_as(WorkerRole, "fleet.worker_index()").worker_index

    def worker_num(self) -> int:
        """Number of workers."""
        return self._known_role("fleet.worker_num()").num_workers

    def server_index(self) -> int:
        """Index of this server, from 0."""
        return self._role_as(ServerRole, "fleet.server_index()").server_index

    def server_num(self) -> int:
        """Number of servers; 0 without a cluster."""
        return len(self._known_role("fleet.server_num()").endpoints)

    @overload
    def server_endpoints(self, to_string: Literal[False] = False) -> list[str]: ...

    @overload
    def server_endpoints(self, to_string: Literal[True]) -> str: ...

    def server_endpoints(self, to_string: bool = False) -> list[str] | str:
        """Where workers reach each server, as host:port, or with commas; none without a cluster."""
        endpoints = self._known_role("fleet.server_endpoints()").endpoints
        return ",".join(endpoints) if to_string else list(endpoints)

    def worker_endpoints(self, to_string: bool = False) -> NoReturn:
        """Raises UsageError: workers listen at no endpoints; `to_string` is Paddle's."""
        raise UsageError(
            "workers have no endpoints, only servers have: workers reach each other by "
            "fleet.util.all_reduce(), fleet.barrier_worker() and dataset.global_shuffle(fleet); "
            "fleet.worker_num() is their number"
        )

    def split_files(self, files: Sequence[str | Path]) -> list[str]:
        """Returns those of `files` that this worker reads; each goes to one worker, by size."""
        role = self._role_as(WorkerRole, "fleet.split_files()")
        paths = [str(file) for file in files]
        own = split_files(paths, role.worker_index, role.num_workers)
        self._note_files(paths)
        return own

    def file_splits(
        self, files: Sequence[str | Path], schema: Schema, *, format: Format | None = None
    ) -> list[FileSplit]:
        """Returns the parts of `files` that this worker reads; with more workers than files, files are split.

        All workers give the same files, none twice; `format` is as `fleet.QueueDataset` takes it.
        """
        role = self._role_as(WorkerRole, "fleet.file_splits()")
        paths = [str(file) for file in files]
        split_file = splitter(schema, format)
        own = file_splits(split_file, paths, role.worker_index, role.num_workers)
        self._note_files(paths)
        return own

    def _note_files(self, paths: Sequence[str]) -> None:
        """Keeps the signature of files that all workers divide, for `trains_on`; refuses an empty list."""
        if not paths:
            raise UsageError(
                "files is empty, so there is nothing to train on: does a pattern match none?"
            )
        is_alone = self.worker_num() == 1
        if not (is_alone or self._has_agreed or len(self._file_lists) == _MOST_LISTS):
            # By name: machines list a folder in any order, which changes nothing.
            listed = sorted(paths, key=lambda path: (PurePath(path).name, path))
            self._file_lists.append(signature_of(listed, {path: stamp_of(path) for path in paths}))

    @property
    def limits(self) -> Mapping[str, float]:
        """Time limits given to `init`, as a job's [cluster]."""
        self._known_role("minimize()")
        return self._limits

    def minimize(self, task: Task) -> None:
        """Sets the model to train; raises UsageError if the run has begun."""
        self._known_role("minimize()")
        if self._run is not None or self._is_over:
            raise UsageError("call minimize() before fleet.init_worker()")
        if self._task is not None:
            raise UsageError("minimize() was called before: a process trains only one model")
        self._task = task

    def require_task(self, model: Model) -> None:
        """Raises UsageError if no model was minimized, or another one."""
        if self._task is None or self._task.model is not model:
            raise UsageError(
                "the model is not that of minimize(): call fleet.distributed_optimizer(...).minimize(model) "
                "with the same model before training it"
            )

    def init_server(self, model_dir: str | Path | None = None) -> None:
        """Prepares a server, with the parameters of the checkpoint `model_dir` or fresh ones."""
        self._role_as(ServerRole, "fleet.init_server()")
        self._server_load = None if model_dir is None else str(model_dir)
        self._is_server_ready = True

    def run_server(
        self,
        *,
        bind: str | None = None,
        stay: bool = False,
        idle_limit_s: float | None = None,
        wait_limit_s: float | None = None,
        memory_limit: int | None = None,
        checkpoint_roots: Sequence[str | Path] = (),
    ) -> None:
        """Serves until all workers have left, as `ps-server` does; ends the process if that goes wrong.

        Arguments are those of `ps_server.settings.ServerSettings`; without `wait_limit_s`, `wait_timeout_s`
        of `init` counts.
        """
        role = self._role_as(ServerRole, "fleet.run_server()")
        if not self._is_server_ready:
            raise UsageError("call fleet.init_server() before fleet.run_server()")
        # Late, so that workers do not load the server's shell.
        from ctr_ps.ps_server.rpc.run import run_server

        settings = ServerSettings(
            load=self._server_load,
            bind=bind,
            stay=stay,
            idle_limit_s=idle_limit_s,
            wait_limit_s=self._limits["wait_timeout_s"] if wait_limit_s is None else wait_limit_s,
            memory_limit=memory_limit,
            checkpoint_roots=tuple(str(root) for root in checkpoint_roots),
        )
        self._is_over = True
        with errors_as_exit_codes():
            configure_logs()
            exit_code = run_server(role, settings)
        if exit_code:
            raise SystemExit(exit_code)

    def init_heter_worker(self) -> None:
        """Prepares a heter trainer; raises UsageError if there is nothing to train yet."""
        self._role_as(HeterRole, "fleet.init_heter_worker()")
        self._known_task("fleet.init_heter_worker()")
        self._is_server_ready = True

    def run_heter_worker(self) -> None:
        """Trains dense parameters for the workers until all have left, as `ps-worker heter` does."""
        role = self._role_as(HeterRole, "fleet.run_heter_worker()")
        if self._task is None or not self._is_server_ready:
            raise UsageError("call fleet.init_heter_worker() before fleet.run_heter_worker()")
        # Late, so that others do not load the shell of a heter trainer.
        from ctr_ps.ps_worker.extras.heter.heter_job import run_heter

        self._is_over = True
        run_heter(model_plan_of(self._task.model, self._task.job, role))

    def init_worker(self) -> None:
        """Waits for the servers, and declares the model to them.

        Raises:
            UsageError: If there is nothing to train yet.
            CtrPsError: If servers do not answer, or hold another model.
        """
        role = self._role_as(WorkerRole, "fleet.init_worker()")
        task = self._known_task("fleet.init_worker()")
        if self._run is not None or self._is_over:
            raise UsageError("fleet.init_worker() was called before: call it only once")
        job = task.job
        if role.heter_endpoints:
            require_heter(job, task.model)
        origin = origin_of(task.model)
        if origin is not None:  # a class of the user's own may not say for which columns it is
            precompile_script(
                task.model,
                origin.schema,
                job,
                is_in_process=role.is_in_process,
                new_pass_trainer=new_pass_trainer,
            )
        self._has_called = True
        with ExitStack() as opened:
            store = opened.enter_context(open_store(role, job.cluster))
            heter = heter_trainers(role.heter_endpoints, job, worker=role.worker_index)
            plan = model_plan_of(task.model, job, role, new_pass_trainer=new_pass_trainer)
            run = Run(store, before_the_cut(plan, heter), heter=heter)
            self._run = opened.enter_context(run)
            opened.enter_context(metrics_port(run, metrics_address(None)))
            self._resources = opened.pop_all()

    def run_of(self, call: str) -> Run:
        """Returns this worker's part in the run, which `call` needs.

        Raises UsageError if it has not begun, or is over, which says what is missing before `call`.
        """
        self._role_as(WorkerRole, call)
        if self._is_over:
            raise UsageError(f"fleet.stop_worker() was called: call {call} before it")
        if self._run is None:
            raise UsageError(f"call fleet.init_worker() before {call}")
        return self._run

    def barrier_worker(self) -> None:
        """Waits until all workers have come; the servers then have all their gradients."""
        self.run_of("fleet.barrier_worker()").barrier()

    def all_reduce(self, values: Numbers, op: ReduceOp) -> Numbers:
        """Returns the sum, largest or smallest of all workers' `values` float64[N]; all of them call it."""
        return self.run_of("fleet.util.all_reduce() and fleet.metrics").all_reduce(values, op)

    def peers(self) -> Peers:
        """Returns this worker's way to the others, for data that all workers shuffle together."""
        return self.run_of("fleet.peers()").peers()

    @called_as("fleet.save_persistables(dirname)", paddle="executor dirname main_program mode")
    def save_persistables(self, dirname: str | Path) -> None:
        """Saves all parameters and optimizer states to a folder; on worker 0 only.

        Raises CheckpointError if it cannot be written; an older checkpoint there stays as it was.
        """
        self._first_run("fleet.save_persistables()").save(
            SaveRequest(url=str(dirname), attachments=self._attachments())
        )

    @called_as(
        "fleet.save_inference_model(dirname)",
        paddle="executor dirname feeded_var_names target_vars main_program export_for_deployment",
    )
    def save_inference_model(
        self,
        dirname: str | Path,
        *,
        dtype: InferenceDtype = "float32",
        min_score: float = 0.0,
    ) -> None:
        """Saves an inference checkpoint, weights alone, to a folder of its own; on worker 0 only.

        Training cannot start from it. Rows of a lower score than `min_score` are left out; above 0 the model
        has to keep statistics (`minimize(life=...)`). Raises CheckpointError as `save_persistables` does.
        """
        settings = InferenceSettings(dtype=dtype, min_score=min_score)
        run = self._first_run("fleet.save_inference_model()")
        run.save(SaveRequest(url=str(dirname), attachments=self._attachments(), inference=settings))

    def load_model(
        self, dirname: str | Path, *, only: Sequence[str] = (), resume: bool = False
    ) -> None:
        """Replaces all parameters by saved ones; on worker 0 only, before training.

        Others train, or leave their first barrier, with what was loaded.

        Args:
            dirname: Checkpoint, or folder of checkpoints.
            only: Tables to take from it, and "dense" for the dense parameters; all others get initial values.
                Empty: all, and all must be there and fit.
            resume: Resume the run that saved it; `data_position` then says where.

        Raises:
            UsageError: If training has begun, or if a part of a model is to resume.
            CheckpointError: If it is not a checkpoint, or does not fit; nothing was replaced.
        """
        if only and resume:
            raise UsageError(
                "fleet.load_model() with resume loads the whole model: give either only or resume"
            )
        run = self._first_run("fleet.load_model()")
        checkpoint = Checkpoint.open(dirname)
        if resume:
            require_batches(checkpoint)
        run.load(checkpoint.url, only=only, token=checkpoint.token)
        self._values.append(values_of_checkpoint(checkpoint))
        if resume:
            manifest = checkpoint.manifest
            run.resume(manifest.version, manifest.workers, batches=manifest.batches)

    def slot_values(self) -> SlotValues:
        """Returns what the values of slots were in the data that was trained on."""
        found = SlotValues()
        for each in self._values:
            found.merge(each)
        return found

    def trains_on(self, data: object) -> Run:
        """Returns this worker's part in the run, which trains on this data next.

        Its values of slots are noted, which checkpoints say. The servers compare what workers train on first:
        settings of the dataset, and the files that `split_files` and `file_splits` have divided. Raises
        JobError if they differ; the job ends for all; UsageError if the only worker has no files.
        """
        run = self.run_of("training")
        if run.num_workers == 1 and getattr(data, "num_files", None) == 0:
            raise UsageError("set_filelist() got no files, so there is nothing to train on")
        if not self._has_agreed and run.num_workers > 1:
            own = {name: getattr(data, name, "") for name in ("batch_size", "thread_num")}
            settings = getattr(data, "terms", {f"dataset.{name}": str(own[name]) for name in own})
            run.agree(
                {**settings, **{f"files {i}": each for i, each in enumerate(self._file_lists, 1)}}
            )
            self._has_agreed = True
        values = getattr(data, "slot_values", None)
        if isinstance(values, SlotValues) and all(values is not each for each in self._values):
            self._values = [*self._values, values]
        return run

    def data_position(self) -> DataPosition | None:
        """Returns where in its data this worker resumes after `load_model(..., resume=True)`.

        Every worker calls it before it trains; the first call waits for all workers. The result is `start` of
        `executor.train_from_dataset`; its `epoch` is the pass. None: at the start.
        """
        earlier = self.run_of("fleet.data_position()").earlier_progress
        return DataPosition.from_json(earlier.position) if earlier and earlier.position else None

    def shrink(
        self, threshold: float | None = None, *, dry_run: bool = False
    ) -> Mapping[str, Shrunk]:
        """Ends a pass over the data, as a day: rows age, and expired rows are removed; on worker 0 only.

        What expires is said by `minimize(life=...)`; `threshold` also removes the rows whose weights have an
        L2 norm of at most this. Returns by table what was removed and what is left; a dry run, what would be.
        """
        return self._first_run("fleet.shrink()").shrink(threshold, dry_run=dry_run)

    def stop_worker(self) -> None:
        """Leaves the run; the servers end when all workers have left."""
        run = self.run_of("fleet.stop_worker()")
        self._run, self._is_over = None, True
        with self._resources:
            run.leave()

    def abandon(self, error: BaseException | None = None) -> None:
        """Ends this worker's part without leaving the run; by an error, for all workers.

        They wait for this one also where its error came before `init_worker`.
        """
        if self._run is not None:
            self._run, self._is_over = None, True
            self._resources.__exit__(type(error) if error else None, error, None)
        elif error is not None and isinstance(self._role, WorkerRole) and not self._has_called:
            abort_before_joining(self._role, error)

    def _known_role(self, call: str) -> Role:
        if self._role is None:
            raise UsageError(f"call fleet.init() before {call}")
        return self._role

    def _role_as(self, kind: type[R], call: str) -> R:
        role = self._known_role(call)
        if not isinstance(role, kind):
            whose, test = _WHOSE[kind]
            raise RoleError(
                f"{call} is for {whose}, but this process is {_named(role)}: call it where fleet.{test}()"
            )
        return role

    def _known_task(self, call: str) -> Task:
        if self._task is None:
            raise UsageError(f"call fleet.distributed_optimizer(...).minimize(model) before {call}")
        return self._task

    def _first_run(self, call: str) -> Run:
        role = self._role_as(WorkerRole, call)
        if role.worker_index != 0:
            raise RoleError(
                f"{call} is for worker 0, but this process is worker {role.worker_index}: call it where "
                "fleet.is_first_worker()"
            )
        return self.run_of(call)

    def _attachments(self) -> dict[str, bytes]:
        return {} if self._task is None else self._task.attachments(self.slot_values())


def _named(role: Role) -> str:
    match role:
        case ServerRole():
            return f"server {role.server_index}"
        case HeterRole():
            return f"heter trainer {role.heter_index}"
        case WorkerRole():
            return f"worker {role.worker_index}" if role.endpoints else "a worker without servers"
