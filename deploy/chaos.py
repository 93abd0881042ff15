"""Sentences of `--chaos`: what is killed, paused, dropped, duplicated and delayed, and when.

kill server 1 at step 200; pause worker 0 for 5s at 1.5s; drop 5% pushes; duplicate 5% calls; delay 20ms
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["server", "worker", "heter"]

FORMS = {
    "kill": "kill server|worker|heter N at step N|TIME",
    "pause": "pause server|worker|heter N for TIME at step N|TIME",
    "drop": "drop PERCENT pushes|pulls|calls",
    "duplicate": "duplicate PERCENT pushes|pulls|calls",
    "delay": "delay TIME [pushes|pulls|calls]",
}
"""The sentences of each verb. N is a number, TIME as 20ms or 1.5s, PERCENT as 5% or 0.5%; `at TIME` counts
from the start."""

_NAMES = {"server": "pserver", "worker": "trainer", "heter": "heter"}
_CALLS = ("pushes", "pulls", "calls")


class SentenceError(ValueError):
    """A sentence is not one of `FORMS`; the message says which word, and what was expected there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """A process to kill or to pause.

    Attributes:
        role: Of the process.
        index: Among those of its role.
        step: When all servers that answer have this version; None: at a time.
        at_s: Seconds after the start; None: at a step.
        pause_s: For how long it is paused, in seconds; None: it is killed.
    """

    role: Role
    index: int
    step: int | None = None
    at_s: float | None = None
    pause_s: float | None = None

    @property
    def process(self) -> str:
        """Name of the process."""
        return f"{_NAMES[self.role]}.{self.index}"


@dataclass(frozen=True, slots=True)
class CallFault:
    """A fault of workers' calls, as `CTR_PS_CHAOS` has them.

    Attributes:
        kind: "drop", "duplicate" or "delay".
        calls: "pushes", "pulls" or "calls".
        amount: Share of the calls, from 0 to 1; of a delay the seconds.
    """

    kind: str
    calls: str
    amount: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Chaos:
    """All that is done to a run.

    Attributes:
        disturbances: Of processes.
        call_faults: Of workers' calls.
        seed: Of the choice of calls.
    """

    disturbances: tuple[Disturbance, ...] = ()
    call_faults: tuple[CallFault, ...] = ()
    seed: int = 0


def parse(
    text: str, *, num_servers: int, num_workers: int, num_heter: int = 0, seed: int = 0
) -> Chaos:
    """Returns what sentences say, which semicolons separate.

    Raises:
        SentenceError: If one is not understood, or names a process that there is not.
    """
    parsed = [_parsed(sentence) for sentence in text.split(";") if sentence.strip()]
    if not parsed:
        raise SentenceError(f"{text!r} says nothing: expected {_either(list(_VERBS))}")
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
    words = _Words(sentence)
    kind = words.one_of(*_VERBS)
    parsed = _VERBS[kind](words, kind)
    words.end()
    return parsed


def _kill(words: "_Words", _: str) -> Disturbance:
    return Disturbance(**_process(words), **_moment(words))


def _pause(words: "_Words", _: str) -> Disturbance:
    process = _process(words)
    words.one_of("for")
    return Disturbance(**process, pause_s=words.seconds(), **_moment(words))


def _process(words: "_Words") -> dict[str, Any]:
    return {"role": words.one_of(*_NAMES), "index": words.number()}


def _moment(words: "_Words") -> dict[str, Any]:
    words.one_of("at")
    if words.skip("step"):
        return {"step": words.number()}
    return {"at_s": words.seconds("step or ")}


def _share(words: "_Words", kind: str) -> CallFault:
    share = words.share()
    return CallFault(kind, words.one_of(*_CALLS), share)


def _delay(words: "_Words", kind: str) -> CallFault:
    seconds = words.seconds()
    return CallFault(kind, "calls" if words.are_over else words.one_of(*_CALLS), seconds)


_VERBS: Mapping[str, Callable[["_Words", str], Disturbance | CallFault]] = {
    "kill": _kill,
    "pause": _pause,
    "drop": _share,
    "duplicate": _share,
    "delay": _delay,
}


class _Words:
    """Words of a sentence, taken one by one; what does not fit is a SentenceError."""

    def __init__(self, sentence: str) -> None:
        self._words: Sequence[str] = sentence.split()
        self._next = 0

    @property
    def are_over(self) -> bool:
        return self._next == len(self._words)

    def one_of(self, *words: str) -> str:
        """Takes one of these words."""
        if self.are_over or self._words[self._next] not in words:
            raise self._refusal(_either(words))
        return self._take()

    def skip(self, word: str) -> bool:
        """Takes this word if it is the next one; returns whether it was."""
        is_next = not self.are_over and self._words[self._next] == word
        self._next += is_next
        return is_next

    def number(self) -> int:
        """Takes a number from 0 on."""
        return int(self._match(r"(\d+)", "a number")[0])

    def seconds(self, otherwise: str = "") -> float:
        """Takes a time above 0, and returns it in seconds; `otherwise` could have stood there, too."""
        expected = f"{otherwise}a time above 0, as 20ms or 1.5s"
        number, unit = self._match(r"(?=.*[1-9])(\d+\.?\d*)(ms|s)", expected)
        return float(number) / (1000 if unit == "ms" else 1)

    def share(self) -> float:
        """Takes a percentage above 0, and returns it as a share."""
        pattern = r"(?=.*[1-9])(100(?:\.0*)?|\d{1,2}(?:\.\d*)?)%"
        (number,) = self._match(pattern, "a percentage above 0 and up to 100, as 5%")
        return float(number) / 100

    def end(self) -> None:
        """Requires that no word is left."""
        if not self.are_over:
            raise self._refusal("the end")

    def _match(self, pattern: str, expected: str) -> tuple[str, ...]:
        match = None if self.are_over else re.fullmatch(pattern, self._words[self._next])
        if match is None:
            raise self._refusal(expected)
        self._take()
        return match.groups()

    def _take(self) -> str:
        self._next += 1
        return self._words[self._next - 1]

    def _refusal(self, expected: str) -> SentenceError:
        """Returns an error that begins with the word that does not fit, and ends with the form."""
        sentence = " ".join(self._words)
        form = f"; form: {FORMS[self._words[0]]}" if self._next else ""
        if self.are_over:
            return SentenceError(f"{sentence!r} ends too early: expected {expected}{form}")
        word = self._words[self._next]
        return SentenceError(f"{word!r} in {sentence!r}: expected {expected}{form}")


def _either(words: Sequence[str]) -> str:
    """Returns words as "a, b or c", and a single one in quotes."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else repr(last)
