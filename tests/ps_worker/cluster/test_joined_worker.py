"""What a worker tells servers of the pushes that all of them have acknowledged."""

from hypothesis import given
from hypothesis import strategies as st

from ctr_ps.protos.store import Acknowledged
from ctr_ps.ps_worker.cluster.joined_worker import Acknowledgements
from tests.support.stores import push_id


@given(st.permutations(range(8)), st.integers(0, 8))
def test_pushes_count_up_to_the_first_that_is_not_acknowledged(
    order: list[int], num_acknowledged: int
) -> None:
    acknowledgements = Acknowledgements()
    acknowledged = order[:num_acknowledged]
    for sequence in acknowledged + acknowledged:  # an answer may be asked for twice
        acknowledgements.note(push_id(sequence=sequence), None)

    first_missing = min(set(range(9)) - set(acknowledged))
    assert acknowledgements.told() == Acknowledged(pushes=first_missing)


def test_parts_of_steps_count_by_their_step() -> None:
    acknowledgements = Acknowledgements()
    for at in (7, 8, 7):
        acknowledgements.note(push_id(sequence=at), at)

    assert acknowledgements.told() == Acknowledged(steps=9)
