"""Files of vectors whose values are not plain words."""

import urllib.parse
from pathlib import Path

import numpy as np
import pytest

from ctr_ps.ps_server.checkpoint.storage.folders import LocalFolder
from ctr_ps.ps_worker.predict.vector_files import vectors_to

LAST_BLANK = 0x3000
UNUSUAL = [chr(code) for code in range(LAST_BLANK + 1) if not chr(code).isprintable()]
VALUES = [
    "",
    " ",
    "red shoe",
    "red%20shoe",
    "two\nlines",
    "tab\t",
    "\r",
    "größe 9",
    r"\xff\xfe",
    *(f"a{char}b" for char in UNUSUAL),
]


@pytest.mark.parametrize("split", [str.split, lambda line: line.split(" ")], ids=["any", "space"])
def test_a_line_of_word2vec_is_one_word_and_its_numbers(split, tmp_path: Path) -> None:
    vectors = np.arange(2 * len(VALUES), dtype=np.float32).reshape(-1, 2) / 7
    keys = np.arange(len(VALUES), dtype=np.uint64)
    with vectors_to(LocalFolder(tmp_path), "ad", 2, "word2vec") as write:
        written = write(VALUES, keys, vectors)

    header, *lines = (tmp_path / "ad.word2vec.txt").read_bytes().decode().splitlines()

    assert header == f"{len(VALUES) - 1} 2"
    assert written == len(VALUES) - 1  # without the empty value
    fields = [split(line) for line in lines]
    assert {len(each) for each in fields} == {3}
    assert [urllib.parse.unquote(word) for word, *_ in fields] == VALUES[1:]
    assert np.array([each[1:] for each in fields], np.float32).tolist() == vectors[1:].tolist()


def test_lines_beside_a_matrix_are_its_rows_whatever_a_reader_takes_for_a_break(
    tmp_path: Path,
) -> None:
    vectors = np.arange(2 * len(VALUES), dtype=np.float32).reshape(-1, 2)
    keys = np.arange(len(VALUES), dtype=np.uint64)
    with vectors_to(LocalFolder(tmp_path), "ad", 2, "npy") as write:
        written = write(VALUES, keys, vectors)

    lines = (tmp_path / "ad.values.txt").read_bytes().decode().splitlines()

    breaks = set("\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029")
    kept = [row for row, value in enumerate(VALUES) if not breaks & set(value)]
    assert lines == [VALUES[row] for row in kept]
    assert np.load(tmp_path / "ad.npy").tolist() == vectors[kept].tolist()
    assert written == len(kept)
