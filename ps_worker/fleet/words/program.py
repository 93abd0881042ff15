"""Static programs as in Paddle: variables and layers, of which `minimize(loss)` makes a PyTorch module.

    click = paddle.static.data("click", [None, 1], "int64")
    user = paddle.static.data("user", [None, 1], "int64", lod_level=1)
    rows = paddle.static.nn.sparse_embedding(user, size=[1000, 8])
    predict = paddle.static.nn.fc(rows, size=2, activation="softmax")
    loss = paddle.mean(paddle.nn.functional.cross_entropy(input=predict, label=click))

The rows of a slot's keys are summed. There is no vocabulary size: of `size` only the width counts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ctr_ps.ctr_model.models.model import Model
from ctr_ps.ctr_model.schema import DenseColumn, Schema
from ctr_ps.protos.errors import UsageError
from ctr_ps.ps_worker.fleet.words.parameters import (
    Entry,
    Initializer,
    ParamAttr,
    of_shape,
    range_of_rows,
    require_defaults,
)

ACTIVATIONS = ("relu", "sigmoid", "tanh", "softmax")

_OF_ALL = {"name": None, "weight": None, "reduction": "mean"}
_OF_CROSS_ENTROPY = {
    **_OF_ALL,
    "axis": -1,
    "ignore_index": -100,
    "label_smoothing": 0.0,
    "soft_label": False,
    "use_softmax": True,
}


class StaticProgram:
    """The columns that a script has declared, and which of them is the label."""

    random_seed = 0  # of `paddle.seed`, or set for a program

    def __init__(self) -> None:
        self.startup = self  # has the random seed, if not this
        self.columns: list[Variable] = []
        self.label: Variable | None = None
        self.num_tables = 0
        # width, range and entry of each table; the names of layers' weights
        self.tables: dict[str, tuple[int, float, Entry | None]] = {}
        self.weights: set[str] = set()

    @property
    def seed(self) -> int:
        """The seed of its initial values."""
        return self.random_seed or self.startup.random_seed

    def life(self, of_script: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a job's [life], with the entries of tables that it has no admission for."""
        tables = dict(of_script.get("tables", {}))
        for name, (*_, entry) in self.tables.items():
            if entry is not None:
                tables[name] = {"admission": entry, **tables.get(name, {})}
        return {**of_script, "tables": tables}

    def clone(self, for_test: bool = False) -> "StaticProgram":
        """Returns this program: predictions leave dropout out anyway."""
        return self

    @property
    def features(self) -> list["Variable"]:
        """The columns without the label."""
        return [each for each in self.columns if each is not self.label]

    def schema(self) -> Schema:
        """Returns the schema of the columns in the order of their declaration."""
        if self.label is None:
            raise UsageError(
                "which column is the label is known from the loss: make it before init()"
            )
        names = [
            each.name if each.width == 1 else f"{each.name}_{index}"
            for each in self.features
            if each.op == "dense"
            for index in range(each.width)
        ]
        return Schema(
            dense=tuple(DenseColumn(name=name) for name in names),
            slots=tuple(each.name for each in self.features if each.op == "keys"),
            label=self.label.name,
        )


_PROGRAMS = [StaticProgram()]  # the last one is the current one


def default_main_program() -> StaticProgram:
    """Returns the program to which columns and layers are added."""
    return _PROGRAMS[-1]


@contextmanager
def program_guard(
    main_program: StaticProgram, startup_program: StaticProgram | None = None
) -> Iterator[None]:
    """Adds columns and layers to a program."""
    main_program.startup = startup_program or main_program
    _PROGRAMS.append(main_program)
    try:
        yield
    finally:
        _PROGRAMS.pop()


def seed(seed: int) -> None:
    """Sets the seed of initial values, of programs that have none of their own."""
    StaticProgram.random_seed = seed


