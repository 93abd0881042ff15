"""The Compose file: consistency between its services, and with the image."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.needs import is_missing

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (ROOT / "deploy/docker/Dockerfile").read_text()


def with_role(role: str) -> dict[str, dict[str, Any]]:
    return {
        name: service
        for name, service in SERVICES.items()
        if service.get("environment", {}).get("TRAINING_ROLE") == role
    }


def test_file_at_the_top_is_the_one_in_deploy() -> None:
    link = ROOT / "docker-compose.yml"

    assert link.is_symlink()
    assert link.readlink() == Path("deploy/docker-compose.yml")  # relative, so that it can be moved


def test_list_of_servers_is_the_servers() -> None:
    servers = with_role("PSERVER")
    endpoints = [
        f"{server['environment']['POD_IP']}:{server['environment']['PADDLE_PORT']}"
        for server in servers.values()
    ]

    assert [server["environment"]["POD_IP"] for server in servers.values()] == list(servers)
    for service in (*servers.values(), *with_role("TRAINER").values()):
        assert service["environment"]["PADDLE_PSERVERS_IP_PORT_LIST"].split(",") == endpoints


def test_workers_are_numbered_from_zero_and_counted() -> None:
    workers = with_role("TRAINER")

    assert [worker["environment"]["PADDLE_TRAINER_ID"] for worker in workers.values()] == [
        str(index) for index in range(len(workers))
    ]
    for service in (*with_role("PSERVER").values(), *workers.values()):
        assert service["environment"]["PADDLE_TRAINERS_NUM"] == str(len(workers))


def test_servers_and_workers_see_one_folder_of_checkpoints() -> None:
    for service in (*with_role("PSERVER").values(), *with_role("TRAINER").values()):
        assert "output:/work/output" in service["volumes"]


def test_each_server_keeps_its_update_log_on_a_volume_of_its_own() -> None:
    logs = []
    for server in with_role("PSERVER").values():
        (log,) = (volume for volume in server["volumes"] if volume.endswith(":/work/log"))
        logs.append(log)
        assert "--update-log=/work/log" in server["command"]

    assert len({*logs}) == len(logs)


def test_killed_containers_are_started_again_but_not_for_ever() -> None:
    for service in (*with_role("PSERVER").values(), *with_role("TRAINER").values()):
        policy, _, limit = service["restart"].partition(":")
        assert policy == "on-failure"  # a server ends with 0 when the job is over
        assert int(limit) > 0
    for worker in with_role("TRAINER").values():
        assert "cluster.on_worker_loss=wait" in worker["command"]


def test_volumes_are_mounted_where_the_user_of_the_image_can_write() -> None:
    mounts = {mount for service in SERVICES.values() for mount in service["volumes"]}

    assert {mount.split(":")[0] for mount in mounts} == COMPOSE["volumes"].keys()
    for mount in mounts:
        assert f" {mount.split(':')[1]}" in DOCKERFILE
    assert "USER 10001:10001" in DOCKERFILE


def test_workers_start_when_the_data_are_complete() -> None:
    for worker in with_role("TRAINER").values():
        assert worker["depends_on"]["data"] == {"condition": "service_completed_successfully"}


def test_one_service_builds_the_image_of_all() -> None:
    built = [service["build"] for service in SERVICES.values() if "build" in service]

    assert {service["image"] for service in SERVICES.values()} == {"ctr-ps"}
    (build,) = built
    assert (ROOT / build["context"] / build["dockerfile"]).is_file()


@pytest.mark.parametrize("name", SERVICES)
def test_service_is_confined(name: str) -> None:
    service = SERVICES[name]

    assert "privileged" not in service
    assert "ports" not in service
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["read_only"] is True
    assert service["tmpfs"] == ["/tmp", "/var/cache/numba:uid=10001,mode=0700"]
    assert "ENV NUMBA_CACHE_DIR=/var/cache/numba\n" in DOCKERFILE


def test_all_show_a_token_that_one_service_makes() -> None:
    (maker,) = (name for name, each in SERVICES.items() if "token:/work/token" in each["volumes"])

    assert "secrets.token_urlsafe(32)" in SERVICES[maker]["command"][-1]
    assert "/work/token" in DOCKERFILE  # a folder that its user may write to
    for service in (*with_role("PSERVER").values(), *with_role("TRAINER").values()):
        assert service["environment"]["CTR_PS_TOKEN_FILE"] == "/work/token/token"
        assert "token:/work/token:ro" in service["volumes"]
        assert maker in service["depends_on"]


@pytest.mark.skipif(is_missing("docker-compose"), reason="docker-compose is not installed")
def test_compose_accepts_the_file() -> None:
    read = subprocess.run(
        ["docker-compose", "--file", ROOT / "docker-compose.yml", "config"],
        check=True,
        capture_output=True,
        text=True,
    )

    context = yaml.safe_load(read.stdout)["services"]["data"]["build"]["context"]
    assert Path(context).resolve() == ROOT
