import pytest

from ctr_model.registry import build_model


def test_options_reach_the_model() -> None:
    model = build_model(
        "ctr_dnn", num_dense=2, num_slots=3, options={"dim": 4, "hidden": [8], "table": "ads"}
    )

    assert model.tables[0].name == "ads"
    assert model.tables[0].dim == 4
    assert model.segments[0].shape == (2 + 3 * 4, 8)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ctr_dn", {}, "unknown model 'ctr_dn', did you mean 'ctr_dnn'"),
        ("ctr_dnn", {"hiden": [4]}, "did you mean 'hidden'"),
        ("ctr_dnn", {"num_slots": 4}, "unknown option"),
        ("ctr_dnn", {"hidden": []}, "expected widths"),
        ("ctr_dnn", {"dim": 0}, "expected widths"),
        ("ctr_dnn", {"dim": "ten"}, "dim"),
        ("ctr_dnn", {"init_range": -1.0}, "init_range"),
    ],
)
def test_what_is_unknown_or_wrong_is_refused(name: str, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(name, num_dense=2, num_slots=3, options=options)
