"""The tree of errors and its exit codes."""

import re
from collections.abc import Iterator

from ctr_ps.protos import errors

# Those of other modules stay inside their process.
DIRECT = [each for each in errors.CtrPsError.__subclasses__() if each.__module__ == errors.__name__]


def tree(base: type[errors.CtrPsError]) -> Iterator[type[errors.CtrPsError]]:
    yield base
    for subclass in base.__subclasses__():
        if subclass.__module__ == errors.__name__:  # others stay inside their process
            yield from tree(subclass)


def test_each_branch_has_an_exit_code_of_its_own() -> None:
    codes = [error_class.exit_code for error_class in [errors.CtrPsError, *DIRECT]]

    assert sorted(codes) == list(range(1, len(DIRECT) + 2))


def test_subclass_ends_a_command_as_its_branch_does() -> None:
    for branch in DIRECT:
        assert {error_class.exit_code for error_class in tree(branch)} == {branch.exit_code}


def test_picture_shows_the_tree() -> None:
    """Each class stands in the docstring, as deep as it is derived."""
    drawn = {
        name: 1 + len(indent) // 4
        for indent, name in re.findall(r"^    ([│ ├└─]*)(\w+Error)", errors.__doc__ or "", re.M)
    }

    depths = {
        error_class.__name__: error_class.__mro__.index(errors.CtrPsError) + 1
        for error_class in tree(errors.CtrPsError)
    }
    assert drawn == depths


def test_a_counted_noun_is_in_the_plural_but_for_one() -> None:
    counts = [errors.counted(number, "batch") for number in (0, 1, 2)]

    assert counts == ["0 batches", "1 batch", "2 batches"]
    assert errors.counted(2, "epoch") == "2 epochs"
    assert errors.counted(1234, "malformed row", ",") == "1,234 malformed rows"
