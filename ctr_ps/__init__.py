"""The public face of ctr-ps; what is not here or in a module beside this one may change at any time.

| name | what for |
| --- | --- |
| `Trainer`, `Predictor` | training and prediction in one process, without a job file (docs/python.md) |
| `fleet` | one script for servers and workers, as in PaddlePaddle's Fleet (docs/fleet.md) |
| `torch` | models and loops in PyTorch, with rows on servers (docs/torch.md) |
| `models` | the models in numpy, and the parts that a model of one's own is made of (docs/models.md) |
| `Schema`, `DenseColumn`, `criteo_schema` | columns and slots of data (docs/schema.md) |
| `MultiSlotDataGenerator`, `MultiSlotStringDataGenerator` | users' generators of samples (docs/data.md) |
| `ClickMetrics`, `key_of` | metrics of predictions, the key of a value |
| `MultiSlotReader`, `NegativeSampling`, `convert`, `matching_files` | readers, samplers and files |
| `errors` | all errors that are raised on purpose |
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctr_ps import errors, fleet, models, torch
    from ctr_ps.ctr_model.features import key_of
    from ctr_ps.ctr_model.metrics import ClickMetrics
    from ctr_ps.ctr_model.schema import DenseColumn, Schema, criteo_schema
    from ctr_ps.ps_worker.data.blocks.negative_sampling import NegativeSampling
    from ctr_ps.ps_worker.data.files.listing import matching_files
    from ctr_ps.ps_worker.data.text.multislot import MultiSlotReader
    from ctr_ps.ps_worker.data.user_code.data_generator import (
        MultiSlotDataGenerator,
        MultiSlotStringDataGenerator,
    )
    from ctr_ps.ps_worker.extras.data_tools.convert import convert
    from ctr_ps.ps_worker.predict.predictor import Predictor
    from ctr_ps.ps_worker.trainer import Trainer

    __version__: str

__all__ = [
    "ClickMetrics",
    "DenseColumn",
    "MultiSlotDataGenerator",
    "MultiSlotReader",
    "MultiSlotStringDataGenerator",
    "NegativeSampling",
    "Predictor",
    "Schema",
    "Trainer",
    "__version__",
    "convert",
    "criteo_schema",
    "errors",
    "fleet",
    "key_of",
    "matching_files",
    "models",
    "torch",
]

_MODULES = ("errors", "fleet", "models", "torch")
_HOMES = {
    "ClickMetrics": "ctr_model.metrics",
    "DenseColumn": "ctr_model.schema",
    "MultiSlotDataGenerator": "ps_worker.data.user_code.data_generator",
    "MultiSlotStringDataGenerator": "ps_worker.data.user_code.data_generator",
    "MultiSlotReader": "ps_worker.data.text.multislot",
    "NegativeSampling": "ps_worker.data.blocks.negative_sampling",
    "Predictor": "ps_worker.predict.predictor",
    "Schema": "ctr_model.schema",
    "Trainer": "ps_worker.trainer",
    "convert": "ps_worker.extras.data_tools.convert",
    "criteo_schema": "ctr_model.schema",
    "key_of": "ctr_model.features",
    "matching_files": "ps_worker.data.files.listing",
}


def __getattr__(name: str) -> Any:
    """Imports a name when it is used: health checks and generators start in a tenth of a second."""
    if name in _MODULES:
        return importlib.import_module(f"ctr_ps.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(f"ctr_ps.{_HOMES[name]}"), name)
    if name == "__version__":
        from ctr_ps.protos.runtime.environment import own_version

        return own_version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
