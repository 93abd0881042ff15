"""The wheel: one import package, which works in a folder whose files have the names of its own folders."""

import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import ctr_ps
from ctr_ps.protos.errors import CtrPsError
from tests.support.commands import clean_environment

ROOT = Path(__file__).parents[2]
FOLDERS = ("protos", "ps_server", "ps_worker", "ctr_model", "deploy")
COMMANDS = ("ps-ckpt", "ps-data", "ps-launch", "ps-serve", "ps-server", "ps-top", "ps-worker")
SCRIPT = """
import importlib, pkgutil
import ctr_model, protos, tests  # the user's
import ctr_ps
from ctr_ps import Trainer, fleet
names = [each.name for each in pkgutil.walk_packages(ctr_ps.__path__, "ctr_ps.")]
for name in names:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in ("ray", "torch"):  # extras
            raise
assert "ctr_ps.ps_server.table.sparse_table" in names
assert ctr_ps.__file__.endswith("site-packages/ctr_ps/__init__.py")
Trainer("lr")
fleet.init()
print(ctr_model.OWNER, protos.OWNER, tests.OWNER)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As pip builds it of what is published: from the sources in an sdist."""
    from hatchling.builders.sdist import SdistBuilder
    from hatchling.builders.wheel import WheelBuilder

    folder = tmp_path_factory.mktemp("wheel")
    (sdist,) = SdistBuilder(str(ROOT)).build(directory=str(folder))
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (sources,) = (path for path in folder.iterdir() if path.is_dir())
    (path,) = WheelBuilder(str(sources)).build(directory=str(folder))
    return Path(path)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commands of an environment with the wheel, which borrows its dependencies from this one."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    pip = [sys.executable, "-m", "pip", "--python", folder, "install", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--quiet", wheel], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    ours = [each for each in sys.path if each.endswith("site-packages")]  # without the sources
    (packages / "borrowed.pth").write_text("\n".join(ours))
    return folder / "bin"


@pytest.fixture(params=[False, True], ids=["plain", "PYTHONPATH=."])
def project(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """The environment of a user whose project has folders and modules with the names of ours."""
    for name in FOLDERS:
        (tmp_path / f"{name}.py").write_text("OWNER = 'user'\n")
    for name in ("protos", "deploy", "tests"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("OWNER = 'user'\n")
    before = Path.cwd()
    os.chdir(tmp_path)
    environment = clean_environment()
    environment.pop("PYTHONPATH", None)
    yield {**environment, "PYTHONPATH": "."} if request.param else environment
    os.chdir(before)


def run(environment: dict[str, str], *command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_has_one_package_which_is_typed_and_has_the_examples(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())

    tops = {name.split("/")[0] for name in files}
    assert {name for name in tops if not name.endswith(".dist-info")} == {"ctr_ps"}
    assert "ctr_ps/py.typed" in files
    for folder in (*FOLDERS, "examples"):
        ours = subprocess.check_output(["git", "ls-files", folder], cwd=ROOT, text=True).split()
        assert {f"ctr_ps/{name}" for name in ours} <= files


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_commands_jobs_and_scripts_run_beside_folders_with_the_names_of_ours(
    installed: Path, project: dict[str, str]
) -> None:
    for command in COMMANDS:
        assert "Usage" in run(project, installed / command, "--help")
    written = run(project, installed / "ps-worker", "example", "ctr_dnn")
    assert "ctr_dnn.toml" in written
    Path("script.py").write_text(SCRIPT)
    assert run(project, installed / "python", "script.py").split() == ["user"] * 3

    # Launcher, servers and workers come as far as the data, before a kernel is compiled.
    cluster = [installed / "ps-launch", "--server-num", "1", "--worker-num", "1", "ctr_dnn.toml"]
    ended = subprocess.run(cluster, capture_output=True, text=True, env=project, check=False)

    assert "no file matches" in ended.stderr, ended.stderr


def test_every_public_name_is_there() -> None:
    assert all(getattr(ctr_ps, name) is not None for name in ctr_ps.__all__)


def test_every_error_is_public() -> None:
    def below(error: type[CtrPsError]) -> Iterator[type[CtrPsError]]:
        yield error
        for each in error.__subclasses__():
            yield from below(each)

    ours = {each for each in below(CtrPsError) if each.__module__ == CtrPsError.__module__}
    public = {getattr(ctr_ps.errors, name) for name in ctr_ps.errors.__all__}
    assert {each for each in public if issubclass(each, CtrPsError)} == ours
