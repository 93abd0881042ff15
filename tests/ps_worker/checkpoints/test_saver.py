"""When checkpoints are taken, and what becomes of one that cannot be written."""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from ctr_ps.protos.errors import CheckpointError, ProtocolError, SnapshotLostError
from ctr_ps.protos.store import SaveRequest
from ctr_ps.ps_server.checkpoint.files.manifest import PUBLISHED, PUBLISHING
from ctr_ps.ps_server.checkpoint.publish import name_in, write_latest
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.checkpoints import saver as saver_module
from ctr_ps.ps_worker.checkpoints.saver import Saver, Schedule
from ctr_ps.ps_worker.job.sections import CheckpointSection
from tests.support.stores import in_process
from tests.support.waiting import wait_until

LIMIT_S = 10.0


def due(schedule: Schedule, moments: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Returns the moments at which a checkpoint was taken."""
    taken = []
    for step, now in moments:
        if schedule.is_due(step, now):
            schedule.restart(step, now)
            taken.append((step, now))
    return taken


def test_checkpoint_is_due_with_each_multiple_of_steps() -> None:
    schedule = Schedule(every_steps=10, every_s=0.0, step=7, now=0.0)

    taken = due(schedule, [(step, 0.0) for step in (8, 10, 11, 19, 23, 29, 30)])

    assert [step for step, _ in taken] == [10, 23, 30]


def test_checkpoint_is_due_after_so_many_seconds() -> None:
    schedule = Schedule(every_steps=0, every_s=5.0, step=0, now=100.0)

    taken = due(schedule, [(step, 100.0 + step) for step in range(1, 14)])

    assert [now for _, now in taken] == [105.0, 110.0]


def test_seconds_count_from_the_last_checkpoint_whatever_it_was_due_for() -> None:
    schedule = Schedule(every_steps=4, every_s=5.0, step=0, now=0.0)

    taken = due(schedule, [(step, float(step)) for step in range(1, 14)])

    assert [step for step, _ in taken] == [4, 8, 12]


def test_nothing_is_due_without_a_period() -> None:
    schedule = Schedule(every_steps=0, every_s=0.0, step=0, now=0.0)

    assert not schedule.is_due(10**9, 1e9)


def test_lost_checkpoint_is_due_until_another_is_taken() -> None:
    schedule = Schedule(every_steps=0, every_s=0.0, step=0, now=0.0)

    schedule.owe()

    assert due(schedule, [(7, 0.0), (8, 0.0)]) == [(7, 0.0)]


class SlowStore(ParameterStore):
    """Has its cut at once, and goes on writing when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.write = threading.Event()
        self.error: Exception | None = None

    def save(self, request: SaveRequest) -> str:
        assert request.on_snapshot is not None
        request.on_snapshot()
        assert self.write.wait(LIMIT_S)
        if self.error is not None:
            raise self.error
        return super().save(replace(request, on_snapshot=None))


def saver_of(store: ParameterStore, folder: Path, **settings: int | str) -> Saver:
    section = CheckpointSection(dir=str(folder), **{"every_steps": 1, **settings})
    return Saver(store, section, clock=itertools.count().__next__)


def names(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.glob("*/MANIFEST.json"))


def test_training_goes_on_while_one_checkpoint_at_a_time_is_written(tmp_path: Path) -> None:
    store = SlowStore()
    saver = saver_of(store, tmp_path)
    begun: list[int] = []

    for step in (1, 2, 3):
        saver.after_step(step, lambda step=step: begun.append(step) or {})
    assert (begun, names(tmp_path), saver.latest) == ([1], [], None)
    store.write.set()
    saver.finish()
    saver.after_step(4, dict)
    saver.finish()

    assert names(tmp_path) == ["step-1", "step-4"]
    assert saver.latest == str(tmp_path / "step-4")
    assert (tmp_path / "LATEST").read_text() == "step-4\n"


def test_checkpoint_of_an_epoch_waits_for_the_one_before(tmp_path: Path) -> None:
    store = SlowStore()
    saver = saver_of(store, tmp_path)
    saver.after_step(1, dict)
    threading.Timer(0.01, store.write.set).start()

    saver.save("epoch-1", 1, {"note": b"text"})
    saver.finish()

    assert names(tmp_path) == ["epoch-1", "step-1"]


def test_checkpoint_of_a_worker_that_ends_is_written_when_it_has_it(tmp_path: Path) -> None:
    """And after the one before, with a name of its own at the same step."""

    class LongStore(ParameterStore):
        def save(self, request: SaveRequest) -> str:
            assert request.on_snapshot is not None
            request.on_snapshot()
            time.sleep(0.05)  # what is slow is the storage
            return super().save(replace(request, on_snapshot=None))

    saver = saver_of(LongStore(), tmp_path)
    saver.after_step(1, dict)
    before: list[list[str]] = []

    saver.save_within(1, lambda: before.append(names(tmp_path)) or {})

    assert before == [["step-1"]]
    assert names(tmp_path) == ["step-1", "step-1-2"]
    assert (tmp_path / "LATEST").read_text() == "step-1-2\n"


def test_what_readers_may_take_is_named_before_it_is_the_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a crash between the two would leave the latest one, which has passed, unpublished."""
    seen: list[str] = []

    def noting(folder: str, name: str, *before: str, is_gated: bool) -> None:
        seen.append(name_in(folder, PUBLISHING))
        write_latest(folder, name, *before, is_gated=is_gated)

    monkeypatch.setattr(saver_module, "write_latest", noting)
    saver = Saver(in_process(), CheckpointSection(dir=str(tmp_path)), is_gated=True)

    saver.save("epoch-1", 1, {}, named=[PUBLISHED])
    saver.save("epoch-2", 2, {})
    saver.finish()

    assert seen == ["epoch-1", ""]
    assert [name_in(tmp_path, each) for each in (PUBLISHED, "LATEST")] == ["epoch-1", "epoch-2"]


def kinds(folder: Path) -> dict[str, str | None]:
    return {name: Checkpoint.open(folder / name).manifest.base for name in names(folder)}


def test_in_mode_delta_one_of_so_many_checkpoints_is_full(tmp_path: Path) -> None:
    saver = saver_of(in_process(), tmp_path, mode="delta", full_every=3)

    for step in range(1, 6):
        saver.save(f"step-{step}", step, {})
    saver.finish()

    bases = (None, "step-1", "step-2", None, "step-4")
    assert kinds(tmp_path) == {f"step-{step}": base for step, base in enumerate(bases, 1)}


def test_checkpoint_that_replaces_the_latest_is_no_delta_of_it(tmp_path: Path) -> None:
    bases: list[str] = []

    class Noting(ParameterStore):
        def save(self, request: SaveRequest) -> str:
            bases.append(request.base.rpartition("/")[2])
            return super().save(request)

    saver = saver_of(Noting(), tmp_path, mode="delta")

    for name in ("epoch-1", "step-2", "step-2", "step-3"):
        saver.save(name, 2, {})
    saver.finish()

    assert bases == ["", "epoch-1", "", "step-2"]


def test_delta_that_is_not_possible_becomes_a_full_checkpoint_from_which_deltas_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = in_process()
    saver = saver_of(store, tmp_path, mode="delta", full_every=3)
    saver.save("step-1", 1, {})
    saver.finish()
    store.save(SaveRequest(url=str(tmp_path / "other")))

    for step in range(2, 6):
        saver.save(f"step-{step}", step, {})
    saver.finish()

    bases = (None, None, "step-2", "step-3", None)
    of_steps = {f"step-{step}": base for step, base in enumerate(bases, 1)}
    assert kinds(tmp_path) == {"other": None, **of_steps}
    assert "saving all rows instead of a delta checkpoint=" in caplog.text


def next_steps(saver: Saver) -> None:
    for step in itertools.repeat(4):
        saver.after_step(step, dict)


@pytest.mark.parametrize(
    "resume",
    [next_steps, lambda saver: saver.save("epoch-1", 4, {}), Saver.finish],
    ids=["next step", "next checkpoint", "end"],
)
def test_checkpoint_that_fails_ends_the_run(
    resume: Callable[[Saver], None], tmp_path: Path
) -> None:
    store = SlowStore()
    store.error = CheckpointError("no space left")
    saver = saver_of(store, tmp_path, every_steps=3)
    saver.after_step(3, dict)
    store.write.set()

    with pytest.raises(CheckpointError, match="no space left"):
        resume(saver)

    assert saver.latest is None


def test_only_a_checkpoint_since_which_nothing_was_trained_is_taken_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One of a step is due again at the next step, and the one before it is of another moment."""
    saved: list[str] = []

    class LosingStore(ParameterStore):
        def save(self, request: SaveRequest) -> str:
            saved.append(request.url.rpartition("/")[2])
            if saved in (["epoch-1"], ["epoch-1", "epoch-1", "step-2"]):
                raise SnapshotLostError("server 0 was restarted")
            return super().save(request)

    saver = saver_of(LosingStore(), tmp_path)

    saver.save("epoch-1", 1, {})
    saver.finish()
    assert not saver.is_owed
    saver.after_step(2, dict)
    wait_until(lambda: saver.is_owed)
    assert "checkpoint lost, another follows" in caplog.messages[-1]
    assert "step-2: server 0 was restarted" in caplog.messages[-1], "without another step"
    assert saver.is_due(2), "in a lull, too"
    saver.finish()

    assert saver.is_owed
    assert saved == ["epoch-1", "epoch-1", "step-2"]
    assert names(tmp_path) == ["epoch-1"]


def test_step_that_cannot_settle_takes_no_checkpoint(tmp_path: Path) -> None:
    def unsettled() -> Mapping[str, bytes]:
        raise CheckpointError("a worker did not come")

    saver = saver_of(ParameterStore(), tmp_path)

    with pytest.raises(CheckpointError, match="did not come"):
        saver.after_step(1, unsettled)
    saver.finish()

    assert names(tmp_path) == []


def test_only_the_newest_checkpoints_stay(tmp_path: Path) -> None:
    saver = saver_of(ParameterStore(), tmp_path, keep_last=2)

    for step in range(1, 5):
        saver.after_step(step, dict)
        saver.finish()

    assert names(tmp_path) == ["step-3", "step-4"]


def test_deltas_without_end_have_bounded_chains_a_bounded_folder_and_bounded_memory(
    tmp_path: Path,
) -> None:
    saver = saver_of(in_process(), tmp_path, mode="delta", full_every=4, keep_last=5)

    for step in range(1, 31):
        saver.save(f"step-{step}", step, {})
        saver.finish()
        assert len(Checkpoint.open(tmp_path).chain) <= 4
        kept = names(tmp_path)
        assert len(kept) <= 5 + 4 - 1
        assert {f"step-{each}" for each in range(max(step - 4, 1), step + 1)} <= {*kept}
        assert sum(base is None for base in kinds(tmp_path).values()) <= 2
        assert {*saver._keeper._own} == {*kept}


def test_best_checkpoint_stays_until_there_is_a_better_one(tmp_path: Path) -> None:
    saver = saver_of(ParameterStore(), tmp_path, keep_last=1)
    kept = []

    for epoch, is_best in enumerate([True, False, True], 1):
        saver.save(f"epoch-{epoch}", epoch, {}, named=["BEST"] * is_best)
        saver.finish()
        kept.append(names(tmp_path))

    assert kept == [["epoch-1"], ["epoch-1", "epoch-2"], ["epoch-3"]]


def test_each_removed_checkpoint_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saver = saver_of(ParameterStore(), tmp_path, keep_last=1)

    with caplog.at_level(logging.INFO):
        for step in (1, 2):
            saver.save(f"step-{step}", step, {})
        saver.finish()

    told = [record for record in caplog.records if record.message.startswith("removed")]
    assert [(each.levelname, each.message) for each in told] == [
        ("INFO", f"removed old checkpoint={tmp_path}/step-1")
    ]


@pytest.mark.parametrize("own", [[], ["step-1", "step-2"]], ids=["begins", "goes on"])
def test_of_checkpoints_that_were_there_only_those_of_the_run_go(
    own: list[str], tmp_path: Path
) -> None:
    store = in_process()
    for name in ("step-1", "step-2", "best"):
        store.save(SaveRequest(url=str(tmp_path / name)))
    store.save(SaveRequest(url=str(tmp_path / "serving"), base=str(tmp_path / "best")))
    section = CheckpointSection(dir=str(tmp_path), keep_last=1, load=str(tmp_path / "step-2"))
    saver = Saver(store, section, own=own)

    for name in ("step-4", "step-5"):
        saver.save(name, 4, {})
    saver.finish()

    stays = {"best", "serving", "step-2", "step-5"}
    assert set(names(tmp_path)) == (stays if own else stays | {"step-1"})


def test_process_that_was_paused_does_not_turn_latest_back(tmp_path: Path) -> None:
    """Another one is in its place by then, and has saved."""
    first, second = SlowStore(), in_process()
    first.resume(7, {})
    second.resume(9, {})
    paused = saver_of(first, tmp_path)
    paused.after_step(7, dict)
    successor = saver_of(second, tmp_path, keep_last=1)
    successor.save("step-9", 9, {})
    successor.finish()

    first.write.set()

    with pytest.raises(
        CheckpointError,
        match=r"'step-7' of version 7: .*LATEST already names 'step-9' of version 9",
    ):
        paused.finish()
    assert (tmp_path / "LATEST").read_text() == "step-9\n"
    assert "step-9" in names(tmp_path)


def test_new_run_makes_its_older_version_the_latest(tmp_path: Path) -> None:
    """Of the run that it overwrites, and of one that it resumes from an older checkpoint, all may go."""
    for version, name in [(9, "step-9"), (2, "step-2"), (3, "step-3")]:
        store = in_process()
        store.resume(version, {})
        saver = saver_of(store, tmp_path)
        saver.save(name, version, {})
        saver.finish()

    assert (tmp_path / "LATEST").read_text() == "step-3\n"


@pytest.mark.parametrize("calls", range(4))
def test_place_is_confirmed_before_each_file_that_is_replaced(calls: int, tmp_path: Path) -> None:
    store = in_process()
    earlier = saver_of(store, tmp_path)
    earlier.save("step-1", 1, {})
    earlier.finish()
    left = iter(range(calls))
    section = CheckpointSection(dir=str(tmp_path), keep_last=1)

    def confirm() -> None:
        if next(left, None) is None:
            raise ProtocolError("worker 0 is another process by now")

    saver = Saver(store, section, own=["step-1"], confirm=confirm)
    saver.save("step-2", 2, {}, named=["BEST"])
    if calls == 3:
        saver.finish()
    else:
        with pytest.raises(ProtocolError):
            saver.finish()

    assert ("step-2" in names(tmp_path)) == (calls > 0)
    assert (tmp_path / "LATEST").read_text() == ("step-2\n" if calls > 1 else "step-1\n")
    assert (tmp_path / "BEST").exists() == (calls > 2)
    assert ("step-1" in names(tmp_path)) == (calls < 3)


def test_checkpoints_at_one_step_of_worker_0_have_names_of_their_own(tmp_path: Path) -> None:
    """Others may train on while it has no rows; a name that came again would replace a base."""
    saver = saver_of(ParameterStore(), tmp_path, mode="delta", every_steps=0, every_s=1)

    for step in (3, 3, 3, 4):
        saver.after_step(step, dict)
        saver.wait()
    saver.save("epoch-1", 4, {})
    saver.wait()
    saver.after_step(4, dict)
    saver.wait()

    assert names(tmp_path) == ["epoch-1", "step-3", "step-3-2", "step-3-3", "step-4", "step-4-2"]
    assert Checkpoint.open(str(tmp_path / "epoch-1")).manifest.base == "step-4"


def test_resumed_run_saves_again_what_came_after_the_step_it_resumes_from(tmp_path: Path) -> None:
    section = CheckpointSection(dir=str(tmp_path), every_steps=0, every_s=1)
    own = ["step-1", "step-10", "step-20", "epoch-1"]
    saver = Saver(ParameterStore(), section, step=10, own=own, clock=itertools.count().__next__)

    for step in (10, 20, 100):
        saver.after_step(step, dict)
        saver.wait()

    assert names(tmp_path) == ["step-10-2", "step-100", "step-20"]
