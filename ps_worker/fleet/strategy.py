"""The training mode of a script, and its settings."""

import difflib
from typing import Any

from protos.errors import UsageError
from ps_worker.job.fleet_words import FLEET_WORDS, IGNORED
from ps_worker.job.sections.strategy import StrategySection

_KNOWN = (*FLEET_WORDS, *IGNORED, *StrategySection.model_fields)


class DistributedStrategy:
    """The keys of a job's [strategy] as attributes, in Fleet's words or our own.

    strategy = fleet.DistributedStrategy()
    strategy.a_sync = True                       # or strategy.mode = "async"
    strategy.a_sync_configs = {"k_steps": 100}   # or strategy.mode = "geo"; strategy.k_steps = 100

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
        if name not in _KNOWN:
            nearest = difflib.get_close_matches(name, _KNOWN, 1, cutoff=0.0)[0]
            raise UsageError(f"DistributedStrategy has no {name!r}, did you mean {nearest!r}?")
        super().__setattr__(name, value)

    def section(self) -> dict[str, Any]:
        """Returns what was set, as a job's [strategy]."""
        return dict(vars(self))
