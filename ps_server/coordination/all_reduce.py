"""All-reduce: the numbers that workers bring to a barrier, their reduction, and what workers are answered.

Sans-IO: numbers in, numbers out; no clock, no locks. barrier.py knows which workers are missing.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np

from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.role import Members
from ctr_ps.protos.store import Numbers, Reduced, ReduceOp, Version

_OPS: Mapping[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MAX: np.maximum,
    ReduceOp.MIN: np.minimum,
}


@dataclass(frozen=True, slots=True)
class Contribution:
    """One worker's numbers float64[N], how to reduce them, and whether the answer must be remembered."""

    values: Numbers
    op: ReduceOp
    remember: bool = True


Given = Mapping[int, Contribution | None]
"""Contributions by worker; None for a worker that came without numbers."""


class Reductions:
    """The numbers of workers that wait. Not thread-safe."""

    def __init__(self) -> None:
        self._given: dict[tuple[str, int], Contribution] = {}

    def give(self, name: str, worker: int, contribution: Contribution | None) -> None:
        """A worker comes to the barrier `name`, with numbers or without; replaces those it gave before."""
        self._given.pop((name, worker), None)
        if contribution is not None:
            self._given[name, worker] = contribution

    def given(self, name: str, worker: int) -> Contribution | None:
        """Returns the numbers with which a worker waits at the barrier `name`; None: it has none."""
        return self._given.get((name, worker))

    def take(self, name: str, workers: Sequence[int]) -> Given:
        """Returns, and forgets, the contributions of the workers that the barrier `name` releases."""
        return {worker: self._given.pop((name, worker), None) for worker in workers}


def reduce_numbers(name: str, given: Given, members: Members) -> Numbers | None:
    """Returns float64[N], read-only, reduced in worker order; None if no worker gave numbers.

    In that order a sum is the same to the last bit in any order of arrival. NaN and infinities propagate as
    in IEEE 754; a maximum or minimum over a NaN is NaN.

    Raises:
        ProtocolError: If they differ in length or operation.
    """
    if not any(given.values()):
        return None
    if len({_kind(each) for each in given.values()}) > 1:
        told = ", ".join(
            f"{members.name(worker)} {_kind(given[worker])}" for worker in sorted(given)
        )
        raise ProtocolError(
            f"all_reduce {name!r} was given different things: {told}; all workers must give as many "
            f"numbers, with the same op"
        )
    first, *others = (each for _, each in sorted(given.items()) if each is not None)
    total = first.values.copy()
    with np.errstate(all="ignore"):  # what overflows is infinite, as for any sum
        for each in others:
            _OPS[first.op](total, each.values, out=total)
    total.flags.writeable = False
    return total


class Outcome:
    """How a barrier answers the workers that it releases.

    The first answer makes the reduction, so that this is done outside of the coordinator's lock.

    Attributes:
        version: The version at which the workers continue.
        num_values: Numbers that it has: 0 for a barrier.
        remember: Whether the numbers are for processes in the workers' places, too.
    """

    def __init__(
        self,
        version: Version,
        reduce: Callable[[], Numbers | None],
        *,
        num_values: int,
        remember: bool,
    ) -> None:
        """`reduce` returns the numbers, None for a barrier, or raises ProtocolError."""
        self.version = version
        self.num_values = num_values
        self.remember = remember
        self._reduce: Callable[[], Numbers | None] | None = reduce
        self._values: Numbers | None = None

    def answer(self, brought: Numbers | None = None) -> Version | Reduced:
        """Returns the answer to a worker.

        Args:
            brought: Numbers of one that comes again: its answer if those of all are forgotten.

        Raises:
            ProtocolError: If the workers brought numbers that do not fit.
        """
        if (reduce := self._reduce) is not None:
            self._values = values = reduce()
            self._reduce = None  # it has what each worker brought
        else:
            values = self._values  # read once: another thread may forget them now
        values = brought if values is None else values
        return self.version if values is None else Reduced(values, self.version)

    def forget_values(self) -> None:
        """Drops the numbers; an error stays."""
        with suppress(ProtocolError):
            self.answer()
            self._values = None
            self.num_values = 0


def outcome_of(name: str, given: Given, members: Members, version: Version) -> Outcome:
    """Returns the outcome of the barrier `name`; it is remembered if one of the workers needs that."""
    brought = [each for each in given.values() if each is not None]
    return Outcome(
        version,
        partial(reduce_numbers, name, given, members),
        num_values=max((each.values.size for each in brought), default=0),
        remember=not brought or any(each.remember for each in brought),
    )


def _kind(contribution: Contribution | None) -> str:
    if contribution is None:
        return "nothing"
    return f"{contribution.values.size} numbers for {contribution.op.name}"
