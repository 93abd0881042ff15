"""The training mode of a script, and its settings."""

import difflib
from typing import Any

from protos.errors import UsageError
from ps_worker.job.fleet_words import FLEET_WORDS, IGNORED
from ps_worker.job.sections.strategy import SETTINGS, StrategySection

_KNOWN = (*FLEET_WORDS, *IGNORED, *StrategySection.model_fields)


_AMP = 'minimize(model, compute="bfloat16") trains in lower precision, without a scale of the loss'
_MERGE = "strategy.async_ = {'max_merge_var_num': 4} merges batches before they are sent"
_COLLECTIVE = "it is for collective training, and parameters are on servers here: leave it out"
_ELSEWHERE = {
    "amp": _AMP,
    "amp_configs": _AMP,
    "auto": "what is to be set is set here: leave it out",
    "gradient_merge": _MERGE,
    "gradient_merge_configs": _MERGE,
    "sparse_table_configs": "minimize(model, life={...}) has them (docs/feature_life.md)",
    **dict.fromkeys(
        ("dgc", "fp16_allreduce", "lamb", "lars", "localsgd", "pipeline", "recompute", "sharding"),
        _COLLECTIVE,
    ),
}
"""Strategies of Paddle that are elsewhere, or not here, and what to write."""


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
            UsageError: If there is no such setting; names the nearest.
        """
        for name, value in settings.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _ELSEWHERE:
            if value in (None, False, {}):
                return  # as Paddle's default
            raise UsageError(f"DistributedStrategy has no {name!r} here: {_ELSEWHERE[name]}")
        if name not in _KNOWN:
            raise UsageError(f"DistributedStrategy has no {name!r}, {_advice(name, value)}")
        super().__setattr__(name, value)

    def section(self) -> dict[str, Any]:
        """Returns what was set, as a job's [strategy]."""
        fields = StrategySection.model_fields
        keys = {name: field.alias or name for name, field in fields.items()}
        return {keys.get(name, name): value for name, value in vars(self).items()}


def _advice(name: str, value: Any) -> str:
    """Returns what may be meant by an unknown name."""
    of_modes = {setting for table in SETTINGS.values() for setting in table.model_fields}
    nearest = difflib.get_close_matches(name, [*_KNOWN, *of_modes], 1, cutoff=0.0)[0]
    if nearest in of_modes:
        tables = [mode for mode in SETTINGS if nearest in SETTINGS[mode].model_fields]
        named = " or ".join("async_" if mode == "async" else mode for mode in tables)
        return f"set {named} = {{{nearest!r}: {value!r}}}"
    return f"did you mean {nearest!r}?"
