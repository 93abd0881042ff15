"""Sentences of `--chaos`: what is killed, paused, dropped, duplicated and delayed, and when.

kill server 1 at step 200; pause worker 0 for 5s at 1.5s; drop 5% pushes; duplicate 5% calls; delay 20ms
"""

import re
from dataclasses import dataclass

FORMS = {
    "kill": "kill server|worker|heter N at step N|TIME",
    "pause": "pause server|worker|heter N for TIME at step N|TIME",
    "drop": "drop PERCENT pushes|pulls|calls",
    "duplicate": "duplicate PERCENT pushes|pulls|calls",
    "delay": "delay TIME [pushes|pulls|calls]",
}
"""The sentences of each verb; `at TIME` counts from the start."""

_PROCESS = r"(?P<role>server|worker|heter) (?P<index>[0-9]+)"
_TIME = r"[0-9]+\.?[0-9]*(?:ms|s)"
_MOMENT = rf"at (?:step (?P<step>[0-9]+)|(?P<at>{_TIME}))"
_CALLS = r"(?P<calls>pushes|pulls|calls)"
_SHARE = r"(?P<amount>100(?:\.0*)?%|[0-9]{1,2}(?:\.[0-9]*)?%)"
_PATTERNS = {
    "kill": rf"kill {_PROCESS} {_MOMENT}",
    "pause": rf"pause {_PROCESS} for (?P<pause>{_TIME}) {_MOMENT}",
    "drop": rf"drop {_SHARE} {_CALLS}",
    "duplicate": rf"duplicate {_SHARE} {_CALLS}",
    "delay": rf"delay (?P<amount>{_TIME})(?: {_CALLS})?",
}
_DIVISORS = {"%": 100, "s": 1, "ms": 1000}
_NAMES = {"server": "pserver", "worker": "trainer", "heter": "heter"}


class SentenceError(ValueError):
    """A sentence is not one of `FORMS`, or names a process that there is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """A process to kill or to pause."""

    role: str  # of the process, "server", "worker" or "heter"
    index: int  # among those of its role
    step: int | None = None  # when all servers that answer have this version; None: at a time
    at_s: float | None = None  # seconds after the start; None: at a step
    pause_s: float | None = None  # for how long it is paused, in seconds; None: it is killed

    @property
    def process(self) -> str:
        """Name of the process."""
        return f"{_NAMES[self.role]}.{self.index}"


@dataclass(frozen=True, slots=True)
class CallFault:
    """A fault of workers' calls, as `CTR_PS_CHAOS` has them.

    `amount` is the share of the calls, from 0 to 1; of a delay the seconds.
    """

    kind: str  # "drop", "duplicate" or "delay"
    calls: str  # "pushes", "pulls" or "calls"
    amount: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Chaos:
    """All that is done to a run's processes and its workers' calls, which are chosen by `seed`."""

    disturbances: tuple[Disturbance, ...] = ()
    call_faults: tuple[CallFault, ...] = ()
    seed: int = 0


def parse(
    text: str, *, num_servers: int, num_workers: int, num_heter: int = 0, seed: int = 0
) -> Chaos:
    """Returns what sentences say, which semicolons separate.

    Raises SentenceError if one is not understood, or names a process that there is not.
    """
    sentences = [" ".join(sentence.split()) for sentence in text.split(";") if sentence.strip()]
    if not sentences:
        raise SentenceError(f"{text!r} has no fault, expected {', '.join(FORMS)}")
    parsed = [_parsed(sentence) for sentence in sentences]
    disturbances = tuple(each for each in parsed if isinstance(each, Disturbance))
    numbers = {"server": num_servers, "worker": num_workers, "heter": num_heter}
    for each in disturbances:
        if each.index >= (number := numbers[each.role]):
            kind = "heter trainer" if each.role == "heter" else each.role
            raise SentenceError(
                f"there is no {kind} {each.index}: the run has {number}, numbered from 0"
            )
    faults = tuple(each for each in parsed if isinstance(each, CallFault))
    return Chaos(disturbances=disturbances, call_faults=faults, seed=seed)


def _parsed(sentence: str) -> Disturbance | CallFault:
    verb = sentence.partition(" ")[0]
    if verb not in FORMS:
        raise SentenceError(
            f"{verb!r} in {sentence!r} is not a known fault, expected {', '.join(FORMS)}"
        )
    found = re.fullmatch(_PATTERNS[verb], sentence)
    if found is None:
        raise SentenceError(
            f"{sentence!r}: expected {FORMS[verb]}, where N is a number, TIME as 20ms or 1.5s, PERCENT as 5%"
        )
    words = found.groupdict()
    if "role" not in words:
        return CallFault(verb, words["calls"] or "calls", _amount(words["amount"], sentence))
    return Disturbance(
        role=words["role"],
        index=int(words["index"]),
        step=None if words["step"] is None else int(words["step"]),
        at_s=None if words["at"] is None else _amount(words["at"], sentence),
        pause_s=_amount(words["pause"], sentence) if verb == "pause" else None,
    )


def _amount(text: str, sentence: str) -> float:
    """Returns a time in seconds, or a percentage as a share."""
    unit = text.lstrip("0123456789.")
    amount = float(text.removesuffix(unit)) / _DIVISORS[unit]
    if not amount:
        raise SentenceError(f"{text!r} in {sentence!r}: expected an amount above 0")
    return amount
