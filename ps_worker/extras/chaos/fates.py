"""Which calls of a worker get which faults: the rules of `ps_worker.extras.chaos.channels`, without gRPC.

The n-th call of a name to a server has the same fate in every run of the same seed, whatever runs beside it.
"""

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from ctr_ps.protos.errors import UsageError
from ctr_ps.protos.wire.calls import CALLS, Moves
from ctr_ps.ps_worker.extras.chaos import CHAOS

_CALLS: Mapping[str, frozenset[str]] = {
    "pushes": frozenset(name for name, call in CALLS.items() if Moves.TO_SERVER in call.moves),
    "pulls": frozenset(name for name, call in CALLS.items() if Moves.FROM_SERVER in call.moves),
    "calls": frozenset(CALLS),
}
_KINDS = ("drop", "duplicate", "delay")


@dataclass(frozen=True, slots=True)
class Fault:
    """What is done to calls.

    Attributes:
        kind: "drop", "duplicate" or "delay".
        calls: "pushes", "pulls", or "calls": all.
        amount: Share of the calls, from 0 to 1; of a delay the seconds.
    """

    kind: str
    calls: str
    amount: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What happens to one call."""

    is_request_lost: bool = False
    is_reply_lost: bool = False
    is_duplicated: bool = False
    delay_s: float = 0.0

    @property
    def faults(self) -> list[str]:
        """Their names in the journal."""
        if self.is_request_lost:
            return ["request_lost"]
        happens = {
            "reply_lost": self.is_reply_lost,
            "duplicated": self.is_duplicated,
            "delayed": self.delay_s > 0,
        }
        return [name for name in happens if happens[name]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chaos:
    """Faults of a worker's calls.

    Attributes:
        seed: Of the choice of calls.
        faults: Each is chosen by itself; all that are chosen for a call happen to it.
        journal: File to which a line "fault call server" is appended for each; empty: none.
    """

    seed: str
    faults: Sequence[Fault]
    journal: str = ""

    @classmethod
    def from_json(cls, text: str) -> "Chaos":
        """Returns what `CTR_PS_CHAOS` says.

        Raises:
            UsageError: If it cannot be read.
        """
        try:
            value = json.loads(text)
            faults = [Fault(str(kind), str(calls), float(n)) for kind, calls, n in value["faults"]]
            chaos = cls(seed=str(value["seed"]), journal=value.get("journal", ""), faults=faults)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UsageError(f"{CHAOS} is {text!r}, which is no chaos: {error!r}") from error
        for fault in faults:
            if fault.kind not in _KINDS or fault.calls not in _CALLS:
                raise UsageError(
                    f"{CHAOS}: {fault.kind} {fault.calls}: kinds are {', '.join(_KINDS)}, calls are "
                    f"{', '.join(_CALLS)}"
                )
        return chaos


class Fates:
    """Fates of the calls to one server. Thread-safe.

    Attributes:
        server: Its number.
    """

    def __init__(self, chaos: Chaos, server: int) -> None:
        self._chaos = chaos
        self.server = server
        self._random: dict[str, Random] = {}
        self._lock = threading.Lock()

    def next(self, call: str) -> Fate:
        """Returns what happens to the next call of this name."""
        is_request_lost = is_reply_lost = is_duplicated = False
        delay_s = 0.0
        with self._lock:
            random = self._random.setdefault(
                call, Random(f"{self._chaos.seed}/{self.server}/{call}")
            )
            for fault in self._chaos.faults:
                if call not in _CALLS[fault.calls]:
                    continue
                if fault.kind == "delay":
                    delay_s += fault.amount
                    continue
                is_chosen, is_reply = random.random() < fault.amount, random.random() < 0.5
                if fault.kind == "drop":
                    is_request_lost |= is_chosen and not is_reply
                    is_reply_lost |= is_chosen and is_reply
                else:
                    is_duplicated |= is_chosen
        return Fate(
            is_request_lost=is_request_lost,
            is_reply_lost=is_reply_lost,
            is_duplicated=is_duplicated,
            delay_s=delay_s,
        )
