"""Lookup of the values of keys in the data, since hashes cannot be inverted."""

from collections.abc import Collection, Iterator, Sequence

from ctr_model.features import key_of
from ps_worker.data.files.file_split import FileSplit
from ps_worker.data.text.line_blocks import line_blocks

_MAX_LINES = 20_000
_MAX_SHOWN = 24


def value_texts(
    files: Sequence[str], num_dense: int, wanted: Sequence[Collection[int]]
) -> list[dict[int, str]]:
    """Returns the texts of keys that occur in the first lines of the files.

    Args:
        files: In Criteo's layout, with or without labels.
        num_dense: Dense columns before the slots.
        wanted: For each slot the keys to find.

    Returns:
        For each slot the texts by key; long ones are truncated.
    """
    open_keys = [set(keys) for keys in wanted]
    tried: list[set[bytes]] = [set() for _ in wanted]
    texts: list[dict[int, str]] = [{} for _ in wanted]
    for line in _first_lines(files):
        if not any(open_keys):
            break
        fields = line.removesuffix(b"\r").split(b"\t")
        if len(fields) - num_dense - len(wanted) not in (0, 1):
            continue
        for slot, value in enumerate(fields[-len(wanted) :]):
            if open_keys[slot] and value not in tried[slot]:
                tried[slot].add(value)
                key = key_of(slot + 1, value)
                if key in open_keys[slot]:
                    open_keys[slot].remove(key)
                    texts[slot][key] = _shown(value)
    return texts


def _first_lines(files: Sequence[str]) -> Iterator[bytes]:
    num_lines = 0
    for path in files:
        for block, _ in line_blocks(FileSplit(path)):
            for line in block.tobytes().split(b"\n")[:-1]:
                yield line
                num_lines += 1
                if num_lines == _MAX_LINES:
                    return


def _shown(value: bytes) -> str:
    text = value.decode(errors="backslashreplace")
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
