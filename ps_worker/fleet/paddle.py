"""The names of the package `paddle` in a script with a static program; words/program.py has its layers."""

import sys
from types import SimpleNamespace
from typing import Any, NoReturn

from ctr_ps.protos.errors import UsageError
from ctr_ps.ps_worker.fleet import executor, optimizer
from ctr_ps.ps_worker.fleet.words import datasets, parameters, program
from ctr_ps.ps_worker.fleet.words.unknown import unknown_name


class _Names(SimpleNamespace):
    """Names of a module of Paddle; others say what there is."""

    def __getattr__(self, name: str) -> NoReturn:
        raise unknown_name("this part of ctr_ps.paddle", name, vars(self))


class _Executor(executor.Executor):
    """The executor of a script; its place counts for nothing."""

    def __init__(self, place: object = None) -> None: ...

    def run(
        self,
        program: object = None,
        feed: object = None,
        fetch_list: object = None,
        **of_paddle: object,
    ) -> list[None]:
        """Does nothing for a program that starts up; raises UsageError for a step."""
        if feed is not None or fetch_list is not None:
            raise UsageError(
                "executor.run() makes no steps: train with executor.train_from_dataset(dataset), or in "
                "a loop with executor.steps(loader)"
            )
        return []


def _nothing(*_: object, **__: object) -> Any:
    """Stands for what has no counterpart here, and needs none: places, modes."""


_OF_KAIMING = {"fan_in": None, "negative_slope": 0.0, "nonlinearity": "relu"}
_OF_XAVIER = {"fan_in": None, "fan_out": None, "gain": 1.0}
_FUNCTIONAL = {name: program.operation(name) for name in program.ACTIVATIONS}
_OF_STATIC = {
    "Executor": _Executor,
    "Program": program.StaticProgram,
    "accuracy": program.metric,
    "auc": lambda *args, **named: (*[program.metric(*args, **named)] * 2, [None] * 4),
    "data": program.data,
    "default_main_program": program.default_main_program,
    "default_startup_program": lambda: program.default_main_program().startup,
    "program_guard": program.program_guard,
    "nn": _Names(
        embedding=program.sparse_embedding,
        fc=program.fc,
        sequence_lod=_Names(sequence_pool=program.sequence_pool),
        sequence_pool=program.sequence_pool,
        sparse_embedding=program.sparse_embedding,
    ),
}
PADDLE = _Names(
    CPUPlace=_nothing,
    ParamAttr=parameters.ParamAttr,
    add=program.operation("add"),
    cast=lambda x, dtype: x,
    concat=program.concat,
    distributed=_Names(
        CountFilterEntry=parameters.entry("count", int, sys.maxsize),
        InMemoryDataset=datasets.InMemoryDataset,
        ProbabilityEntry=parameters.entry("probability", float, 1.0),
        QueueDataset=datasets.QueueDataset,
    ),
    enable_static=_nothing,
    mean=program.mean,
    multiply=program.operation("multiply"),
    nn=_Names(
        functional=_Names(
            binary_cross_entropy=program.binary_cross_entropy,
            binary_cross_entropy_with_logits=program.binary_cross_entropy_with_logits,
            cross_entropy=program.cross_entropy,
            dropout=program.dropout,
            log_loss=program.binary_cross_entropy,
            **_FUNCTIONAL,
        ),
        ClipGradByGlobalNorm=optimizer.ClipGradByGlobalNorm,
        initializer=_Names(
            Constant=parameters.initializer("constant", value=0.0),
            KaimingNormal=parameters.initializer("kaiming_normal", **_OF_KAIMING),
            KaimingUniform=parameters.initializer("kaiming_uniform", **_OF_KAIMING),
            Normal=parameters.initializer("normal", mean=0.0, std=1.0),
            TruncatedNormal=parameters.initializer("truncated_normal", mean=0.0, std=1.0),
            Uniform=parameters.initializer("uniform", low=-1.0, high=1.0),
            XavierNormal=parameters.initializer("xavier_normal", **_OF_XAVIER),
            XavierUniform=parameters.initializer("xavier_uniform", **_OF_XAVIER),
        ),
    ),
    optimizer=optimizer,
    regularizer=_Names(L2Decay=optimizer.L2Decay),
    seed=program.seed,
    square=program.operation("square"),
    static=_Names(**_OF_STATIC),
    subtract=program.operation("subtract"),
    sum=program.sum_of,
)
"""The names that a script has of the package `paddle`."""
