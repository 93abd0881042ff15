"""A module on a device, here the CPU through PyTorch's operations, against the same module on the host."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")

from ctr_ps.ctr_model.batch import Batch  # noqa: E402
from ctr_ps.ctr_model.parameters import Lookup  # noqa: E402
from ctr_ps.ctr_model.schema import Schema  # noqa: E402
from ctr_ps.ctr_model.torch import TorchModel  # noqa: E402
from ctr_ps.ctr_model.torch.device import DeviceBatch, DeviceModel, SlotRows, slots_of  # noqa: E402
from ctr_ps.ps_worker.training.lookups import keys_of_batch  # noqa: E402
from tests.support.torch_models import TWINS  # noqa: E402

NUM_DENSE, NUM_SLOTS = 3, 4
OPTIONS = {"dim": 4, "hidden": [16, 8]}


def batch_of(size: int, fewest_keys: int, most_keys: int, seed: int) -> Batch:
    """Returns examples whose slots have so many keys."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(fewest_keys, most_keys + 1, size * NUM_SLOTS)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return Batch(
        labels=(rng.random(size) < 0.3).astype(np.float32),
        dense=rng.normal(size=(size, NUM_DENSE)).astype(np.float32),
        keys=rng.integers(0, 50, offsets[-1]).astype(np.uint64),
        offsets=offsets,
        num_slots=NUM_SLOTS,
    )


@pytest.mark.parametrize("num_keys", [(0, 0), (0, 1), (1, 1), (0, 3)])
@pytest.mark.parametrize("name", TWINS)
def test_gradients_are_those_of_the_host(name: str, num_keys: tuple[int, int]) -> None:
    """Where each key has its own copy of a row, and the gradients of a row's copies are added."""
    model = TorchModel(Schema.numbered(NUM_DENSE, NUM_SLOTS), TWINS[name], OPTIONS)
    device = DeviceModel(model, torch.device("cpu"))
    workspace = model.workspace(32)
    for seed in range(5):
        batch = batch_of(32, *num_keys, seed)
        keys, rng = keys_of_batch(batch, model.tables), np.random.default_rng(seed)
        rows = {
            table.name: rng.normal(
                size=(keys.unique[table.name].size, table.dim), scale=0.1
            ).astype(np.float32)
            for table in model.tables
        }
        params = (model.initial_values + rng.normal(size=model.num_params, scale=0.1)).astype(
            np.float32
        )
        dense = np.empty(model.num_params, np.float32)
        sparse = {table: np.empty_like(values) for table, values in rows.items()}

        expected = model.gradient(params, batch, keys.lookups(rows), workspace, dense, sparse)
        out = torch.empty(model.num_params)
        lookups = keys.lookups(rows)
        copies = {
            name: torch.tensor(values[lookups[name].inverse]) for name, values in rows.items()
        }
        slots = {slots_of(table): slot_rows(lookups[table.name]) for table in model.tables}
        there = DeviceBatch.of(batch, slots, torch.device("cpu"))
        result, grads = device.gradient(torch.tensor(params), there, copies, out)

        assert result.loss.item() == pytest.approx(expected.loss, rel=1e-5)
        close(result.probabilities, expected.probabilities)
        close(out.numpy(), dense)
        for table, grad in grads.items():
            added = np.zeros_like(sparse[table])
            if grad is not None:
                np.add.at(added, lookups[table].inverse, grad.numpy())
            close(added, sparse[table])


def slot_rows(lookup: Lookup) -> SlotRows:
    counts = np.diff(lookup.offsets).reshape(-1, lookup.num_slots)
    offsets = None if (counts == 1).all() else torch.tensor(lookup.offsets)
    return SlotRows(torch.tensor(lookup.inverse), offsets, counts.max(0))


def close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
