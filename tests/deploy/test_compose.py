"""The Compose file: consistency between its services, and with the image."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from ctr_ps.protos.wire.security.access import Access, Tokens, own_token
from tests.support.needs import is_missing

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
ALL: dict[str, dict[str, Any]] = COMPOSE["services"]
MONITORING = {name: each for name, each in ALL.items() if each.get("profiles") == ["monitoring"]}
SERVICES = {name: service for name, service in ALL.items() if name not in MONITORING}
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


@pytest.mark.parametrize("name", ALL)
def test_service_is_confined(name: str) -> None:
    service = ALL[name]

    assert "privileged" not in service
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["read_only"] is True


@pytest.mark.parametrize("name", SERVICES)
def test_service_of_ours_has_no_port_and_writes_to_folders_in_memory(name: str) -> None:
    service = SERVICES[name]

    assert "ports" not in service
    assert service["tmpfs"] == ["/tmp", "/var/cache/numba:uid=10001,mode=0700"]
    assert "ENV NUMBA_CACHE_DIR=/var/cache/numba/kernels\n" in DOCKERFILE


def test_all_show_a_token_that_one_service_makes() -> None:
    (maker,) = (name for name, each in SERVICES.items() if "token:/work/token" in each["volumes"])

    script = SERVICES[maker]["command"][-1]
    assert "secrets.token_urlsafe(32)" in script
    assert "/work/token" in DOCKERFILE  # a folder that its user may write to
    for service in (*with_role("PSERVER").values(), *with_role("TRAINER").values()):
        assert service["environment"]["CTR_PS_TOKEN_FILE"] == "/work/token/token"
        assert "token:/work/token:ro" in service["volumes"]
        assert maker in service["depends_on"]


def test_made_tokens_are_an_admins_and_a_readers(tmp_path: Path) -> None:
    """The script of the service, as sh runs it; what it made stays when it runs again."""
    script = SERVICES["data"]["command"][-1].replace("$$", "$")
    (tmp_path / "token").mkdir()
    (tmp_path / "data/demo").mkdir(parents=True)
    (tmp_path / "data/demo/planted.json").touch()

    made = []
    for _ in range(2):
        subprocess.run(["sh", "-c", script], cwd=tmp_path, check=True)
        made.append([(tmp_path / "token" / name).read_text() for name in ("token", "metrics")])

    assert made[0] == made[1]
    assert (tmp_path / "token/token").stat().st_mode & 0o77 == 0
    tokens, shown = Tokens.parse(made[0][0], "token"), own_token(made[0][0], "token")
    assert tokens.access_of(shown) is Access.ADMIN
    assert tokens.access_of(made[0][1].strip()) is Access.READER


def mounted(service: str, path: str) -> Path:
    """Returns the file or folder of this repository that a container sees at a path."""
    (source,) = (
        source
        for source, target, *_ in (each.split(":") for each in ALL[service]["volumes"])
        if target == path
    )
    return ROOT / source


@pytest.mark.parametrize("name", MONITORING)
def test_monitoring_is_for_this_machine_alone(name: str) -> None:
    service = MONITORING[name]

    assert service["profiles"] == ["monitoring"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert ":" in service["image"], "an image of any version"


def test_prometheus_finds_every_process_and_shows_the_readers_token() -> None:
    config = yaml.safe_load(mounted("prometheus", "/etc/prometheus/prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}

    for role, name in (("PSERVER", "ctr-ps-server"), ("TRAINER", "ctr-ps-worker")):
        (targets,) = (each["targets"] for each in jobs[name]["static_configs"])
        assert targets == [
            f"{service}:{each['environment']['CTR_PS_METRICS'].removeprefix('0.0.0.0:')}"
            for service, each in with_role(role).items()
            if "profiles" not in each  # of a server that is not there an alert would say so
        ]
        assert jobs[name]["authorization"] == {"credentials_file": "/work/token/metrics"}
    assert "token:/work/token:ro" in MONITORING["prometheus"]["volumes"]
    assert f"USER {MONITORING['prometheus']['user']}" in DOCKERFILE  # the owner of the token
    for path in config["rule_files"]:
        assert mounted("prometheus", path).is_file()


def test_grafana_knows_prometheus_and_the_dashboard() -> None:
    provisioning = mounted("grafana", "/etc/grafana/provisioning")
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())[
        "datasources"
    ]
    (provider,) = yaml.safe_load((provisioning / "dashboards/ctr-ps.yml").read_text())["providers"]
    home = MONITORING["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]

    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    assert home.startswith(f"{provider['options']['path']}/")
    assert json.loads(mounted("grafana", home).read_text())["uid"] == "ctr-ps"


@pytest.mark.skipif(is_missing("promtool"), reason="promtool is not installed")
def test_promtool_accepts_the_configuration(tmp_path: Path) -> None:
    text = mounted("prometheus", "/etc/prometheus/prometheus.yml").read_text()
    rules = mounted("prometheus", "/etc/prometheus/alerts.yml")
    (tmp_path / "metrics").write_text("a token")
    config = tmp_path / "prometheus.yml"
    text = text.replace("/etc/prometheus/alerts.yml", str(rules))
    config.write_text(text.replace("/work/token/metrics", str(tmp_path / "metrics")))

    checked = subprocess.run(
        ["promtool", "check", "config", config], capture_output=True, text=True, check=False
    )

    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.skipif(is_missing("docker-compose"), reason="docker-compose is not installed")
def test_compose_accepts_the_file() -> None:
    command = ["docker-compose", "--file", ROOT / "docker-compose.yml", "--profile", "monitoring"]
    read = subprocess.run([*command, "config"], check=True, capture_output=True, text=True)

    services = yaml.safe_load(read.stdout)["services"]
    assert services.keys() == ALL.keys()
    assert Path(services["data"]["build"]["context"]).resolve() == ROOT


@pytest.mark.skipif(is_missing("docker-compose"), reason="docker-compose is not installed")
def test_online_example_is_valid_and_serves_this_machine_only() -> None:
    file = ROOT / "examples/online/docker-compose.yml"
    command = ["docker-compose", "--file", file, "--project-directory", ROOT, "config"]
    found = yaml.safe_load(subprocess.run(command, check=True, capture_output=True).stdout)

    assert found["services"].keys() == {"redis", "job", "producer", "serve"}
    ports = [port for each in found["services"].values() for port in each.get("ports", ())]
    assert ports == ["127.0.0.1:8000:8000/tcp"]
    for service in ("producer", "serve"):
        assert found["services"][service]["image"] == found["services"]["job"]["image"]
