"""Ratios from commit to commit."""

from pathlib import Path

from benchmarks import history
from benchmarks.history import Entry, entry_of, fallen

SPEEDS = {"in_process_2": 100, "two_ceilings": 125, "sync_2x2": 40, "async_2x2": 80}


def lines(**changed: int) -> list[dict[str, object]]:
    speeds = SPEEDS | changed
    return [
        {"benchmark": "machine", "cpu": "fast", "cores": 2},
        *(
            {"benchmark": "train", "case": case, "batch_size": 512, "examples_per_s": speed}
            for case, speed in speeds.items()
        ),
        {"benchmark": "train", "case": "peer_torch_2", "batch_size": 512, "error": "no torch"},
        {"benchmark": "wire", "case": "pull", "size": 1800},
    ]


def test_ratios_are_those_of_cases_that_were_measured() -> None:
    assert entry_of(lines(), "abc") == Entry(
        "abc",
        "fast",
        {
            "in process, 2 threads, of two ceilings, B=512": 0.8,
            "sync of async, B=512": 0.5,
            "async of in process, B=512": 0.8,
        },
    )


def test_ratio_that_lost_more_than_a_tenth_on_the_same_machine_is_told() -> None:
    before = entry_of(lines(), "abc")
    elsewhere = Entry("def", "slow", {"sync of async, B=512": 0.1})

    def told(sync: int) -> list[str]:
        return fallen([before, elsewhere, entry_of(lines(sync_2x2=sync), "ghi")])

    assert told(37) == []
    assert told(35) == ["sync of async, B=512 is 0.438, and was 0.5 in abc"]
    assert fallen([before]) == fallen([]) == []
    assert fallen([before, elsewhere]) == []


def test_entries_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    assert history.read(path) == []

    history.append(lines(), path)
    history.append(lines(sync_2x2=35), path)

    first, second = history.read(path)
    assert first == entry_of(lines(), first.commit)
    assert second.ratios["sync of async, B=512"] == 0.438
