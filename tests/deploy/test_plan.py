"""Commands of jobs and scripts, role variables of a local cluster, and how exits are described."""

import sys
from pathlib import Path

import pytest
import typer

from ctr_ps.deploy.plan import (
    ROLE_VARIABLES,
    Plan,
    commands_of_job,
    describe_end,
    environment_of,
    exit_code_of,
    split_command,
    with_token,
)
from ctr_ps.protos.role import HeterRole, role_from_environment

ENDPOINTS = ["127.0.0.1:8500", "127.0.0.1:8501"]


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


def test_each_server_is_told_its_own_endpoint() -> None:
    specs = Plan(ENDPOINTS, num_workers=3).servers(["ps-server", "--stay"])

    assert [spec.name for spec in specs] == ["pserver.0", "pserver.1"]
    assert [spec.command for spec in specs] == [("ps-server", "--stay")] * 2
    assert specs[1].role == {
        "TRAINING_ROLE": "PSERVER",
        "PADDLE_PSERVERS_IP_PORT_LIST": "127.0.0.1:8500,127.0.0.1:8501",
        "PADDLE_TRAINERS_NUM": "3",
        "POD_IP": "127.0.0.1",
        "PADDLE_PORT": "8501",
    }


def test_each_worker_is_told_its_id_and_all_servers() -> None:
    specs = Plan(ENDPOINTS, num_workers=2).workers(["ps-worker"])

    assert [spec.name for spec in specs] == ["trainer.0", "trainer.1"]
    assert specs[1].role == {
        "TRAINING_ROLE": "TRAINER",
        "PADDLE_PSERVERS_IP_PORT_LIST": "127.0.0.1:8500,127.0.0.1:8501",
        "PADDLE_TRAINERS_NUM": "2",
        "PADDLE_TRAINER_ID": "1",
    }


def test_all_processes_are_told_of_heter_trainers() -> None:
    heter = ["127.0.0.1:8600", "127.0.0.1:8601"]

    plan = Plan(ENDPOINTS, 2, heter)
    servers, workers = plan.servers(["ps-server"]), plan.workers(["ps-worker"])
    trainers = plan.heter_trainers(["ps-worker", "heter"], "gpu")

    roles = [role_from_environment(spec.role) for spec in (*servers, *workers, *trainers)]
    assert [role.heter_endpoints for role in roles if role] == [tuple(heter)] * 6
    assert [spec.name for spec in trainers] == ["heter.0", "heter.1"]
    assert roles[-1] == HeterRole(
        endpoints=tuple(ENDPOINTS),
        heter_endpoints=tuple(heter),
        heter_index=1,
        num_workers=2,
        device="cuda",
    )


def test_a_role_in_the_launchers_own_environment_does_not_leak() -> None:
    inherited = dict.fromkeys(ROLE_VARIABLES, "stale") | {"HOME": "/home/me"}
    server = Plan(ENDPOINTS, num_workers=1).servers(["ps-server"])[0]

    environment = environment_of(server, inherited)

    assert environment["HOME"] == "/home/me"
    assert "stale" not in environment.values()
    assert "PADDLE_TRAINER_ID" not in environment


@pytest.mark.parametrize("name", ["CTR_PS_TOKEN", "CTR_PS_TOKEN_FILE", "CTR_PS_TLS_CERT"])
def test_credentials_of_the_environment_stay(name: str) -> None:
    assert with_token({name: "own"}, "new") == {name: "own"}
    assert with_token({name: ""}, "new") == {name: "", "CTR_PS_TOKEN": "new"}


@pytest.mark.parametrize(
    ("returncode", "exit_code", "description"),
    [
        (0, 0, "exited with code 0"),
        (6, 6, "exited with code 6"),
        (-11, 139, "was ended by SIGSEGV"),
        (-15, 143, "was ended by SIGTERM"),
    ],
)
def test_a_signal_counts_as_128_and_its_number(
    returncode: int, exit_code: int, description: str
) -> None:
    assert exit_code_of(returncode) == exit_code
    assert describe_end(returncode) == description
