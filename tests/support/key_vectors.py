"""The keys that docs/features.md publishes."""

import re

from tests.support.commands import ROOT

DOCUMENT = ROOT / "docs" / "features.md"

_VECTOR_ROW = re.compile(
    r"^\| (\d+) \| `([0-9a-f ]*)` \| [^|]* \| `0x([0-9a-f]{16})` \|$", re.MULTILINE
)


def published_vectors() -> list[tuple[int, bytes, int]]:
    rows = _VECTOR_ROW.findall(DOCUMENT.read_text(encoding="utf-8"))
    return [(int(slot), bytes.fromhex(value), int(key, 16)) for slot, value, key in rows]
