"""The training mode of a script, and its settings."""

import difflib
from typing import Any

from protos.errors import UsageError
from ps_worker.job.fleet_words import (
    FLEET_WORDS,
    IGNORED,
    WITHOUT_COUNTERPART,
    require_options,
)
from ps_worker.job.sections.strategy import SETTINGS, StrategySection

_KNOWN = (*FLEET_WORDS, *IGNORED, *StrategySection.model_fields)

_LIKENESS = 0.75
"""Least ratio, by difflib, of an unknown name to the one that is suggested for it."""

_AMP = 'minimize(model, compute="bfloat16") trains in lower precision, without a scale of the loss'
_MERGE = "strategy.async_ = {'max_merge_var_num': 4} merges batches before they are sent"
_COLLECTIVE = "it is for collective training, and parameters are on servers here: leave it out"
_NONE = "it has no counterpart: leave it out"
_FILES = "files are named by URL, as hdfs://name/part-0 (docs/data.md): leave it out"
_ELSEWHERE = {
    **WITHOUT_COUNTERPART,
    "amp": _AMP,
    "auto": "what is to be set is set here: leave it out",
    "gradient_merge": _MERGE,
    "lamb": "its optimizer has no counterpart: take one of fleet.optimizer, and leave it out",
    "lars": "its optimizer has no counterpart: take one of fleet.optimizer, and leave it out",
    "fs_client_param": _FILES,
    "send_wait_times": "strategy.async_ = {'max_delay_ms': 100.0} is the longest that a gradient waits for "
    "others to be merged with",
    "sparse_table": "minimize(model, life={...}) has them (docs/feature_life.md)",
    "use_ps_gpu": 'tables on a GPU are a setting of jobs, device.tables = "pass" (docs/devices.md)',
    **dict.fromkeys(
        (
            "adaptive_localsgd",
            "dgc",
            "find_unused_parameters",
            "fp16_allreduce",
            "fuse_all_reduce_ops",
            "fuse_grad_merge",
            "fuse_grad_size_in_MB",
            "fuse_grad_size_in_num",
            "gradient_scale",
            "heter_ccl_mode",
            "hierarchical_allreduce_inter_nranks",
            "hybrid",
            "last_comm_group_size_MB",
            "localsgd",
            "nccl_comm_num",
            "pipeline",
            "recompute",
            "sharding",
            "sync_batch_norm",
            "sync_nccl_allreduce",
            "tensor_parallel",
            "use_hierarchical_allreduce",
        ),
        _COLLECTIVE,
    ),
    **dict.fromkeys(
        (
            "adam_d2sum",
            "asp",
            "auto_search",
            "build_strategy",
            "conv_workspace_size_limit",
            "cudnn_batchnorm_spatial_persistent",
            "cudnn_exhaustive_search",
            "elastic",
            "execution_strategy",
            "fleet_desc",
            "is_fl_ps_mode",
            "is_with_coordinator",
            "qat",
            "semi_auto",
            "split_data",
            "trainer_desc",
            "without_graph_optimization",
        ),
        _NONE,
    ),
}
"""Strategies of Paddle that are elsewhere, or not here, and what to write; likewise of their `_configs`."""


class DistributedStrategy:
    """The keys of a job's [strategy] as attributes, in Fleet's words or our own.

    strategy = fleet.DistributedStrategy()
    strategy.a_sync = True                       # or strategy.mode = "async"
    strategy.a_sync_configs = {"k_steps": 100}   # or strategy.mode = "geo"; strategy.geo = {"k_steps": 100}

    The table `[strategy.async]` is `async_`, since `async` is a keyword of Python.
    What was not set has the default of a job. Whether all of it goes together shows when it is used.
    """

    def __init__(self, **settings: Any) -> None:
        """Takes what could be set later as well.

        Raises:
            UsageError: If there is no such setting, or option of `a_sync_configs`; says what to write.
        """
        for name, value in settings.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _KNOWN:
            elsewhere = _ELSEWHERE.get(name.removesuffix("_configs"))
            if elsewhere is None:
                raise UsageError(f"DistributedStrategy has no {name!r}, {_advice(name, value)}")
            if value in (None, False, {}):
                return  # as Paddle's default
            raise UsageError(f"DistributedStrategy has no {name!r} here: {elsewhere}")
        if name == "a_sync_configs":
            require_options(value)
        super().__setattr__(name, value)

    def section(self) -> dict[str, Any]:
        """Returns what was set, as a job's [strategy]."""
        fields = StrategySection.model_fields
        keys = {name: field.alias or name for name, field in fields.items()}
        return {keys.get(name, name): value for name, value in vars(self).items()}


def _advice(name: str, value: Any) -> str:
    """Returns what may be meant by an unknown name."""
    of_modes = {setting for table in SETTINGS.values() for setting in table.model_fields}
    near = difflib.get_close_matches(name, [*_KNOWN, *of_modes], 1, cutoff=_LIKENESS)
    if not near:
        return f"expected one of {', '.join((*StrategySection.model_fields, *FLEET_WORDS))}"
    (nearest,) = near
    if nearest in of_modes:
        tables = [mode for mode in SETTINGS if nearest in SETTINGS[mode].model_fields]
        named = " or ".join("async_" if mode == "async" else mode for mode in tables)
        return f"set {named} = {{{nearest!r}: {value!r}}}"
    return f"did you mean {nearest!r}?"
