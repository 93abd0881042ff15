"""A model keeps its constructor arguments and can be rebuilt from them."""

from dataclasses import replace

import pytest

from ctr_ps.ctr_model.models.ctr_dnn import CtrDnn
from ctr_ps.ctr_model.models.model import Origin, keeps_origin, origin_of
from ctr_ps.ctr_model.registry import MODELS, build_model, name_of
from ctr_ps.ctr_model.schema import Schema

SCHEMA = replace(Schema.numbered(2, 3), shares={"C2": "C1"})


@pytest.mark.parametrize("name", MODELS)
def test_every_model_can_be_built_again(name: str) -> None:
    model = MODELS[name](SCHEMA)

    origin = origin_of(model)
    again = build_model(name_of(model), origin.schema, origin.options)

    assert name_of(model) == name
    assert origin == Origin(SCHEMA, {})
    assert type(again) is type(model)


def test_options_are_kept_as_they_were_given() -> None:
    model = CtrDnn(SCHEMA, dim=4, hidden=[8, 4])

    assert origin_of(model) == Origin(SCHEMA, {"dim": 4, "hidden": [8, 4]})


def test_subclass_has_no_origin_of_its_base() -> None:
    class Own(CtrDnn):
        def __init__(self, schema: Schema, *, width: int) -> None:
            super().__init__(schema, hidden=[width])

    model = Own(SCHEMA, width=4)

    assert origin_of(model) is None
    assert name_of(model) is None


def test_class_of_ones_own_may_keep_it() -> None:
    @keeps_origin
    class Own:
        def __init__(self, schema: Schema, *, width: int = 3) -> None:
            """Says what it does."""
            self.width = width

    model = Own(SCHEMA, width=4)

    assert (model.width, Own.__init__.__doc__) == (4, "Says what it does.")
    assert origin_of(model) == Origin(SCHEMA, {"width": 4})
