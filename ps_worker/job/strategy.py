"""`[strategy]`: the training mode, and a table of settings for each mode that has some (docs/consistency.md).

Tables of other modes than `mode` are checked, but not used, and omitted when the job is written. The words of
PaddlePaddle's Fleet are translated before all checks, so that a job has one form, whatever words it was
written in:

    a_sync   k_steps    mode
    false    <= 0       sync
    true     <= 0       async
    true     > 0        geo

No `k_steps` counts as 0. The settings of `a_sync_configs` keep their names, in the table of the mode.
"""

import logging
from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import Field, model_serializer

from ctr_ps.protos.errors import JobError, did_you_mean
from ctr_ps.ps_worker.job.sections import Section

logger = logging.getLogger(__name__)

Mode = Literal["sync", "half_async", "async", "geo", "bounded_staleness"]


class AsyncSettings(Section):
    """`[strategy.async]`: when a worker's gradients are sent, and in which precision.

    The first batches of a fresh model are not merged (docs/consistency.md#the-first-steps).
    """

    max_merge_var_num: int = Field(1, ge=1)
    max_merge_dense_num: int = Field(4, ge=1)
    send_queue_size: int = Field(4, ge=1)
    max_delay_ms: float = Field(100.0, gt=0)
    wire_dtype: Literal["float32", "bfloat16"] = "float32"


class BoundedStalenessSettings(AsyncSettings):
    """`[strategy.bounded_staleness]`: those of `async`, with values of their own, and the bound in steps."""

    max_staleness: int = Field(8, ge=0)


class GeoSettings(Section):
    """`[strategy.geo]`: exchanges of a worker's replica with the servers."""

    k_steps: int = Field(100, ge=1)
    max_replica_mb: int = Field(8192, ge=1)


SETTINGS: dict[Mode, type[Section]] = {
    "async": AsyncSettings,
    "geo": GeoSettings,
    "bounded_staleness": BoundedStalenessSettings,
}
"""The settings of each mode that has some."""


class StrategySection(Section):
    """The training mode, and the settings of modes; the key of `async_` is `async`."""

    mode: Mode = "async"
    async_: AsyncSettings = Field(AsyncSettings(), alias="async")
    geo: GeoSettings = GeoSettings()
    bounded_staleness: BoundedStalenessSettings = BoundedStalenessSettings()

    @property
    def is_sync(self) -> bool:
        """Whether all workers share each step."""
        return self.mode == "sync"

    @property
    def settings(self) -> Section | None:
        """The settings of the current mode, or None."""
        tables: dict[Mode, Section] = {
            "async": self.async_,
            "geo": self.geo,
            "bounded_staleness": self.bounded_staleness,
        }
        return tables.get(self.mode)

    def in_use(self) -> dict[str, Any]:
        """Returns the mode and its settings, by their keys within the section: "geo.k_steps"."""
        settings = {} if self.settings is None else self.settings.model_dump(mode="json")
        return {"mode": self.mode, **{f"{self.mode}.{key}": settings[key] for key in settings}}

    @model_serializer
    def _with_settings_of_mode(self) -> dict[str, Any]:
        if self.settings is None:
            return {"mode": self.mode}
        return {"mode": self.mode, self.mode: self.settings.model_dump()}


FLEET_WORDS = ("a_sync", "a_sync_configs")
"""Keys of `[strategy]` that are Fleet's."""

TRANSLATED = ("k_steps", "max_merge_var_num", "send_queue_size")
"""Options of `a_sync_configs` that are settings here."""

IGNORED = {
    "independent_recv_thread": True,
    "min_send_grad_num_before_recv": 1,
    "launch_barrier": True,
}
"""Options of `a_sync_configs` that are accepted without an effect, with the value that describes training:
a thread of its own fetches the dense parameters, after each dense push, and workers wait for each other
before their first step."""


class FleetWordError(JobError):
    """A word of Fleet cannot be translated; `key` is its path: ("strategy", "a_sync")."""

    def __init__(self, path: tuple[str, ...], fault: str) -> None:
        self.key = ("strategy", *path)
        super().__init__(f"{'.'.join(self.key)} {fault}")


