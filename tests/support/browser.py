"""Headless Chromium: pages as pictures and as final documents."""

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

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
    with Image.open(picture) as image:
        return np.asarray(image.convert("RGB"))
