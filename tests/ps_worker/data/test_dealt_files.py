"""Files that workers take from a queue: what each trains, and where another goes on."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.gradients import Gradients
from ctr_ps.protos.store import FILE, PushId, WorkerProgress
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.data.blocks import DataPosition
from ctr_ps.ps_worker.data.dealt_files import END, DealtFiles, FilePosition, places_of
from ctr_ps.ps_worker.data.queue_dataset import QueueDataset
from tests.support.stores import INCARNATION

SCHEMA = Schema.numbered(1, 1)
ROWS = 5
"""Of a file; those of file n have the numbers 10 n, 10 n + 1, ..."""


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"part-{number}" for number in range(3)]
    for number, path in enumerate(paths):
        path.write_text("".join(f"0\t{10 * number + row}\tx\n" for row in range(ROWS)))
    (tmp_path / "part-3").write_text("")
    return [*paths, tmp_path / "part-3"]


def dealt(store: ParameterStore, files: list[Path], worker: int, epoch: int = 1) -> DealtFiles:
    dataset = QueueDataset(SCHEMA, 2)
    dataset.set_filelist(files)
    return DealtFiles(store, worker, dataset, epoch)


def store_of_joined() -> ParameterStore:
    store = ParameterStore(num_workers=2)
    for worker in range(2):
        store.join(worker, INCARNATION, terms={}).result()
    return store


class Pusher:
    """Trains batches of a worker: a push for each, with its position."""

    def __init__(self, store: ParameterStore, worker: int) -> None:
        self._store, self._worker, self._sequence = store, worker, 0

    def train(
        self, batches: Iterator[tuple[Batch, FilePosition]], most: int | None = None
    ) -> list[int]:
        """Returns the numbers of the rows of up to `most` batches."""
        numbers: list[int] = []
        while (most is None or self._sequence < most) and (found := next(batches, None)):
            batch, position = found
            push_id = PushId(
                worker=self._worker,
                incarnation=INCARNATION,
                sequence=self._sequence,
                step=self._sequence + 1,
                examples=batch.size,
                batches=1,
                pulled=0,
                position=position.to_json(),
                partitions=position.partitions,
            )
            self._store.push_grad(Gradients(), push_id).result()
            self._sequence += 1
            numbers += [int(number) for number in batch.dense[:, 0]]
        return numbers


def numbers_of(*files: int) -> list[int]:
    return [10 * file + row for file in files for row in range(ROWS)]


def test_each_batch_is_of_one_file_and_the_last_tells_its_end(files: list[Path]) -> None:
    store = store_of_joined()
    found = list(dealt(store, files[:2], 0).batches())

    assert [batch.size for batch, _ in found] == [2, 2, 1, 2, 2, 1]
    places = [(position.file, position.place) for _, position in found]
    assert [file for file, _ in places] == [0, 0, 0, 1, 1, 1]
    assert [place == END for _, place in places] == [False, False, True] * 2
    assert DataPosition.from_json(found[0][1].to_json()).epoch == 1


@pytest.mark.parametrize("trained", range(8))
def test_rows_that_a_worker_left_are_trained_once_by_another(
    trained: int, files: list[Path]
) -> None:
    store = store_of_joined()
    mine, others = dealt(store, files, 0), dealt(store, files, 1)
    rows = Pusher(store, 1).train(others.batches(), trained)
    store.leave(1, step=0)

    pusher = Pusher(store, 0)
    rows += pusher.train(mine.batches())
    assert not mine.wait()

    assert sorted(rows) == numbers_of(0, 1, 2)


def test_a_file_that_is_given_back_while_others_wait_is_trained(files: list[Path]) -> None:
    store = store_of_joined()
    mine, others = dealt(store, files, 0), dealt(store, files, 1)
    pusher = Pusher(store, 0)
    own, rest = mine.batches(), others.batches()
    rows = pusher.train(own, 1)
    rows += Pusher(store, 1).train(rest, 1)  # where it goes on is known only later
    rows += pusher.train(own)
    assert sorted(rows) == [*numbers_of(0), 10, 11, *numbers_of(2)]

    store.leave(1, step=0)

    assert mine.wait()
    assert pusher.train(mine.batches()) == [12, 13, 14]
    assert not mine.wait()


def test_the_furthest_place_of_any_worker_counts_and_no_other_pass() -> None:
    def progress(**partitions: str) -> WorkerProgress:
        named = {name.replace("file", FILE): at for name, at in partitions.items()}
        return WorkerProgress(incarnation=0, sequence=0, step=0, position="", partitions=named)

    workers = {
        0: progress(file0="2 100 7", file1=f"2 {END[0]} 0", file2=f"1 {END[0]} 0"),
        1: progress(file0="2 100 9", file1="2 64 1", file3="2 0 4"),
    }

    assert places_of(workers, 2) == {0: (100, 9), 1: END, 3: (0, 4)}
    assert places_of(workers, 3) == {}
