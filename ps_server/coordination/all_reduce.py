"""All-reduce: the numbers that workers bring to a barrier, and their reduction.

Sans-IO: numbers in, numbers out; no clock, no locks. barrier.py knows which workers are missing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from protos.errors import ProtocolError
from protos.role import Members
from protos.store import Numbers, ReduceOp

_OPS: Mapping[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MAX: np.maximum,
    ReduceOp.MIN: np.minimum,
}


@dataclass(frozen=True, slots=True)
class Contribution:
    """One worker's numbers float64[N], and how to reduce them."""

    values: Numbers
    op: ReduceOp


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


def _kind(contribution: Contribution | None) -> str:
    if contribution is None:
        return "nothing"
    return f"{contribution.values.size} numbers for {contribution.op.name}"