@dataclass(frozen=True, eq=False)
class Variable:
    """The data of a column, or what an operation makes of others: [B, width]."""

    op: str  # "dense" or "keys" of a column, or an operation of `Program`
    width: int
    inputs: tuple["Variable", ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    name: str = ""  # of a column
    program: StaticProgram = field(default_factory=default_main_program)

    @property
    def shape(self) -> tuple[int, int]:
        """Its shape, in which the number of examples is -1."""
        return (-1, self.width)

    def __add__(self, other: "Variable") -> "Variable":
        return operation("add")(self, other)

    def __sub__(self, other: "Variable") -> "Variable":
        return operation("subtract")(self, other)

    def __mul__(self, other: "Variable | float") -> "Variable":
        if isinstance(other, int | float):
            return Variable("scale", self.width, (self,), {"factor": float(other)})
        return operation("multiply")(self, other)

    __rmul__ = __mul__


@dataclass(frozen=True)
class Loss:
    """The log loss of a logit: what `minimize` takes, in place of a model."""

    logit: Variable
    label: Variable

    def __post_init__(self) -> None:
        """Raises UsageError unless the label is a column, and the only label of its program."""
        program = self.label.program
        if self.label not in program.columns or program.label not in (None, self.label):
            raise UsageError(
                f"the label is {self.label.name or self.label.op!r}, expected one column for all losses"
            )
        program.label = self.label

    def model_of_program(self, seed: int) -> Model:
        """Returns the module of the program; its columns are those of `data`."""
        # Late: an extra, whose absence this import says.
        import ctr_ps.ctr_model.torch as modules
        from ctr_ps.ctr_model.torch.zoo.program import Program

        program = self.label.program
        numbers = [each for each in program.features if each.op == "dense"]
        if len(numbers) > 1:
            raise UsageError(
                f"there are several columns of numbers, {', '.join(each.name for each in numbers)}, "
                "expected one, whose shape is [None, N]"
            )
        return modules.TorchModel(
            program.schema(), Program, {"operations": _listed(self.logit)}, seed=seed
        )


def _listed(result: Variable) -> list[dict[str, Any]]:
    """Returns the operations of a result in their order, as `Program` takes them."""
    places: dict[int, int] = {}
    operations: list[dict[str, Any]] = []

    def place(each: Variable) -> int:
        if each.op in ("keys", "metric"):
            why = "used without a sparse_embedding" if each.name else "no part of the network"
            raise UsageError(f"the {each.op} {each.name!r} are {why}")
        if id(each) not in places:
            inputs = [place(one) for one in each.inputs]
            of_all = {"op": each.op, "width": each.width, "inputs": inputs}
            operations.append({**of_all, **each.settings})
            places[id(each)] = len(operations) - 1
        return places[id(each)]

    place(result)
    return operations


def schema_of(columns: object, what: str) -> tuple[Schema, list[str]]:
    """Returns the schema of the program, and the order of its variables as columns of multi-slot text.

    Raises UsageError if `columns`, called `what`, are not all of these variables.
    """
    given = list(columns) if isinstance(columns, Sequence) else []
    if not given or not all(isinstance(each, Variable) for each in given):
        raise UsageError(
            f"{what} is {columns!r}, expected a Schema of the columns, ctr_ps.Schema(dense=(DenseColumn(name="
            "'age'),), slots=('user', 'ad')), or variables of paddle.static.data"
        )
    program = given[0].program
    names, declared = ([each.name for each in these] for these in (given, program.columns))
    if sorted(names) != sorted(declared):
        raise UsageError(
            f"{what} has {', '.join(names)}, expected each variable of static.data once: "
            f"{', '.join(declared)}"
        )
    order = [
        "dense_input" if each.op == "dense" and each is not program.label else each.name
        for each in given
    ]
    return program.schema(), order


def data(
    name: str, shape: Sequence[int | None], dtype: str = "float32", lod_level: int = 0
) -> Variable:
    """Declares a column: numbers if it is float32, the label or the keys of a slot if it is int64."""
    if dtype not in ("float32", "int64"):
        raise UsageError(f"dtype of {name!r} is {dtype!r}, expected 'float32' or 'int64'")
    width = shape[-1] or 0
    if dtype == "float32" and width < 1:
        raise UsageError(f"shape of {name!r} is {shape}, expected [None, N]")
    found = Variable("keys" if dtype == "int64" else "dense", max(width, 1), name=name)
    found.program.columns.append(found)
    return found


def sparse_embedding(
    input: Variable,
    size: Sequence[int],
    *,
    param_attr: "ParamAttr | None" = None,
    padding_idx: int | None = None,
    entry: object = None,
    is_test: bool = False,
    is_sparse: bool = True,
    is_distributed: bool = True,
    table_class: str = "",
    dtype: str = "float32",
) -> Variable:
    """Looks up the keys of a slot: the sum of their rows, [B, size[1]].

    Slots whose `param_attr` have one name share a table.
    """
    if not (isinstance(input, Variable) and input.op == "keys"):
        raise UsageError(
            f"the input of sparse_embedding is {input!r}, expected data of dtype int64"
        )
    if padding_idx is not None:
        raise UsageError(
            f"padding_idx of sparse_embedding is {padding_idx!r}, but is not supported: leave it out"
        )
    if not isinstance(entry, dict | None):
        raise UsageError(
            f"entry of sparse_embedding is {entry!r}, expected a CountFilterEntry or ProbabilityEntry of "
            "paddle.distributed; for other rules minimize(loss, life={...}), docs/feature_life.md"
        )
    program = default_main_program()
    program.num_tables += 1
    attr = param_attr or ParamAttr()
    table = attr.name or f"embedding_{program.num_tables}"
    of_table = (size[1], range_of_rows(of_shape(attr.initializer, size[0], size[1])), entry)
    if (known := program.tables.setdefault(table, of_table)) != of_table:
        raise UsageError(
            f"table {table!r} has width, range and entry {of_table}, and {known} elsewhere: slots of a "
            "table share them"
        )
    settings = {"slot": input.name, "table": table, "pooling": "sum", "init_range": of_table[1]}
    return Variable("embedding", size[1], (), settings)


def sequence_pool(input: Variable, pool_type: str) -> Variable:
    """Pools the rows of a slot by "sum", "average" or "max"."""
    poolings = {"sum": "sum", "average": "mean", "max": "max"}
    if input.op != "embedding" or pool_type not in poolings:
        raise UsageError(
            f"sequence_pool({input.op}, {pool_type!r}): expected a sparse_embedding, and one of "
            f"{', '.join(poolings)}"
        )
    return Variable(
        "embedding", input.width, (), {**input.settings, "pooling": poolings[pool_type]}
    )


def fc(
    x: Variable | Sequence[Variable],
    size: int,
    *,
    num_flatten_dims: int = 1,
    weight_attr: "ParamAttr | Initializer | None" = None,
    bias_attr: "ParamAttr | Initializer | bool | None" = None,
    activation: str | None = None,
    name: str | None = None,
) -> Variable:
    """Returns activation(W x + b), [B, size]; several x are concatenated."""
    inputs = x if isinstance(x, Variable) else concat(x)
    if num_flatten_dims not in (1, -1):
        raise UsageError(f"num_flatten_dims of fc is {num_flatten_dims}, expected 1")
    if activation not in (None, *ACTIVATIONS):
        raise UsageError(f"activation of fc is {activation!r}, expected {', '.join(ACTIVATIONS)}")
    weights = default_main_program().weights
    attrs = {
        name: ParamAttr(initializer=attr) if isinstance(attr, tuple) else attr
        for name, attr in (("weight", weight_attr), ("bias", bias_attr))
    }
    if not all(isinstance(each, ParamAttr | bool | None) for each in attrs.values()):
        raise UsageError(f"weight_attr or bias_attr of fc is {attrs}, expected one ParamAttr each")
    for attr in attrs.values():
        if isinstance(attr, ParamAttr) and attr.name:
            if attr.name in weights:
                raise UsageError(
                    f"two layers have the parameter {attr.name!r}, but none can be shared"
                )
            weights.add(attr.name)
    fan_in = {"weight": inputs.width, "bias": size}
    settings: dict[str, Any] = {
        name: list(of_shape(attr.initializer, fan_in[name], size) or ())
        if isinstance(attr, ParamAttr)
        else []
        for name, attr in attrs.items()
    }
    if bias_attr is False:
        settings["bias"] = None
    found = Variable("fc", size, (inputs,), settings)
    return found if activation is None else operation(activation)(found)


def concat(x: Sequence[Variable], axis: int = 1) -> Variable:
    """Returns variables beside each other."""
    if axis not in (1, -1):
        raise UsageError(f"axis of concat is {axis}, expected 1: examples stay apart")
    return Variable("concat", sum(each.width for each in x), tuple(x))


def sum_of(x: Variable, axis: int = 1, keepdim: bool = True) -> Variable:
    """Returns the sum of each row, [B, 1]."""
    if axis not in (1, -1):
        raise UsageError(f"axis of sum is {axis}, expected 1: examples stay apart")
    return Variable("sum", 1, (x,))


def dropout(x: Variable, p: float = 0.5) -> Variable:
    """Drops values in training, with probability p."""
    if not 0 <= p < 1:
        raise UsageError(f"p of dropout is {p}, expected 0 to 1")
    return Variable("dropout", x.width, (x,), {"rate": p})


def operation(op: str) -> Callable[..., Variable]:
    """Returns a function of variables of one width, or of width 1."""

    def apply(*x: Variable, name: str | None = None, axis: int = -1) -> Variable:
        if not all(isinstance(each, Variable) for each in x) or axis not in (1, -1):
            raise UsageError(f"{op} of {x}, axis {axis}: expected variables, and axis 1")
        widths = {each.width for each in x} - {1}
        if len(widths) > 1:
            raise UsageError(f"{op} of widths {sorted(widths)}, expected equal ones, or 1")
        return Variable(op, max(each.width for each in x), x)

    return apply


def cross_entropy(input: Variable, label: Variable, **of_paddle: object) -> Loss:
    """Returns the loss of the probabilities or logits of two classes, [B, 2]."""
    if of_paddle.get("use_softmax") is False and input.op == "softmax":
        of_paddle["use_softmax"] = True  # as is done here: the softmax counts once
    require_defaults("cross_entropy", of_paddle, _OF_CROSS_ENTROPY)
    if input.width != 2:
        raise UsageError(f"cross_entropy of {input.width} classes, expected 2: no click, click")
    inner = input.inputs[0] if input.op == "softmax" else input
    return Loss(Variable("log_odds", 1, (inner,)), label)


def binary_cross_entropy(input: Variable, label: Variable, **of_paddle: object) -> Loss:
    """Returns the loss of the probability of a click, [B, 1]: the result of a sigmoid."""
    require_defaults("binary_cross_entropy", of_paddle, {**_OF_ALL, "epsilon": 1e-4})
    if input.op != "sigmoid" or input.width != 1:
        raise UsageError(
            f"the input is the result of {input.op}, {input.width} wide, expected that of a sigmoid, 1 wide"
        )
    return Loss(input.inputs[0], label)


def binary_cross_entropy_with_logits(logit: Variable, label: Variable, **of_paddle: object) -> Loss:
    """Returns the loss of the logit of a click, [B, 1]."""
    require_defaults("binary_cross_entropy_with_logits", of_paddle, {**_OF_ALL, "pos_weight": None})
    if logit.width != 1:
        raise UsageError(f"the logit is {logit.width} wide, expected 1")
    return Loss(logit, label)


def mean(x: Loss) -> Loss:
    """Returns the loss: a step applies its mean anyway."""
    if not isinstance(x, Loss):
        raise UsageError(f"mean of {x!r}, expected a loss")
    return x


def metric(input: Variable, label: Variable, *_: object, **__: object) -> Variable:
    """Stands for a metric, which training prints."""
    return Variable("metric", 1, (input, label))
