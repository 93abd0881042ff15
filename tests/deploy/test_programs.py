"""Commands of jobs and scripts."""

import sys
from pathlib import Path

import pytest
import typer

from ctr_ps.deploy.programs import commands_of_job, commands_of_script, split_command


def test_workers_of_a_job_get_it_and_its_overrides(tmp_path: Path) -> None:
    commands = commands_of_job(
        Path("job.toml"),
        [],
        server=f"{sys.executable} -m server",
        worker=f"{sys.executable} -m worker",
        heter=f"{sys.executable} -m heter",
        overrides=["a.b=1", "c.d=x y"],
        as_json=True,
    )

    assert commands.server == (sys.executable, "-m", "server")
    assert commands.worker[3:] == ("job.toml", "--set", "a.b=1", "--set", "c.d=x y", "--json")
    assert commands.heter[2:] == ("heter", *commands.worker[3:])


def test_a_script_is_run_by_this_python_in_both_roles() -> None:
    commands = commands_of_script(Path("a/script.py"), ["--set", "x"], {"--json": False})

    assert commands.server == commands.worker == (sys.executable, "a/script.py", "--set", "x")


def test_options_of_jobs_are_refused_by_name() -> None:
    with pytest.raises(typer.BadParameter, match=r"--json, --set is for jobs, but 'script.py'"):
        commands_of_script(Path("script.py"), [], {"--json": True, "--set": ["a=b"], "--x": None})


def test_programs_next_to_this_python_come_before_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for program in ("beside/ps-server", "path/ps-server", "path/ps-worker"):
        (tmp_path / program).parent.mkdir(exist_ok=True)
        (tmp_path / program).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "beside/python"))

    server = split_command("ps-server --bind '::'")
    worker = split_command("ps-worker")

    assert server == (str(tmp_path / "beside/ps-server"), "--bind", "::")
    assert worker == (str(tmp_path / "path/ps-worker"),)


@pytest.mark.parametrize("line", ["", "ps-serverr --stay"])
def test_an_unknown_program_is_a_usage_error(line: str) -> None:
    with pytest.raises(typer.BadParameter, match="next to"):
        split_command(line)
