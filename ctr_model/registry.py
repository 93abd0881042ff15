"""Registry of models by name, including custom models in a file."""

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast, get_type_hints

from pydantic import TypeAdapter, ValidationError

from ctr_ps.ctr_model import NEEDS_TORCH
from ctr_ps.ctr_model.layers.delayed_labels import Delay
from ctr_ps.ctr_model.models.checks import require_tasks
from ctr_ps.ctr_model.models.click_model import ClickModel
from ctr_ps.ctr_model.models.ctr_dnn import CtrDnn
from ctr_ps.ctr_model.models.dcn_v2 import DcnV2
from ctr_ps.ctr_model.models.model import Compute, Model, module_class_of, tasks_of
from ctr_ps.ctr_model.models.summed import DeepFm, Fm, LogisticRegression, WideDeep
from ctr_ps.ctr_model.schema import Schema

ModelClass = Callable[..., Model]

MODELS: dict[str, ModelClass] = {
    "lr": LogisticRegression,
    "fm": Fm,
    "ctr_dnn": CtrDnn,
    "wide_deep": WideDeep,
    "deepfm": DeepFm,
    "dcn_v2": DcnV2,
}

ZOO = {
    "auto_int": "fields:AutoInt",
    "bst": "histories:Bst",
    "din": "histories:Din",
    "final_mlp": "fields:FinalMlp",
    "gdcn": "fields:Gdcn",
    "mask_net": "fields:MaskNet",
    "wukong": "fields:Wukong",
}
"""Published models as PyTorch modules, each with its file in ctr_model/torch/zoo and its class."""

TASK_MODELS = {
    "esmm": "several_labels:Esmm",
    "mmoe": "several_labels:Mmoe",
    "ple": "several_labels:Ple",
    "pepnet": "several_labels:PepNet",
}
"""Those that learn several labels."""

_NAMED = ZOO | TASK_MODELS | {"two_towers": "two_towers:TwoTowers"}

_MODULES = _NAMED | {"program": "program:Program"}  # that of a static program (docs/fleet.md)

_ZOO_PACKAGE = "ctr_ps.ctr_model.torch.zoo"

_MEMBERS = ("tables", "segments", "num_params", "workspace", "predict", "gradient")


def build_model(name: str, schema: Schema, options: Mapping[str, Any], *, seed: int = 0) -> Model:
    """Returns a model for the columns of a schema.

    `name` is a key of `MODELS`, `TASK_MODELS` or `ZOO`, or "path/of/file.py:ClassName": a `Model`, or a
    module of PyTorch; `options` are keyword arguments of the class. `seed` is that of a module's initial
    values; those of other models are drawn by the servers. Raises ValueError if the model or an option is
    unknown (names the nearest one) or invalid, the file cannot be imported, or PyTorch is missing.
    """
    model_class = _load_class(name) if ".py" in name else class_named(name)
    abstract = sorted(getattr(model_class, "__abstractmethods__", ()))
    _refuse_without(name, abstract, _interface(ClickModel))
    checked = _checked_options(name, model_class, options)
    torch = sys.modules.get("torch")  # the file of a module has imported it
    if torch is not None and issubclass(cast("type", model_class), torch.nn.Module):
        from ctr_ps.ctr_model.torch import TorchModel  # late: an extra

        model: Model = TorchModel(schema, cast("type", model_class), checked, seed=seed)
    else:
        try:
            model = model_class(schema, **checked)
        except ValueError:
            raise
        except Exception as error:  # user code may raise anything
            raise ValueError(
                f"model {name!r}: {type(error).__name__} in its __init__(schema, ...): {error}"
            ) from error
    missing = [part for part in _MEMBERS if not hasattr(model, part)]
    _refuse_without(name, missing, f"{_interface(Model)}, or derive from torch.nn.Module")
    _require_tables(name, model, schema)
    require_tasks(f"model {name!r}", schema, tasks_of(model))
    return model


