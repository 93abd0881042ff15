"""The Kubernetes manifests: schemas, and consistency between documents."""

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from deploy.plan import exit_code_of
from tests.support.needs import is_missing

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy/k8s"
KUSTOMIZATION: dict[str, Any] = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
DOCUMENTS: list[dict[str, Any]] = [
    document
    for resource in KUSTOMIZATION["resources"]
    for document in yaml.safe_load_all((FOLDER / resource).read_text())
]
OPERATIONS = (ROOT / "docs/operations.md").read_text()
CURRENT_API_VERSIONS = {
    "Service": "v1",
    "PersistentVolumeClaim": "v1",
    "StatefulSet": "apps/v1",
    "Job": "batch/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
}


def only(kind: str) -> dict[str, Any]:
    (document,) = (document for document in DOCUMENTS if document["kind"] == kind)
    return document


def pod_template(kind: str) -> dict[str, Any]:
    template: dict[str, Any] = only(kind)["spec"]["template"]
    return template


def containers(kind: str) -> list[dict[str, Any]]:
    pod = pod_template(kind)["spec"]
    return [*pod.get("initContainers", []), *pod["containers"]]


def cluster_literals() -> dict[str, str]:
    (cluster,) = (
        generator
        for generator in KUSTOMIZATION["configMapGenerator"]
        if generator["name"] == "ctr-ps-cluster"
    )
    return dict(literal.split("=", 1) for literal in cluster["literals"])


def environment(kind: str) -> dict[str, Any]:
    variables = containers(kind)[-1]["env"]
    return {
        variable["name"]: variable.get("value", variable.get("valueFrom")) for variable in variables
    }


def values_of(key: str, node: Any) -> Iterator[Any]:
    if isinstance(node, dict):
        yield from (value for name, value in node.items() if name == key)
        for value in node.values():
            yield from values_of(key, value)
    elif isinstance(node, list):
        for value in node:
            yield from values_of(key, value)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document["kind"])
def test_document_fits_the_schema_of_its_api_version(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)

    assert document["apiVersion"] == CURRENT_API_VERSIONS[document["kind"]]


