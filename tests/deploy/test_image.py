"""Build context of the image."""

import os
import stat
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_build_context_holds_all_of_the_package() -> None:
    links = [path.name for path in (ROOT / "ctr_ps").iterdir() if path.is_symlink()]
    allowed = (ROOT / ".dockerignore").read_text().splitlines()

    assert allowed.index("*") < allowed.index("!pyproject.toml")
    for folder in ("ctr_ps", *links):
        assert f"!{folder}" in allowed or f"!{folder}/*.py" in allowed


def test_linter_finds_nothing_in_the_dockerfile() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [hadolint, ROOT / "deploy/docker/Dockerfile", ROOT / "examples/online/redis.Dockerfile"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_empty_cache_begins_as_that_of_the_image(tmp_path: Path) -> None:
    image, cache = tmp_path / "kernels", tmp_path / "cache"
    (image / "folder").mkdir(parents=True)
    (image / "folder/kernel.nbc").write_text("compiled")
    script = tmp_path / "entrypoint.sh"
    text = (ROOT / "deploy/docker/entrypoint.sh").read_text()
    assert "/opt/kernels/." in text
    assert "NUMBA_CACHE_DIR=/opt/kernels" in (ROOT / "deploy/docker/Dockerfile").read_text()
    script.write_text(text.replace("/opt/kernels", str(image)))

    for content in ("compiled", "newer"):
        run = ["sh", script, "cat", cache / "folder/kernel.nbc"]
        done = subprocess.run(
            run,
            env={**os.environ, "NUMBA_CACHE_DIR": str(cache)},
            check=True,
            capture_output=True,
            text=True,
        )
        assert done.stdout == content
        assert stat.S_IMODE(cache.stat().st_mode) == 0o700
        (cache / "folder/kernel.nbc").write_text("newer")
