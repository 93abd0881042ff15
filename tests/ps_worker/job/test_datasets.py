"""What a job says of its data."""

import pytest

from ps_worker.job import override_job
from ps_worker.job.datasets import digest_of_files, has_text_values


@pytest.mark.parametrize(
    ("settings", "files", "expected"),
    [
        ([], ["part-0", "part-1.csv.gz"], True),
        ([], ["part-0", "part-1.parquet"], False),
        ([], ["part-0.multislot"], False),
        ([], [], False),
        (["data.format=csv"], ["part-0"], True),
        (["data.format=multislot"], ["part-0"], False),
        (["data.format=multislot", "data.values=text"], ["part-0"], True),
        (["data.pipe_command=cat"], ["part-0"], False),
        (["data.pipe_command=cat", "data.values=text"], ["part-0"], True),
    ],
)
def test_text_values_are_known_by_the_formats_that_have_nothing_else(
    settings: list[str], files: list[str], expected: bool
) -> None:
    job = override_job({}, settings, source="test")

    assert has_text_values(job, files) is expected


def test_digest_of_files_is_of_their_order() -> None:
    digests = {digest_of_files(files) for files in (["a", "b"], ["b", "a"], ["a"])}

    assert len(digests) == 3
    assert digest_of_files(("a", "b")) == digest_of_files(["a", "b"])
