"""Headless Chromium: pages as pictures and as final documents."""

import re
import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import numpy as np
from numba import njit
from numpy.typing import NDArray

from tests.support.needs import lacking

TIMEOUT_S = 60.0
SCHEMES = {"dark": 0, "light": 1}
"""Numbers of Blink's setting preferredColorScheme."""


def chromium() -> str:
    """Returns the command of Chromium; skips the test without it, but not in CI."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        lacking("no chromium: install it, as by apt-get install chromium")
    return found


def opened(
    page: Path | str, profile: Path, *options: str, scheme: str = "light"
) -> tuple[str, str]:
    """Opens an HTML file or URL; returns Chromium's output and the log of the page's console.

    `options` are Chromium's, such as `--dump-dom`; `scheme` is light or dark.
    """
    result = subprocess.run(
        [
            chromium(),
            "--headless",
            "--no-sandbox",  # root in a container has none
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--enable-logging=stderr",
            "--hide-scrollbars",
            f"--user-data-dir={profile}",
            f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
            *options,
            page if isinstance(page, str) else page.as_uri(),
        ],
        check=True,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    console = "\n".join(re.findall(r".*CONSOLE.*", result.stderr))
    return result.stdout, console


def screenshot(
    page: Path | str,
    profile: Path,
    *options: str,
    size: tuple[int, int],
    scheme: str = "light",
) -> NDArray[np.uint8]:
    """Returns a page in a window of `size` (width, height), uint8[height, width, 3]."""
    picture = profile.with_suffix(f".{scheme}.png")
    width, height = size
    own = (f"--screenshot={picture}", f"--window-size={width},{height}")
    opened(page, profile, *own, *options, scheme=scheme)
    return pixels_of_png(picture.read_bytes())


def pixels_of_png(content: bytes) -> NDArray[np.uint8]:
    """Returns the pixels of a PNG of 8 bits a channel without interlacing, uint8[height, width, 3].

    Filters are those of the PNG specification (RFC 2083, section 6).
    """
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    at, data = 8, b""
    width = height = channels = 0
    while at < len(content):
        (length,) = struct.unpack(">I", content[at : at + 4])
        kind, chunk = content[at + 4 : at + 8], content[at + 8 : at + 8 + length]
        at += length + 12
        if kind == b"IHDR":
            width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", chunk)
            assert (depth, interlaced) == (8, 0)
            channels = {2: 3, 6: 4}[colour]
        elif kind == b"IDAT":
            data += chunk
    lines = np.frombuffer(zlib.decompress(data), np.uint8).reshape(height, 1 + width * channels)
    pixels = np.zeros((height, width * channels), np.uint8)
    _unfilter(lines, channels, pixels)
    return pixels.reshape(height, width, channels)[:, :, :3]


@njit
def _unfilter(lines: NDArray[np.uint8], channels: int, out: NDArray[np.uint8]) -> None:
    """Adds to each byte what its line's filter predicts of the bytes to the left and above."""
    for row in range(len(lines)):
        kind = lines[row, 0]
        for i in range(out.shape[1]):
            left = np.int64(out[row, i - channels]) if i >= channels else 0
            up = np.int64(out[row - 1, i]) if row else 0
            corner = np.int64(out[row - 1, i - channels]) if row and i >= channels else 0
            predicted = 0
            if kind == 1:
                predicted = left
            elif kind == 2:
                predicted = up
            elif kind == 3:
                predicted = (left + up) // 2
            elif kind == 4:
                to_left, to_up = abs(up - corner), abs(left - corner)
                to_corner = abs(left + up - 2 * corner)
                if to_left <= to_up and to_left <= to_corner:
                    predicted = left
                else:
                    predicted = up if to_up <= to_corner else corner
            out[row, i] = (lines[row, i + 1] + predicted) % 256
