"""Other systems, measured in the same run: each is a folder whose `run_peer.py` prints a JSON line last.

    PaddlePaddle   run_peer.py --servers 2 --workers 2 --mode async --optimizer sgd --batch 512 ...
    PyTorch        run_peer.py --batch 512 --threads 2 --dtype bfloat16 --steps 300

The line has `examples_per_s` and `auc`.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

MAX_STEPS = 300
LIMIT_S = 600

PADDLE_READERS = {"async": "inmemory", "geo": "feed"}
"""The fastest reader of each of its modes."""

TORCH_DTYPES = {"peer_torch_2": "float32", "peer_torch_2_bfloat16": "bfloat16"}

PeerCase = Callable[[int, int], dict[str, Any]]
"""Measures a peer, for a batch size and a number of steps."""


class PeerError(Exception):
    """Raised when a peer gives no figure; says why."""


def peer_folder(text: str) -> Path:
    """Returns the folder of a peer that a command line names."""
    folder = Path(text)
    if not (folder / "run_peer.py").is_file():
        raise argparse.ArgumentTypeError(f"no run_peer.py in the folder {text!r}")
    return folder


def paddle_cases(folder: Path) -> dict[str, PeerCase]:
    """Returns PaddlePaddle's parameter server, 2 servers x 2 workers, by mode."""
    return {f"peer_{mode}_2x2": partial(_paddle, folder, mode) for mode in PADDLE_READERS}


def torch_cases(folder: Path) -> dict[str, PeerCase]:
    """Returns plain PyTorch in one process with two threads, by precision."""
    return {name: partial(_torch, folder, dtype) for name, dtype in TORCH_DTYPES.items()}


def _paddle(folder: Path, mode: str, batch_size: int, steps: int) -> dict[str, Any]:
    arguments = f"--servers 2 --workers 2 --mode {mode} --optimizer sgd --batch {batch_size}"
    reader = ["--reader", PADDLE_READERS[mode]]
    return run_peer(folder, [*arguments.split(), *reader, "--steps", str(min(steps, MAX_STEPS))])


def _torch(folder: Path, dtype: str, batch_size: int, steps: int) -> dict[str, Any]:
    arguments = f"--batch {batch_size} --threads 2 --dtype {dtype}"
    return run_peer(folder, [*arguments.split(), "--steps", str(min(steps, MAX_STEPS))])


def run_peer(folder: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Runs a peer, which finds the Python of its own environment; returns its speed and AUC.

    Raises:
        PeerError: If it fails, takes too long, or prints something else.
    """
    command = [sys.executable, str(folder / "run_peer.py"), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise PeerError(f"no result in {LIMIT_S} s") from error
    except OSError as error:
        raise PeerError(str(error)) from error
    if done.returncode:
        raise PeerError(f"exit code {done.returncode}: {_last_line(done.stderr)}")
    try:
        result = json.loads(_last_line(done.stdout))
        return {"examples_per_s": float(result["examples_per_s"]), "auc": result["auc"]}
    except (ValueError, KeyError, TypeError) as error:
        raise PeerError(f"printed {_last_line(done.stdout)!r}, no result") from error


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")
