"""The manifest of `ps-serve`: Kubernetes' schemas, and that it fits the command and the base."""

import tomllib

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml
from typer.main import get_command

from ctr_ps.ps_server.checkpoint.files.manifest import LATEST
from ctr_ps.ps_worker.data.streams.source import stream_url
from ctr_ps.ps_worker.extras.inference_server import cli
from ctr_ps.ps_worker.extras.inference_server.http_service import OPEN_PATHS
from tests.deploy.k8s.overlays import (
    FOLDER,
    SECRETS,
    Document,
    documents_of,
    of_kind,
    pods_of,
    values_of,
)
from tests.deploy.k8s.test_overlays import NEWEST
from tests.support.needs import is_missing

SERVICE, BUDGET, DEPLOYMENT = yaml.safe_load_all((FOLDER / "serve/serve.yaml").read_text())
POD = DEPLOYMENT["spec"]["template"]["spec"]
(MAIN,) = POD["containers"]


def server_pod() -> Document:
    documents = yaml.safe_load_all((FOLDER / "base/servers.yaml").read_text())
    (found,) = [each for each in documents if each["kind"] == "StatefulSet"]
    pod: Document = found["spec"]["template"]["spec"]
    return pod


@pytest.mark.parametrize("version", NEWEST)
@pytest.mark.parametrize("document", [SERVICE, BUDGET, DEPLOYMENT])
def test_document_fits_its_schema(document: Document, version: str) -> None:
    kubernetes_validate.validate(document, version, strict=True)


def test_command_is_known_and_listens_where_ports_say() -> None:
    name, *arguments = MAIN["args"]
    parsed = get_command(cli.app).make_context(name, list(arguments)).params

    listens = {"http": parsed["http"], "grpc": parsed["grpc"], "metrics": parsed["metrics"]}
    ports = {each["name"]: each["containerPort"] for each in MAIN["ports"]}
    assert name == "ps-serve"
    assert listens == {each: f"0.0.0.0:{port}" for each, port in ports.items()}
    for each in SERVICE["spec"]["ports"]:
        assert ports[each["targetPort"]] == each["port"]
    assert POD["terminationGracePeriodSeconds"] > parsed["drain"] + cli.GRACE_S


def test_probes_ask_what_anybody_may_ask() -> None:
    for probe in ("startup", "readiness", "liveness"):
        asked = MAIN[f"{probe}Probe"]["httpGet"]
        assert asked["path"] in OPEN_PATHS
        assert asked["port"] == "http"


def test_pods_are_as_confined_as_servers_and_take_what_is_there() -> None:
    servers = server_pod()
    volumes = {each["name"]: each for each in POD["volumes"]}

    assert POD["securityContext"] == servers["securityContext"]
    assert MAIN["securityContext"] == servers["containers"][0]["securityContext"]
    assert {each["name"] for each in MAIN["volumeMounts"]} == volumes.keys()
    assert volumes["token"]["secret"]["secretName"] in SECRETS
    assert volumes["output"]["persistentVolumeClaim"]["claimName"] == "ctr-ps-output"
    assert SERVICE["spec"]["selector"] == DEPLOYMENT["spec"]["selector"]["matchLabels"]
    assert SERVICE["spec"]["selector"] == DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert BUDGET["spec"]["selector"] == DEPLOYMENT["spec"]["selector"]
    assert DEPLOYMENT["spec"]["replicas"] > BUDGET["spec"]["maxUnavailable"], "a drain ends all"


@pytest.mark.skipif(is_missing("kubectl"), reason="kubectl is not installed")
def test_online_overlay_serves_what_its_job_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = documents_of("online")
    (deployment,) = of_kind(documents, "Deployment")
    (job,) = (tomllib.loads(text) for text in values_of("job.toml", documents))
    pod = deployment["spec"]["template"]["spec"]
    (waits,), (serves,) = pod["initContainers"], pod["containers"]
    folder = f"/work/{job['checkpoint']['dir']}"

    parsed = get_command(cli.app).make_context("ps-serve", [*serves["args"][1:]]).params
    assert parsed["model"] == folder
    assert parsed["reload_every"] < job["checkpoint"]["every_s"]
    assert [*serves["args"][3:]] == MAIN["args"][2:], "but for the folder and how often it looks"
    assert f"{folder}/{LATEST}" in waits["args"][-1]
    assert waits["securityContext"] == MAIN["securityContext"]

    _, workers = pods_of(documents)
    assert workers.main["envFrom"] == [{"secretRef": {"name": "ctr-ps-stream"}}]
    monkeypatch.setenv("STREAM_HOST", "redis:6379")
    monkeypatch.setenv("STREAM_PASSWORD", "secret")
    url = stream_url(job["data"]["stream"])
    assert (url.address, url.options) == ("redis:6379", {"password": "secret"})
    volumes = {each["name"]: each for each in workers.spec["volumes"]}
    assert volumes[workers.volume_at(job["data"]["schema"]) or ""]["configMap"] == {
        "name": "ctr-ps-job"
    }


@pytest.mark.skipif(is_missing("kubectl"), reason="kubectl is not installed")
def test_prometheus_gets_the_names_of_jobs_that_alerts_know_and_finds_each_port() -> None:
    documents = documents_of("online")
    server, worker = pods_of(documents)
    found = {"server": server.main, "worker": worker.main, "serve": MAIN}

    for monitor in of_kind(documents, "PodMonitor"):
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        role = monitor["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"]
        ports = {each["name"] for each in found.pop(role)["ports"]}
        assert endpoint["port"] in ports
        (relabeling,) = endpoint["relabelings"]
        assert relabeling == {"targetLabel": "job", "replacement": f"ctr-ps-{role}"}
    assert not found