def test_every_manifest_is_part_of_the_kustomization() -> None:
    manifests = {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml"}

    assert set(KUSTOMIZATION["resources"]) == manifests


def test_selectors_match_the_labels_of_their_pods() -> None:
    servers = pod_template("StatefulSet")["metadata"]["labels"]
    workers = pod_template("Job")["metadata"]["labels"]
    policy = only("NetworkPolicy")["spec"]
    (source,) = policy["ingress"][0]["from"]

    assert only("StatefulSet")["spec"]["selector"]["matchLabels"] == servers
    assert only("Service")["spec"]["selector"] == servers
    assert policy["podSelector"]["matchLabels"] == servers
    assert source["podSelector"]["matchLabels"] == workers
    assert servers != workers


def test_list_of_servers_names_each_pod_behind_the_headless_service() -> None:
    servers, service = only("StatefulSet"), only("Service")
    name, service_name = servers["metadata"]["name"], service["metadata"]["name"]
    port = service["spec"]["ports"][0]["port"]
    expected = [
        f"{name}-{index}.{service_name}:{port}" for index in range(servers["spec"]["replicas"])
    ]

    assert service["spec"]["clusterIP"] == "None"
    assert servers["spec"]["serviceName"] == service_name
    assert cluster_literals()["PADDLE_PSERVERS_IP_PORT_LIST"].split(",") == expected


def test_a_server_is_the_one_that_its_pod_name_says() -> None:
    role = environment("StatefulSet")

    assert role["TRAINING_ROLE"] == "PSERVER"
    assert list(role).index("POD_NAME") < list(role).index("POD_IP")  # otherwise it is not expanded
    assert role["POD_NAME"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    assert role["POD_IP"] == f"$(POD_NAME).{only('Service')['metadata']['name']}"
    assert "--stay" in containers("StatefulSet")[-1]["args"]


def test_all_ports_are_the_one_port() -> None:
    server = containers("StatefulSet")[-1]
    port = only("Service")["spec"]["ports"][0]["port"]
    probes = [
        server[f"{name}Probe"]["grpc"]["port"] for name in ("startup", "readiness", "liveness")
    ]

    assert environment("StatefulSet")["PADDLE_PORT"] == str(port)
    assert [declared["containerPort"] for declared in server["ports"]] == [port]
    assert only("Service")["spec"]["ports"][0]["targetPort"] == server["ports"][0]["name"]
    assert probes == [port] * 3
    assert only("NetworkPolicy")["spec"]["ingress"][0]["ports"][0]["port"] == port


def test_a_worker_is_the_one_that_its_completion_index_says() -> None:
    job, role = only("Job")["spec"], environment("Job")
    annotation = "metadata.annotations['batch.kubernetes.io/job-completion-index']"

    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"]
    assert cluster_literals()["PADDLE_TRAINERS_NUM"] == str(job["completions"])
    assert role["TRAINING_ROLE"] == "TRAINER"
    assert role["PADDLE_TRAINER_ID"] == {"fieldRef": {"fieldPath": annotation}}


def test_killed_pods_are_replaced_and_others_fail_the_job() -> None:
    job = only("Job")["spec"]
    drained, failed = job["podFailurePolicy"]["rules"]
    replaced = failed["onExitCodes"]["values"]
    kills = [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGBUS]

    assert job["backoffLimit"] > 0
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # a podFailurePolicy needs it
    assert drained == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}
    assert failed["action"] == "FailJob"
    assert failed["onExitCodes"]["operator"] == "NotIn"
    assert failed["onExitCodes"]["containerName"] == containers("Job")[-1]["name"]
    assert replaced == sorted(replaced)  # as Kubernetes wants it
    assert {exit_code_of(-kill) for kill in kills} <= {*replaced}
    assert min(replaced) > 128
    assert "--set=cluster.on_worker_loss=wait" in containers("Job")[-1]["args"]


def test_each_server_keeps_its_update_log_on_a_volume_of_its_own() -> None:
    (claim,) = only("StatefulSet")["spec"]["volumeClaimTemplates"]
    server = containers("StatefulSet")[-1]
    (mount,) = (
        each for each in server["volumeMounts"] if each["name"] == claim["metadata"]["name"]
    )
    (folder,) = (each for each in server["args"] if each.startswith("--update-log="))

    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    # Below it: a volume's root may have files of its file system.
    assert folder.startswith(f"--update-log={mount['mountPath']}/")


@pytest.mark.parametrize("kind", ["StatefulSet", "Job"])
def test_pods_are_confined(kind: str) -> None:
    pod = pod_template(kind)["spec"]

    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 10001
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    for container in containers(kind):
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
        assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize("kind", ["StatefulSet", "Job"])
def test_what_python_writes_beside_its_data_is_on_volumes(kind: str) -> None:
    volumes = {volume["name"]: volume for volume in pod_template(kind)["spec"]["volumes"]}

    for container in containers(kind):
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert volumes[mounts["/var/cache/numba"]]["emptyDir"] == {}
        assert volumes[mounts["/tmp"]]["emptyDir"] == {}
        assert "command" not in container, "it would replace the image's entry point"


@pytest.mark.parametrize("kind", ["StatefulSet", "Job"])
def test_servers_and_workers_show_the_token_of_the_secret(kind: str) -> None:
    (secret,) = values_of("secret", pod_template(kind)["spec"]["volumes"])
    (mount,) = (m for m in containers(kind)[-1]["volumeMounts"] if m["name"] == "token")
    create = f"kubectl create secret generic {secret['secretName']} --from-literal=token="

    assert environment(kind)["CTR_PS_TOKEN_FILE"] == f"{mount['mountPath']}/token"
    assert create in OPERATIONS


@pytest.mark.parametrize("kind", ["StatefulSet", "Job"])
def test_names_that_a_pod_refers_to_exist(kind: str) -> None:
    pod = pod_template(kind)["spec"]
    generated = {generator["name"] for generator in KUSTOMIZATION["configMapGenerator"]}
    mounted = {mount["name"] for mounts in values_of("volumeMounts", pod) for mount in mounts}

    claims = only(kind)["spec"].get("volumeClaimTemplates", [])
    named = [*pod["volumes"], *(claim["metadata"] for claim in claims)]

    assert {each["name"] for each in named} == mounted
    for source in (*values_of("configMapRef", pod), *values_of("configMap", pod)):
        assert source["name"] in generated
    for claim in values_of("persistentVolumeClaim", pod):
        assert claim["claimName"] == only("PersistentVolumeClaim")["metadata"]["name"]
    assert {image["name"] for image in KUSTOMIZATION["images"]} >= set(values_of("image", pod))


def test_enumerated_fields_have_known_values() -> None:
    choices: dict[str, list[str] | list[list[str]]] = {
        "accessModes": [["ReadWriteMany"], ["ReadWriteOnce"]],
        "imagePullPolicy": ["Always", "IfNotPresent", "Never"],
        "fsGroupChangePolicy": ["Always", "OnRootMismatch"],
        "podManagementPolicy": ["OrderedReady", "Parallel"],
        "protocol": ["TCP", "UDP", "SCTP"],
        "policyTypes": [["Ingress"], ["Egress"], ["Ingress", "Egress"]],
    }

    found = {key: list(values_of(key, DOCUMENTS)) for key in choices}

    for key, values in found.items():
        assert values, key
        assert all(value in choices[key] for value in values), (key, values)


def test_job_is_the_demo() -> None:
    assert (FOLDER / "job.toml").read_text() == (ROOT / "examples/demo.toml").read_text()


@pytest.mark.skipif(is_missing("kubectl"), reason="kubectl is not installed")
def test_kustomize_renders_it_all() -> None:
    rendered = subprocess.run(
        ["kubectl", "kustomize", FOLDER], check=True, capture_output=True, text=True
    )
    kinds = [document["kind"] for document in yaml.safe_load_all(rendered.stdout)]

    assert sorted(kinds) == sorted(["ConfigMap", "ConfigMap", *CURRENT_API_VERSIONS])
