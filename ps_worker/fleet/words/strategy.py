"""The training mode of a script, and its settings."""

import difflib
from typing import Any

from ctr_ps.protos.errors import UsageError
from ctr_ps.ps_worker.job.strategy import (
    FLEET_WORDS,
    IGNORED,
    SETTINGS,
    StrategySection,
    require_options,
)

_KNOWN = (*FLEET_WORDS, *IGNORED, *StrategySection.model_fields)

_LIKENESS = 0.75  # least ratio, by difflib, of an unknown name to the one that is suggested for it


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

        Raises UsageError if there is no such setting, or option of `a_sync_configs`; says what to write.
        """
        for name, value in settings.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _KNOWN:
            raise UsageError(f"DistributedStrategy has no {name!r}{_hint(name, value)}")
        if name == "a_sync_configs":
            require_options(value)
        super().__setattr__(name, value)

    def section(self) -> dict[str, Any]:
        """Returns what was set, as a job's [strategy]."""
        fields = StrategySection.model_fields
        keys = {name: field.alias or name for name, field in fields.items()}
        return {keys.get(name, name): value for name, value in vars(self).items()}


def _hint(name: str, value: Any) -> str:
    tables = {
        "async_" if mode == "async" else mode: settings.model_fields
        for mode, settings in SETTINGS.items()
    }
    of_modes = {setting for fields in tables.values() for setting in fields}
    near = difflib.get_close_matches(name, [*_KNOWN, *of_modes], 1, cutoff=_LIKENESS)
    if not near:
        known = ", ".join((*StrategySection.model_fields, *FLEET_WORDS))
        return f": it has {known}; leave out Paddle's options of collective training"
    (nearest,) = near
    if nearest in _KNOWN:
        return f", did you mean {nearest!r}?"
    named = " or ".join(table for table, fields in tables.items() if nearest in fields)
    return f", set {named} = {{{nearest!r}: {value!r}}}"
