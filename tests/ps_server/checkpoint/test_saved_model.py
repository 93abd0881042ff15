"""Mapped checkpoints: damage is an error that names the file, or a wrong value."""

from pathlib import Path

import numpy as np
import pytest

from ctr_ps.protos.errors import CheckpointError, UsageError
from ctr_ps.protos.store import SaveRequest
from ctr_ps.ps_server.checkpoint.saved_model import SavedModel
from tests.support.checkpoints import fake_counting_model
from tests.support.stores import in_process, push_id, random_gradients

MASKS = (0x01, 0x40, 0xFF)


def test_damaged_file_of_rows_is_refused_by_name_or_read(tmp_path: Path) -> None:
    """Checksums are not compared, so values may be wrong, but are never read from outside the file."""
    model, folder = fake_counting_model(), tmp_path / "saved"
    model.save(folder)
    path = sorted(folder.glob("data-*/table.*.arrow"))[0]
    table = path.name.split(".")[1]
    keys = np.concatenate([rows.keys for rows in model.tables[table].rows.values()])
    original = path.read_bytes()
    refusals = []

    for position in range(0, len(original), 7):
        altered = bytearray(original)
        altered[position] ^= MASKS[position % len(MASKS)]
        path.write_bytes(altered)
        try:
            SavedModel.open(folder).read(table, keys)
        except CheckpointError as error:
            refusals.append(str(error))

    assert len(refusals) > 50
    assert [message for message in refusals if path.name not in message] == []


def test_file_whose_end_is_damaged_is_refused_by_name(tmp_path: Path) -> None:
    """Arrow's footer, with the offsets of everything, is there."""
    fake_counting_model().save(tmp_path / "saved")
    path = sorted((tmp_path / "saved").glob("data-*/table.*.arrow"))[0]
    content = bytearray(path.read_bytes())
    content[-60:-10] = bytes(50)
    path.write_bytes(content)

    with pytest.raises(CheckpointError, match=f"{path.name} was altered: "):
        SavedModel.open(tmp_path / "saved")


def test_keys_with_a_row_are_told_from_those_without_and_removed_ones(tmp_path: Path) -> None:
    store = in_process()
    store.push_grad(random_gradients(0), push_id(sequence=0)).result()
    store.save(SaveRequest(url=str(tmp_path / "0"), base=""))
    store.shrink(max_norm=1e30)
    store.save(SaveRequest(url=str(tmp_path / "1"), base=str(tmp_path / "0")))
    base, delta = SavedModel.open(tmp_path / "0"), SavedModel.open(tmp_path / "1")
    shards = base.checkpoint.read_shards("deep", range(base.checkpoint.table("deep").num_shards))
    keys = np.concatenate([rows.keys for _, rows in shards])

    asked = np.concatenate([keys, np.arange(100, dtype=np.uint64)])

    rows, has_row = base.find("deep", asked)
    assert has_row.tolist() == [True] * len(keys) + [False] * 100
    assert rows[: len(keys)].any(axis=1).all()
    assert not rows[len(keys) :].any()
    assert not delta.find("deep", keys)[1].any()


def test_keys_may_be_any_whole_numbers_and_nothing_else(tmp_path: Path) -> None:
    model = fake_counting_model()
    model.save(tmp_path / "saved")
    table = next(iter(model.tables))
    saved = SavedModel.open(tmp_path / "saved")
    keys = np.concatenate([rows.keys for rows in model.tables[table].rows.values()])
    expected = saved.read(table, keys)
    assert len(np.unique(expected, axis=0)) > 1

    np.testing.assert_array_equal(saved.read(table, keys.view(np.int64)), expected)
    small = np.array([-1, 3], np.int32)
    wide = np.array([2**64 - 1, 3], np.uint64)
    np.testing.assert_array_equal(saved.read(table, small), saved.read(table, wide))
    for wrong in (keys.astype(np.float64), keys[:, None], np.array(["3"]), keys.tolist()):
        with pytest.raises(UsageError, match="expected whole numbers in one dimension"):
            saved.find(table, wrong)
