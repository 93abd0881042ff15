"""Writes what this release leaves on disk and sends: `python -m tests.golden make`.

It goes to tests/golden/VERSION, and replaces what is there as long as CHANGELOG.md says that this version is
not yet released. From then on these files are kept, and every later release loads them (test_golden.py).
"""

import argparse
import base64
import json
import shutil
import sys
from pathlib import Path

from ctr_ps.protos.role import Members
from ctr_ps.protos.runtime.environment import own_version
from ctr_ps.protos.wire.stream import STREAMED
from ctr_ps.ps_worker.job import override_job
from ctr_ps.ps_worker.run.plan import terms_of
from tests.golden import checkpoints, logs
from tests.golden.samples import SAMPLES, call_of

HERE = Path(__file__).parent


def recorded() -> dict[str, list[str]]:
    """Returns the bytes of the request and the answer of each sample, in base64."""
    return {
        name: [
            base64.b64encode(call_of(name).request.encode(request)).decode(),
            base64.b64encode(call_of(name).answer.encode(answer)).decode(),
        ]
        for name, (request, answer) in SAMPLES.items()
    }


def terms() -> dict[str, str]:
    """Returns the terms of a job with the default settings."""
    return terms_of(override_job({}, [], source="the defaults"), Members(2))


def make(folder: Path) -> None:
    """Writes all files of a release."""
    checkpoints.save_chain(folder / "model")
    checkpoints.save_model(folder / "model")
    logs.write_logs(folder / "logs", folder / "model")
    for lock in folder.glob("logs/*/LOCK"):
        lock.unlink()
    expected = {
        "checkpoints": {
            name: checkpoints.of_checkpoint(folder / "model", name) for name in ("full", "delta")
        },
        "predictions": checkpoints.of_model(folder / "model"),
        "logs": {name: logs.of_log(folder / "logs" / name) for name in ("fresh", "loaded")},
        "terms": terms(),
        "kinds": {call.name: kind for kind, call in STREAMED.items()},
    }
    (folder / "expected.json").write_text(json.dumps(expected) + "\n")
    (folder / "messages.json").write_text(json.dumps(recorded(), indent=1) + "\n")


def main() -> int:
    """Returns the exit status: 1 if the version is released."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("command", choices=["make"])
    parser.parse_args()
    version = own_version()
    folder = HERE / version
    if f"## {version} (not yet released)" not in (logs.ROOT / "CHANGELOG.md").read_text():
        print(f"{version} is released: its files in {folder} stay as they are", file=sys.stderr)
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    make(folder)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
