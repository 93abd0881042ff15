"""The models in numpy, and what a model of one's own is made of (docs/models.md)."""

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.layers.losses import SOFTMAX, Loss
from ctr_ps.ctr_model.layers.mlp import Mlp
from ctr_ps.ctr_model.layers.pooling import require_widths
from ctr_ps.ctr_model.models.click_model import ClickModel
from ctr_ps.ctr_model.models.ctr_dnn import CtrDnn
from ctr_ps.ctr_model.models.dcn_v2 import DcnV2
from ctr_ps.ctr_model.models.summed import DeepFm, Fm, LogisticRegression, WideDeep
from ctr_ps.ctr_model.parameters import EmbeddingTable, Floats, Lookup, Segment
from ctr_ps.ctr_model.registry import with_compute

__all__ = [
    "SOFTMAX",
    "Batch",
    "ClickModel",
    "CtrDnn",
    "DcnV2",
    "DeepFm",
    "EmbeddingTable",
    "Floats",
    "Fm",
    "LogisticRegression",
    "Lookup",
    "Loss",
    "Mlp",
    "Segment",
    "WideDeep",
    "require_widths",
    "with_compute",
]
