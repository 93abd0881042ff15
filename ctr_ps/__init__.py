"""The public face of ctr-ps; what is not here or in a module beside this one may change at any time.

| name | what for |
| --- | --- |
| `Trainer`, `Predictor` | training and prediction in one process, without a job file (docs/python.md) |
| `fleet` | one script for servers and workers, as in PaddlePaddle's Fleet (docs/fleet.md) |
| `paddle` | static programs in the names of PaddlePaddle (docs/fleet.md) |
| `torch` | models and loops in PyTorch, with rows on servers (docs/torch.md) |
| `models` | the models in numpy, and the parts that a model of one's own is made of (docs/models.md) |
| `Schema`, `DenseColumn`, `criteo_schema` | columns and slots of data (docs/schema.md) |
| `MultiSlotDataGenerator`, `MultiSlotStringDataGenerator` | users' generators of samples (docs/data.md) |
| `ClickMetrics`, `key_of` | metrics of predictions, the key of a value |
| `MultiSlotReader`, `NegativeSampling`, `DataPosition`, `piped`, `generated` | reading (docs/data.md) |
| `FileSplit`, `Block`, `SlotValues` | what a reader of your own yields (docs/data.md) |
| `convert`, `matching_files`, `SavedModel` | files to Parquet, files by pattern, rows of a checkpoint |
| `errors` | errors of jobs, data, servers and checkpoints |
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctr_ps import errors as errors
    from ctr_ps import fleet as fleet
    from ctr_ps import models as models
    from ctr_ps import paddle as paddle
    from ctr_ps import torch as torch
    from ctr_ps.ctr_model.features import key_of
    from ctr_ps.ctr_model.metrics import ClickMetrics
    from ctr_ps.ctr_model.schema import DenseColumn, Schema, criteo_schema
    from ctr_ps.ps_server.checkpoint.saved_model import SavedModel
    from ctr_ps.ps_worker.data.blocks import Block, DataPosition
    from ctr_ps.ps_worker.data.files.file_split import FileSplit
    from ctr_ps.ps_worker.data.files.listing import matching_files
    from ctr_ps.ps_worker.data.negative_sampling import NegativeSampling
    from ctr_ps.ps_worker.data.slot_values import SlotValues
    from ctr_ps.ps_worker.data.text.multislot import MultiSlotReader
    from ctr_ps.ps_worker.data.user_code.data_generator import (
        MultiSlotDataGenerator,
        MultiSlotStringDataGenerator,
    )
    from ctr_ps.ps_worker.data.user_code.generator_reader import generated
    from ctr_ps.ps_worker.data.user_code.pipe import piped
    from ctr_ps.ps_worker.extras.data_tools.convert import convert
    from ctr_ps.ps_worker.predict.predictor import Predictor
    from ctr_ps.ps_worker.trainer import Trainer

    __version__: str

__all__ = [
    "Block",
    "ClickMetrics",
    "DataPosition",
    "DenseColumn",
    "FileSplit",
    "MultiSlotDataGenerator",
    "MultiSlotReader",
    "MultiSlotStringDataGenerator",
    "NegativeSampling",
    "Predictor",
    "SavedModel",
    "Schema",
    "SlotValues",
    "Trainer",
    "__version__",
    "convert",
    "criteo_schema",
    "generated",
    "key_of",
    "matching_files",
    "piped",
]

_MODULES = ("errors", "fleet", "models", "paddle", "torch")
_HOMES = {
    "Block": "ps_worker.data.blocks",
    "ClickMetrics": "ctr_model.metrics",
    "DataPosition": "ps_worker.data.blocks",
    "DenseColumn": "ctr_model.schema",
    "FileSplit": "ps_worker.data.files.file_split",
    "MultiSlotDataGenerator": "ps_worker.data.user_code.data_generator",
    "MultiSlotReader": "ps_worker.data.text.multislot",
    "MultiSlotStringDataGenerator": "ps_worker.data.user_code.data_generator",
    "NegativeSampling": "ps_worker.data.negative_sampling",
    "Predictor": "ps_worker.predict.predictor",
    "SavedModel": "ps_server.checkpoint.saved_model",
    "Schema": "ctr_model.schema",
    "SlotValues": "ps_worker.data.slot_values",
    "Trainer": "ps_worker.trainer",
    "convert": "ps_worker.extras.data_tools.convert",
    "criteo_schema": "ctr_model.schema",
    "generated": "ps_worker.data.user_code.generator_reader",
    "key_of": "ctr_model.features",
    "matching_files": "ps_worker.data.files.listing",
    "piped": "ps_worker.data.user_code.pipe",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})


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