def class_named(name: str) -> ModelClass:
    """Returns the class of a built-in model; ValueError if it is unknown, or PyTorch is missing."""
    if name in MODELS:
        return MODELS[name]
    if name not in _MODULES:
        known = [*MODELS, *_NAMED]
        raise ValueError(
            f'{_unknown("model", name, known)}; a custom model is "my_model.py:MyModel"'
        )
    file, _, class_name = _MODULES[name].partition(":")
    try:
        module = importlib.import_module(f"{_ZOO_PACKAGE}.{file}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ValueError(f"model {name!r} {NEEDS_TORCH}") from error
    return cast("ModelClass", getattr(module, class_name))


def with_compute(model: Model, compute: Compute) -> Model:
    """Returns a model with gradients in a precision; ValueError without PyTorch, or if it has its own."""
    if compute == "float32":
        return model
    try:
        from ctr_ps.ctr_model.torch.bfloat16 import in_bfloat16  # late: an extra
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ValueError(f"{compute} {NEEDS_TORCH}") from error
    return in_bfloat16(model)


def with_dropout(model: Model, rate: float, seed: int) -> Model:
    """Returns a model that drops outputs of hidden layers in training with probability `rate`; 0: itself.

    Raises ValueError without hidden layers, or for a module with dropout of its own.
    """
    if not rate:
        return model
    if module_class_of(model) is not None:
        raise ValueError(
            "a PyTorch module defines dropout itself: remove this option, and set model.dropout where the "
            "module has that option, or use torch.nn.Dropout between its layers"
        )
    if isinstance(model, ClickModel):
        return model.with_dropout(rate, seed)
    raise ValueError(
        f"{type(model).__name__} does not derive from ClickModel, and only such classes have this dropout: "
        "remove this option"
    )


def with_logit_offset(model: Model, offset: float) -> Model:
    """Returns a model whose loss is that of the logit plus `offset`; ValueError for a loss of its own."""
    if not offset:
        return model
    own = getattr(model, "with_logit_offset", None)
    if own is None or not getattr(model, "has_log_loss", False):
        raise ValueError(
            f"{type(model).__name__} has its own loss, whose logit cannot be corrected: set "
            "data.negative_correction = 'weight'"
        )
    shifted: Model = own(offset)
    return shifted


def with_delay(model: Model, delay: Delay) -> Model:
    """Returns a model that corrects for delayed clicks; ValueError for several labels or its own loss."""
    if delay == "none":
        return model
    own = getattr(model, "with_delay", None)
    if own is None or not getattr(model, "has_log_loss", False):
        raise ValueError(
            f"{(module_class_of(model) or type(model)).__name__} has several labels or its own loss, but "
            f"{delay!r} needs the log loss of one click: remove this, and train on rows with final labels"
        )
    corrected: Model = own(delay)
    return corrected


def _refuse_without(name: str, missing: list[str], way_out: str) -> None:
    if missing:
        raise ValueError(f"model {name!r} has no {', '.join(missing)}: {way_out}")


def _interface(contract: type) -> str:
    return f"see the interface {contract.__module__}.{contract.__name__}"


def _require_tables(name: str, model: Model, schema: Schema) -> None:
    num_slots = len(schema.slots)
    seen: set[str] = set()
    for table in model.tables:
        where = f"model {name!r}: table {table.name!r}"
        if table.name in seen:
            raise ValueError(f"{where} occurs twice, expected unique names")
        seen.add(table.name)
        slots = range(num_slots) if table.slots is None else table.slots
        used = [*slots, *(slot for cross in table.crosses for slot in cross)]
        if not used:
            raise ValueError(f"{where} has neither slots nor crosses")
        for slot in used:
            if not 0 <= slot < num_slots:
                raise ValueError(
                    f"{where} has slot {slot}, expected slots from 0 to {num_slots - 1}"
                )
        if table.optimizer is not None and "name" not in table.optimizer:
            raise ValueError(f"{where} has an optimizer without a name: {table.optimizer!r}")


def name_of(model: Model) -> str | None:
    """Returns the name under which `build_model` builds the model again; None if it cannot."""
    module_class = module_class_of(model)
    if module_class is not None:
        if module_class.__module__ == "__main__" or "." in module_class.__qualname__:
            return None
        place = f"{module_class.__module__}:{module_class.__qualname__}"
        of_zoo = (name for name, known in _MODULES.items() if place == f"{_ZOO_PACKAGE}.{known}")
        return next(of_zoo, f"{inspect.getfile(module_class)}:{module_class.__qualname__}")
    return next((name for name, known in MODELS.items() if type(model) is known), None)


def _load_class(name: str) -> ModelClass:
    path, _, class_name = name.rpartition(":")
    if not path.endswith(".py") or not class_name.isidentifier():
        raise ValueError(f'model {name!r}: expected "path/of/file.py:ClassName"')
    if not Path(path).is_file():
        raise ValueError(
            f"model {name!r}: no file {path!r} in {str(Path.cwd())!r}; give a path relative to this folder: "
            f"--set model.name=PATH.py:{class_name}"
        )
    # A unique, stable module name per file: dataclasses and numba's disk cache look modules up by name.
    module_name = f"own_model_{hashlib.sha256(str(Path(path).resolve()).encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"model {name!r}: {path!r} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # user code may raise anything
        raise ValueError(f"model {name!r}: {_import_fault(Path(path), error)}") from error
    found = getattr(module, class_name, None)
    if not inspect.isclass(found):
        classes = [
            key
            for key, value in vars(module).items()
            if inspect.isclass(value) and value.__module__ == module.__name__
        ]
        fault = _unknown("class", class_name, classes)
        raise ValueError(f"model {name!r}: {path!r} does not define it: {fault}")
    return cast("ModelClass", found)


def _import_fault(path: Path, error: Exception) -> str:
    missing = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
    if missing == "torch":
        return f"{str(path)!r} {NEEDS_TORCH}"
    fault = f"importing {str(path)!r} failed: {type(error).__name__}: {error}"
    module = path.parent / missing.partition(".")[0]
    if missing and (module.is_dir() or module.with_suffix(".py").is_file()):
        fault += (
            "; a checkpoint carries one file for a model, without modules beside it: put their code into "
            "that file, install them, or name their folder in PYTHONPATH"
        )
    return fault


def _checked_options(
    name: str, model_class: ModelClass, options: Mapping[str, Any]
) -> dict[str, Any]:
    known = {
        key: parameter
        for key, parameter in [*inspect.signature(model_class).parameters.items()][1:]  # the schema
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    }
    for option, parameter in known.items():
        if parameter.default is inspect.Parameter.empty and option not in options:
            raise ValueError(f"model {name!r} needs the option {option!r}")
    try:
        types = get_type_hints(model_class.__init__)
    except NameError:  # annotations imported under TYPE_CHECKING
        types = {}
    checked = {}
    refused: Mapping[str, str] = getattr(model_class, "refused_options", {})
    for option, value in options.items():
        if option not in known:
            if option in refused:
                raise ValueError(f"model {name!r} has no option {option!r}: {refused[option]}")
            raise ValueError(_unknown(f"option of model {name!r}:", option, sorted(known)))
        try:
            checked[option] = TypeAdapter(types.get(option, Any)).validate_python(value)
        except ValidationError as error:
            message = error.errors()[0]["msg"]
            raise ValueError(f"model {name!r}: {option} is {value!r}: {message}") from error
    return checked


def _unknown(kind: str, name: str, known: list[str]) -> str:
    if not known:
        return f"unknown {kind} {name!r}, it has none"
    without_case = {each.casefold(): each for each in known}
    nearest = difflib.get_close_matches(name.casefold(), without_case, 1, cutoff=0.0)[0]
    return f"unknown {kind} {name!r}, did you mean {without_case[nearest]!r}? known: {', '.join(known)}"
