"""Formats by name and suffix."""

import pytest

from ctr_model.schema import Schema
from protos.errors import UsageError
from ps_worker.data.blocks.bad_rows import BadRows
from ps_worker.data.formats import FORMATS, SUFFIXES, format_of, reader_of
from ps_worker.data.text.criteo import CriteoReader

SCHEMA = Schema.numbered(1, 1)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("a.tsv", "criteo"),
        ("s3://b/a.tsv.gz", "criteo"),
        ("part-0", "criteo"),
        ("a.txt.zst", "criteo"),
    ],
)
def test_end_of_the_name_tells_the_format(path: str, name: str) -> None:
    assert format_of(path) == name


def test_every_suffix_is_of_a_format() -> None:
    assert set(SUFFIXES.values()) <= set(FORMATS)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_compression_is_no_format(suffix: str) -> None:
    assert format_of(f"a{suffix}") == format_of(f"a{suffix}.gz") == format_of(f"a{suffix}.zst")


def test_format_by_name_overrules_the_file() -> None:
    assert isinstance(reader_of("a.orc", SCHEMA, BadRows(), "criteo"), CriteoReader)


def test_reader_of_ones_own_is_a_format() -> None:
    own = CriteoReader(SCHEMA, BadRows())

    assert reader_of("a.tsv", SCHEMA, BadRows(), lambda schema, bad_rows: own) is own


def test_unknown_format_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="unknown format 'critio', did you mean 'criteo'"):
        reader_of("a.tsv", SCHEMA, BadRows(), "critio")
