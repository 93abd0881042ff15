"""Writes the Python code of the messages in protos/v1/*.proto, or checks that it is up to date.

    python -m ctr_ps.protos.wire.generate            # write
    python -m ctr_ps.protos.wire.generate --check    # exit 1 and name the stale files

Stubs and servicers are not generated: protos/wire/calls.py has a row for each RPC.
The generator is pinned in pyproject.toml: generated code refuses a runtime older than its generator.
"""

import argparse
import sys
import tempfile
from pathlib import Path

PROTOS = Path(__file__).parents[1] / "v1"
ROOT = PROTOS.parents[2]


def generate(target: Path) -> None:
    """Writes the code of all `.proto` files below `target`, in the place of the repository's root."""
    from grpc_tools import protoc  # a development tool: imported only to generate

    for proto in sorted(PROTOS.glob("*.proto")):
        arguments = ["protoc", f"-I{ROOT}", f"--python_out={target}", f"--pyi_out={target}"]
        if protoc.main([*arguments, str(proto)]):
            raise SystemExit(f"protoc failed on {proto}")


def stale_files() -> list[str]:
    """Returns the names of generated files that differ from the protos."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = {
            path.name: path.read_bytes() for path in Path(folder, "ctr_ps/protos/v1").iterdir()
        }
    present = {path.name: path.read_bytes() for path in PROTOS.glob("*_pb2*.py*")}
    return sorted(
        name for name in fresh.keys() | present.keys() if fresh.get(name) != present.get(name)
    )


def main() -> int:
    """Generates, or checks with `--check`; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare only, exit 1 if stale")
    if not parser.parse_args().check:
        generate(ROOT)
        return 0
    if stale := stale_files():
        print(
            f"stale: {', '.join(stale)}; run python -m ctr_ps.protos.wire.generate", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
