"""Specs are compared as what they say."""

import math

import pytest

from ctr_ps.protos.spec import DenseSegment, DenseSpec, InitializerSpec, OptimizerSpec

ZEROS = InitializerSpec()


def test_order_of_hyper_parameters_does_not_count() -> None:
    first = OptimizerSpec(name="adam", params={"beta1": 0.8, "learning_rate": 0.1})
    second = OptimizerSpec(name="adam", params={"learning_rate": 0.1, "beta1": 0.8})

    assert first == second
    assert list(first.params) == list(second.params)


def test_spec_does_not_follow_the_mapping_it_was_made_of() -> None:
    params = {"learning_rate": 0.1}
    spec = OptimizerSpec(name="sgd", params=params)

    params["learning_rate"] = 9.0

    assert spec.params == {"learning_rate": 0.1}


def block(*segments: tuple[str, tuple[int, ...]]) -> DenseSpec:
    return DenseSpec(
        name="mlp",
        segments=tuple(
            DenseSegment(length=math.prod(shape), initializer=ZEROS, name=name, shape=shape)
            for name, shape in segments
        ),
        optimizer=OptimizerSpec(name="sgd"),
    )


SAVED = (("a.weight", (2, 3)), ("a.bias", (2,)))


@pytest.mark.parametrize(
    ("others", "difference"),
    [
        (SAVED, ""),
        (SAVED[::-1], "a.weight [2, 3], not a.bias [2]"),
        ((("a.weight", (3, 2)), SAVED[1]), "a.weight [2, 3], not a.weight [3, 2]"),
        ((SAVED[0], ("b.bias", (2,))), "a.bias [2], not b.bias [2]"),
        (SAVED[:1], "a.bias [2], not nothing"),
        ((*SAVED, ("scale", ())), "nothing, not scale []"),
        ((("", (2, 3)), SAVED[1]), ""),
    ],
)
def test_layouts_differ_in_the_first_tensor_that_does(
    others: tuple[tuple[str, tuple[int, ...]], ...], difference: str
) -> None:
    assert block(*SAVED).layout_difference(block(*others)) == difference