def translated(strategy: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a `[strategy]` with Fleet's words translated; other words are passed on unchecked.

    Raises FleetWordError if a word has no counterpart, is unknown, has no use in the mode of the others, or
    contradicts another.
    """
    own = {name: value for name, value in strategy.items() if name not in FLEET_WORDS}
    own = _without_ignored(own, "strategy")
    _refuse_tables_without_settings(own)
    if not any(word in strategy for word in FLEET_WORDS):
        return own
    configs = require_options(strategy.get("a_sync_configs", {}))
    configs = _without_ignored(configs, "strategy.a_sync_configs")
    mode = _mode(strategy, configs)
    settings = {name: value for name, value in configs.items() if name != "k_steps" or value > 0}
    own_settings = own.get(str(mode), {})
    if not settings or mode not in get_args(Mode) or not isinstance(own_settings, Mapping):
        return {**own, "mode": mode}  # what is wrong with it is refused later
    _refuse_without_use(settings, mode)
    if twice := sorted(own_settings.keys() & settings.keys()):
        raise FleetWordError(
            ("a_sync_configs", twice[0]),
            f"is given as strategy.{mode}.{twice[0]} too: remove one of the two",
        )
    return {**own, "mode": mode, mode: {**own_settings, **settings}}


def require_options(configs: object) -> Mapping[str, Any]:
    """Returns `a_sync_configs`; raises FleetWordError if it is no table or has a wrong option."""
    key = ("a_sync_configs",)
    if not isinstance(configs, Mapping):
        raise FleetWordError(key, f"is {configs!r}, expected options by name, such as k_steps")
    for name in configs:
        if name not in (*TRANSLATED, *IGNORED):
            hint = did_you_mean(name, TRANSLATED, likeness=0.6)
            known = ", ".join((*TRANSLATED, *IGNORED))
            raise FleetWordError((*key, name), f"is unknown{hint or ','} known: {known}")
    k_steps = configs.get("k_steps", 0)
    if isinstance(k_steps, bool) or not isinstance(k_steps, int):
        raise FleetWordError((*key, "k_steps"), f"is {k_steps!r}, expected a whole number")
    return configs


def aliases_of(strategy: Mapping[str, Any], mode: str) -> dict[tuple[str, ...], tuple[str, ...]]:
    """Returns the written key of each of Fleet's words, by its key after translation.

    `strategy` is as written, and translatable; `mode` is the translated one.
    """
    aliases: dict[tuple[str, ...], tuple[str, ...]] = {
        ("strategy", mode, name): ("strategy", "a_sync_configs", name)
        for name in strategy.get("a_sync_configs", {})
    }
    if "a_sync" in strategy and "mode" not in strategy:
        aliases["strategy", "mode"] = ("strategy", "a_sync")
    return aliases


def _without_ignored(words: Mapping[str, Any], table: str) -> dict[str, Any]:
    """Returns the words that have an effect; warns of others whose value differs from what happens."""
    for name, value in IGNORED.items():
        if words.get(name, value) != value:
            logger.warning(
                "%s.%s is %r, ignored: workers always use %r", table, name, words[name], value
            )
    return {name: value for name, value in words.items() if name not in IGNORED}


def _mode(strategy: Mapping[str, Any], configs: Mapping[str, Any]) -> Any:
    a_sync = strategy.get("a_sync", True)  # as Fleet's default
    if not isinstance(a_sync, bool):
        raise FleetWordError(
            ("a_sync",),
            f'is {a_sync!r}, expected true or false; for a mode by name set strategy.mode = "half_async"',
        )
    k_steps = configs.get("k_steps", 0)
    if "mode" not in strategy:
        return "sync" if not a_sync else "geo" if k_steps > 0 else "async"
    mode = strategy["mode"]
    if "a_sync" in strategy and a_sync == (mode == "sync"):  # true goes with all other modes
        raise FleetWordError(
            ("a_sync",), f"is {a_sync}, but mode is {mode!r}: remove one of the two"
        )
    if "k_steps" in configs and k_steps <= 0 and mode == "geo":
        raise FleetWordError(
            ("a_sync_configs", "k_steps"),
            f"is {k_steps}, but mode is 'geo': expected 1 or more batches, or remove it",
        )
    return mode


def _refuse_without_use(configs: Mapping[str, Any], mode: Mode) -> None:
    used = SETTINGS.get(mode)
    for name, value in configs.items():
        if used is None or name not in used.model_fields:
            raise FleetWordError(
                ("a_sync_configs", name),
                f"is {value!r}, but mode {mode!r} does not use it: remove it",
            )


def _refuse_tables_without_settings(strategy: Mapping[str, Any]) -> None:
    for mode in get_args(Mode):
        if mode not in SETTINGS and isinstance(strategy.get(mode), Mapping):
            raise FleetWordError(
                (mode,),
                f"does not exist: mode {mode!r} has no settings; modes with settings are "
                f"{', '.join(SETTINGS)}",
            )
