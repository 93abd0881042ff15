"""The manifest of `ps-serve`: Kubernetes' schemas, and that it fits the command and the base."""

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml
from typer.main import get_command

from ctr_ps.ps_worker.extras.inference_server import cli
from ctr_ps.ps_worker.extras.inference_server.http_service import OPEN_PATHS
from tests.deploy.k8s.overlays import FOLDER, SECRETS, Document
from tests.deploy.k8s.test_overlays import NEWEST

SERVICE, DEPLOYMENT = yaml.safe_load_all((FOLDER / "serve/serve.yaml").read_text())
POD = DEPLOYMENT["spec"]["template"]["spec"]
(MAIN,) = POD["containers"]


def server_pod() -> Document:
    documents = yaml.safe_load_all((FOLDER / "base/servers.yaml").read_text())
    (found,) = [each for each in documents if each["kind"] == "StatefulSet"]
    pod: Document = found["spec"]["template"]["spec"]
    return pod


@pytest.mark.parametrize("version", NEWEST)
@pytest.mark.parametrize("document", [SERVICE, DEPLOYMENT], ids=["service", "deployment"])
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
