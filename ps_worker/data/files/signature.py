"""Signatures of lists of files: whether two processes, or two runs, see the same ones.

    2 files, 1320 bytes, digest 5f0c...
    part-0.tsv 660 bytes 81a3...          the name without its folder, and a digest of both ends of the file
    part-1.tsv 660 bytes 0c11...

A machine may have the files in another folder. Changes in the middle of a file are detected by its size only;
of a long list some files are not opened, and not all are listed.
"""

import hashlib
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import PurePath

import numpy as np

from ctr_ps.protos.errors import counted
from ctr_ps.ps_worker.data.files.listing import FileStamp, ends_of, is_url

MOST_OPENED = 1024
MOST_OPENED_BY_URL = 32
"""Files of a list whose ends are read; of a longer list this number, at equal distances."""
_END_BYTES = 4096
_MOST_LISTED = 2**15  # characters
_MOST_TOLD = 5


def signature_of(files: Sequence[str], stamps: Mapping[str, FileStamp | None]) -> str:
    """Returns the signature of files in order, by name only without a stamp; raises DataError."""
    if not files:
        return "no files"
    limit = MOST_OPENED_BY_URL if any(map(is_url, files)) else MOST_OPENED
    num_opened = min(len(files), limit)
    opened = set(np.linspace(0, len(files) - 1, num_opened, dtype=np.int64).tolist())
    lines = [
        _line(path, stamps.get(path), is_opened=number in opened)
        for number, path in enumerate(files)
    ]
    size = sum(stamp.size for path in files if (stamp := stamps.get(path)) is not None)
    digest = _digest("\n".join(lines).encode())
    shown = "\n".join(lines)[:_MOST_LISTED]
    return f"{counted(len(files), 'file')}, {size} bytes, digest {digest}\n{shown}"


def difference_of(was: str, now: str) -> str:
    """Returns the files that differ in two signatures; "" if they are equal."""
    if was == now:
        return ""
    (old, *old_files), (new, *new_files) = was.split("\n"), now.split("\n")
    pairs = list(zip_longest(old_files, new_files))
    differing = [(one, other) for one, other in pairs if one != other]
    told = [f"{other or 'nothing'}, was {one or 'nothing'}" for one, other in differing]
    more = len(told) - _MOST_TOLD
    named = "; ".join(told[:_MOST_TOLD]) + (f"; and {more} more" if more > 0 else "")
    return f"{new}, was {old}{named and f': {named}'}"


def _line(path: str, stamp: FileStamp | None, *, is_opened: bool) -> str:
    name = PurePath(path).name
    if stamp is None:
        return name
    ends = f" {_digest(ends_of(path, stamp.size, _END_BYTES))}" if is_opened else ""
    return f"{name} {stamp.size} bytes{ends}"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
