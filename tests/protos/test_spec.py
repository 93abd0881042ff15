"""Specs are compared as what they say."""

import dataclasses

import pytest

from protos.spec import DenseSegment, DenseSpec, InitializerSpec, OptimizerSpec

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


def test_specs_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ZEROS.scale = 1.0  # type: ignore[misc]


def test_dense_block_is_as_long_as_its_segments() -> None:
    segments = tuple(DenseSegment(length=length, initializer=ZEROS) for length in (3, 0, 4))

    spec = DenseSpec(name="mlp", segments=segments, optimizer=OptimizerSpec(name="sgd"))

    assert spec.length == 7
