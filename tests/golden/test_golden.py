"""What earlier releases wrote and sent means the same to this one: checkpoints, logs, messages, terms."""

import base64
import json
import shutil
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctr_ps.protos.runtime.environment import own_version
from ctr_ps.protos.wire.stream import STREAMED
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from tests.golden import checkpoints, logs
from tests.golden.__main__ import HERE, recorded, terms
from tests.golden.samples import ALL_CALLS, SAMPLES, call_of

RELEASES = sorted(path.parent for path in HERE.glob("*/expected.json"))
MAX_BYTES = 300_000

of_each_release = pytest.mark.parametrize("release", RELEASES, ids=lambda folder: folder.name)


def expected_of(release: Path) -> Any:
    return json.loads((release / "expected.json").read_text())


def plain(value: Any) -> Any:
    """Returns a value of a call with what arrays have instead of arrays, to compare."""
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), {of.name: plain(getattr(value, of.name)) for of in fields(value)}
    if isinstance(value, np.ndarray):
        return value.dtype.name, value.shape, value.tobytes()
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


def assert_alike(found: Any, expected: Any, place: str = "") -> None:
    """Numbers may differ in their last bits: other processors round alike, but their libraries may not."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), place
        for key, value in expected.items():
            assert_alike(found[key], value, f"{place}.{key}")
    elif isinstance(expected, list) and expected and not isinstance(expected[0], str):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7, err_msg=place)
    else:
        assert found == expected, place


@of_each_release
@pytest.mark.parametrize("name", ["full", "delta"])
def test_checkpoint_loads_and_trains_on(name: str, release: Path) -> None:
    Checkpoint.open(release / "model" / name).verify()

    found = checkpoints.of_checkpoint(release / "model", name)

    assert_alike(found, expected_of(release)["checkpoints"][name])


@of_each_release
def test_model_predicts_as_it_did(release: Path) -> None:
    found = checkpoints.of_model(release / "model")

    assert_alike(found, expected_of(release)["predictions"])


@of_each_release
@pytest.mark.parametrize("name", ["fresh", "loaded"])
def test_update_log_is_recovered(name: str, release: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(release / "logs" / name, tmp_path / name))

    found = logs.of_log(folder)

    assert_alike(found, expected_of(release)["logs"][name])


@of_each_release
def test_logs_have_every_kind_of_record_of_their_release(release: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(release / "logs", tmp_path / "logs"))

    found = logs.kinds_of(folder)

    assert found == logs.KINDS if release.name == own_version() else found <= logs.KINDS


@of_each_release
def test_messages_mean_what_they_meant(release: Path) -> None:
    messages = json.loads((release / "messages.json").read_text())

    for name, recorded_bytes in messages.items():
        codecs = call_of(name).request, call_of(name).answer
        for codec, value, data in zip(codecs, SAMPLES[name], recorded_bytes, strict=True):
            assert plain(codec.decode(base64.b64decode(data))) == plain(value), name


def test_this_release_has_a_sample_of_every_call() -> None:
    messages = json.loads((HERE / own_version() / "messages.json").read_text())

    assert {name.partition(",")[0] for name in messages} == ALL_CALLS.keys()
    sizes, now = (
        {name: [len(data) for data in both] for name, both in found.items()}  # maps have no order
        for found in (messages, recorded())
    )
    assert sizes == now, "made by another state of the sources: run python -m tests.golden make"


@of_each_release
def test_frames_of_a_stream_name_the_same_calls(release: Path) -> None:
    found = {call.name: kind for kind, call in STREAMED.items()}

    assert expected_of(release)["kinds"].items() <= found.items()


@of_each_release
def test_terms_of_a_job_have_the_same_text(release: Path) -> None:
    """Else a worker of this release would be refused in the place of one of that."""
    before, now = expected_of(release)["terms"], terms()

    assert {name: now[name] for name in before.keys() & now.keys()} == {
        name: value for name, value in before.items() if name in now
    }
    assert len(before.keys() & now.keys()) > len(before) // 2


@of_each_release
def test_files_of_a_release_are_small(release: Path) -> None:
    assert sum(path.stat().st_size for path in release.rglob("*") if path.is_file()) < MAX_BYTES
