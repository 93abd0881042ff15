"""Each rule and schema finds what it is for: a changed copy of an overlay has the problem, and only that."""

from collections.abc import Callable
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from tests.deploy.k8s.overlays import Document, documents_of, of_kind, pods_of
from tests.deploy.k8s.rules import problems
from tests.deploy.k8s.schemas import CUSTOM
from tests.support.needs import is_missing

pytestmark = pytest.mark.skipif(is_missing("kubectl"), reason="kubectl is not installed")

Mutation = Callable[[list[Document]], None]


def put(kind: str, path: str, value: Any) -> Mutation:
    """Returns the change of one field; None takes it away."""

    def change(documents: list[Document]) -> None:
        *steps, last = path.split("/")
        node: Any = of_kind(documents, kind)[0]
        for step in steps:
            node = node[int(step) if isinstance(node, list) else step]
        key = int(last) if isinstance(node, list) else last
        if value is None:
            del node[key]
        else:
            node[key] = value

    return change


def variable(role: str, name: str, value: str) -> Mutation:
    """Returns the change of an environment variable."""

    def change(documents: list[Document]) -> None:
        pods = pods_of(documents)[role == "worker"]
        (found,) = (each for each in pods.main["env"] if each["name"] == name)
        found.clear()
        found.update(name=name, value=value)

    return change


def without_variable(role: str, name: str) -> Mutation:
    """Returns the removal of an environment variable."""

    def change(documents: list[Document]) -> None:
        main = pods_of(documents)[role == "worker"].main
        main["env"] = [each for each in main["env"] if each["name"] != name]

    return change


def argument(role: str, old: str, new: str | None) -> Mutation:
    """Returns the change of an argument."""

    def change(documents: list[Document]) -> None:
        arguments = pods_of(documents)[role == "worker"].main["args"]
        index = arguments.index(old)
        arguments[index : index + 1] = [] if new is None else [new]

    return change


def without(kind: str) -> Mutation:
    """Returns the removal of all documents of a kind."""

    def change(documents: list[Document]) -> None:
        documents[:] = [document for document in documents if document["kind"] != kind]

    return change


POD = "spec/template/spec"
MAIN = f"{POD}/containers/0"
REPLICATED = "spec/replicatedJobs"
EXIT_CODES = "spec/podFailurePolicy/rules/1/onExitCodes"
REPLACED = [132, 134, 135, 137, 139, 143]
GRPC_PROBE = {"grpc": {"port": 8500}, "periodSeconds": 60, "failureThreshold": 60}
WRONG_JOB = """
[model]
name = "ctr_dnn"
[data]
train = "data/train"
test = "data/test"
shuffled = true
[checkpoint]
dir = "output/model"
"""


@pytest.mark.parametrize(
    ("overlay", "change", "problem"),
    [
        ("local", put("NetworkPolicy", "spec/policyTypes", ["Egress"]), "is of type ['Egress']"),
        (
            "local",
            put("NetworkPolicy", "spec/ingress/0/ports/0/protocol", "UDP"),
            "servers are reached by",
        ),
        ("local", put("NetworkPolicy", "spec/ingress/0/from", None), "servers are reached by"),
        ("local", put("NetworkPolicy", "spec/podSelector", {}), "0 network policies for servers"),
        ("local", without("NetworkPolicy"), "0 network policies for workers"),
        (
            "local",
            put("StatefulSet", f"{MAIN}/ports/0/protocol", "UDP"),
            "a port of servers is not TCP",
        ),
        ("local", put("StatefulSet", f"{MAIN}/ports/0/containerPort", 8501), "probes of"),
        ("local", put("StatefulSet", f"{MAIN}/livenessProbe/grpc/port", 8501), "probes of"),
        ("local", put("Service", "spec/ports/0/port", 8501), "the Service sends grpc"),
        ("local", variable("server", "CTR_PS_METRICS", "9187"), "metrics of servers at 9187"),
        ("local", variable("worker", "CTR_PS_METRICS", "0.0.0.0:9187"), "metrics of workers"),
        (
            "local",
            put("StatefulSet", "spec/replicas", 3),
            "which is not in PADDLE_PSERVERS_IP_PORT_LIST",
        ),
        ("local", put("StatefulSet", "spec/serviceName", "other"), "no names of their own"),
        ("local", variable("server", "POD_IP", "ps-server-0.ps-server"), "server 1 is"),
        ("local", variable("worker", "NUM_SERVERS", "3"), "worker 0 is"),
        ("local", variable("worker", "PADDLE_TRAINERS_NUM", "3"), "worker 0 is"),
        ("local", put("Job", "spec/completions", 3), "3 completions, 2 at once"),
        ("local", put("Job", "spec/parallelism", 1), "2 completions, 1 at once"),
        ("local", variable("worker", "PADDLE_TRAINER_ID", "0"), "worker 1 is"),
        (
            "local",
            argument(
                "server", "--checkpoint-root=/work/output", "--checkpoint-root=/work/elsewhere"
            ),
            "in none of the servers' roots",
        ),
        (
            "local",
            argument("server", "--checkpoint-root=/work/output", "--checkpoint-root=/work"),
            "is not on the",
        ),
        (
            "local",
            argument("server", "--update-log=/work/log/updates", "--update-log=/tmp/updates"),
            "which is lost with its pod",
        ),
        (
            "local",
            argument(
                "server", "--update-log=/work/log/updates", "--update-log=/work/output/updates"
            ),
            "servers share an update log",
        ),
        (
            "local",
            argument("server", "--update-log=/work/log/updates", "--update-log=/work/log"),
            "is the root of",
        ),
        ("local", argument("server", "--update-log=/work/log/updates", None), "is on None"),
        (
            "jobset",
            argument(
                "server", "--update-log=/work/log/$(SERVER_INDEX)", "--update-log=/work/log/x"
            ),
            "share",
        ),
        (
            "jobset",
            argument(
                "server", "--update-log=/work/log/$(SERVER_INDEX)", "--update-log=/work/log/$(I)"
            ),
            "share",
        ),
        ("local", argument("server", "--stay", "--linger"), "ps-server has no option --linger"),
        (
            "local",
            argument("server", "--stay", None),
            "servers of a StatefulSet have the arguments",
        ),
        (
            "jobset",
            argument("server", "--sigterm-exit-code=143", "--stay"),
            "servers of a JobSet have the arguments",
        ),
        ("jobset", argument("server", "--sigterm-exit-code=143", None), "would count as done"),
        (
            "local",
            argument("worker", "--set=cluster.on_worker_loss=wait", None),
            "does not wait for a worker",
        ),
        (
            "production",
            argument("server", "--memory-limit=12G", "--memory-limit=16G"),
            "servers take up to 16G, and are killed at 16Gi",
        ),
        ("local", put("Job", f"{MAIN}/command", ["sh"]), "replaces the image's entry point"),
        (
            "local",
            argument("worker", "--set=cluster.retry_s=600", "--set=cluster.retry=600"),
            "not a job: --set",
        ),
        ("local", put("ConfigMap", "data/job.toml", WRONG_JOB), "not a job: job.toml"),
        (
            "production",
            put("Job", f"{MAIN}/volumeMounts/0/mountPath", "/data"),
            "where nothing is mounted",
        ),
        (
            "local",
            argument("worker", "/job/job.toml", "/etc/job.toml"),
            "where no ConfigMap is mounted",
        ),
        (
            "local",
            put("StatefulSet", f"{POD}/securityContext/runAsNonRoot", None),
            "servers run as",
        ),
        (
            "local",
            put("Job", f"{POD}/automountServiceAccountToken", True),
            "workers have a token of Kubernetes' API",
        ),
        (
            "local",
            put("Job", f"{POD}/initContainers/0/securityContext/capabilities", None),
            "planted-data has",
        ),
        ("local", put("StatefulSet", f"{MAIN}/resources/limits", {}), "server asks for"),
        (
            "local",
            put("StatefulSet", f"{MAIN}/volumeMounts/2/mountPath", "/temp"),
            "cannot write below",
        ),
        ("local", without("PersistentVolumeClaim"), "want the persistentVolumeClaim ctr-ps-output"),
        ("local", put("ConfigMap", "metadata/name", "job"), "want the configMap ctr-ps-job"),
        (
            "local",
            put("StatefulSet", "spec/volumeClaimTemplates/0/metadata/name", "logs"),
            "servers have the volumes",
        ),
        (
            "kubeflow",
            put("TFJob", "spec/tfReplicaSpecs/PS/template/spec/containers/0/name", "server"),
            "looks for",
        ),
        (
            "local",
            variable("worker", "CTR_PS_TOKEN_FILE", "/run/token"),
            "CTR_PS_TOKEN_FILE of workers is /run/token",
        ),
        (
            "local",
            variable("worker", "CTR_PS_TOKEN_FILE", "/run/ctr-ps/metrics"),
            "of workers is /run/ctr-ps/metrics",
        ),
        (
            "production",
            variable("server", "CTR_PS_TLS_KEY", "/run/ctr-ps/tls.key"),
            "CTR_PS_TLS_KEY of servers is",
        ),
        (
            "production",
            put("Job", f"{POD}/volumes/1/secret/items", None),
            "workers have the servers' key",
        ),
        ("production", without_variable("worker", "CTR_PS_TLS_CA"), "only one side speaks TLS"),
        (
            "production",
            variable("worker", "CTR_PS_TLS_NAME", "ps-server-0.ps-server"),
            "servers' certificate is for ps-server",
        ),
        (
            "production",
            put("ServiceMonitor", "spec/endpoints/0/tlsConfig/serverName", "ctr-ps"),
            "servers' certificate is for ps-server",
        ),
        (
            "production",
            put("StatefulSet", f"{MAIN}/startupProbe", GRPC_PROBE),
            "the startup probe is by",
        ),
        (
            "production",
            put("StatefulSet", f"{MAIN}/readinessProbe/exec/command", ["true"]),
            "the readiness probe runs",
        ),
        (
            "local",
            put("StatefulSet", f"{MAIN}/readinessProbe/grpc/service", None),
            "the readiness probe asks for None",
        ),
        (
            "local",
            put("StatefulSet", f"{MAIN}/livenessProbe/grpc/service", "ctr_ps.v1.ParameterServer"),
            "the liveness probe asks for ctr_ps",
        ),
        (
            "local",
            put("StatefulSet", f"{MAIN}/startupProbe", None),
            "the startup probe gives up after 0 s",
        ),
        (
            "local",
            put("StatefulSet", f"{MAIN}/livenessProbe/failureThreshold", 1),
            "the liveness probe gives up after 10 s",
        ),
        (
            "local",
            put("StatefulSet", f"{MAIN}/lifecycle", None),
            "servers end 0 s after the workers",
        ),
        (
            "local",
            put("StatefulSet", f"{POD}/terminationGracePeriodSeconds", 15),
            "servers are killed before",
        ),
        ("local", put("Job", f"{EXIT_CODES}/values", [137]), "worker fails by"),
        ("local", put("Job", f"{EXIT_CODES}/operator", "In"), "worker fails by"),
        (
            "local",
            put("Job", "spec/podFailurePolicy/rules/0/action", "Count"),
            "a drained node counts for worker",
        ),
        ("local", put("Job", f"{EXIT_CODES}/containerName", "x"), "of a container x"),
        (
            "jobset",
            put("JobSet", f"{REPLICATED}/0/template/{EXIT_CODES}/values", [12, *REPLACED]),
            "exit codes of server",
        ),
        (
            "jobset",
            put("JobSet", f"{REPLICATED}/0/template/{EXIT_CODES}/values", REPLACED),
            "exit codes of server",
        ),
        ("local", put("Job", f"{EXIT_CODES}/values", [16, *REPLACED]), "exit codes of worker"),
        ("local", put("Job", "spec/backoffLimit", 0), "worker: 0 restarts"),
        (
            "paddle",
            put("PaddleJob", "spec/ps/template/spec/restartPolicy", "Never"),
            "a killed server fails",
        ),
        (
            "kubeflow",
            put("TFJob", "spec/tfReplicaSpecs/PS/template/spec/restartPolicy", "Never"),
            "hides that of",
        ),
        ("jobset", put("JobSet", f"{REPLICATED}/1/dependsOn", None), "the Jobs wait for"),
        (
            "jobset",
            put("JobSet", "spec/successPolicy/targetReplicatedJobs", ["server"]),
            "the JobSet ends with",
        ),
        (
            "jobset",
            put("JobSet", "spec/failurePolicy/rules/1/action", "RestartJobSet"),
            "a failed Job is followed by",
        ),
        ("jobset", put("JobSet", f"{REPLICATED}/0/replicas", 2), "server has 2 Jobs"),
        (
            "jobset",
            put("JobSet", f"{REPLICATED}/0/template/spec/podReplacementPolicy", None),
            "two pods may have one",
        ),
        ("jobset", put("JobSet", "spec/network/enableDNSHostnames", False), "have no names"),
        ("jobset", put("JobSet", "metadata/name", "other"), "expected ('other-server-0-0"),
        ("local", put("Service", "spec/clusterIP", "10.0.0.1"), "no names of their own"),
        ("local", put("Service", "spec/selector", {"a": "b"}), "selects other pods"),
        ("local", put("Service", "spec/publishNotReadyAddresses", None), "no name until it is"),
        (
            "local",
            put("StatefulSet", "spec/updateStrategy", {"type": "RollingUpdate"}),
            "restarts servers under a job",
        ),
        ("local", without("PodDisruptionBudget"), "several nodes may be drained"),
        ("local", put("PodDisruptionBudget", "spec/maxUnavailable", 2), "a drained node waits for"),
        (
            "production",
            put("StatefulSet", f"{POD}/topologySpreadConstraints/0/labelSelector/matchLabels", {}),
            "are spread",
        ),
        ("production", put("ServiceMonitor", "spec/endpoints/0/port", "grpc"), "reads port grpc"),
        (
            "production",
            put("ServiceMonitor", "spec/endpoints/0/scheme", "http"),
            "the ServiceMonitor speaks http",
        ),
        (
            "production",
            put("PodMonitor", "spec/selector/matchLabels", {"a": "b"}),
            "other pods than workers",
        ),
        (
            "production",
            put("ServiceMonitor", "spec/endpoints/0/authorization/credentials/key", "token"),
            "shows",
        ),
        (
            "production",
            put("PodMonitor", "spec/podMetricsEndpoints/0/relabelings/0/replacement", "w"),
            "knows no job",
        ),
        (
            "local",
            put("StatefulSet", f"{MAIN}/imagePullPolicy", "Sometimes"),
            "imagePullPolicy is Sometimes",
        ),
        (
            "local",
            put("PersistentVolumeClaim", "spec/accessModes", ["ReadWrite"]),
            "accessModes is ['ReadWrite']",
        ),
    ],
)
def test_rule_finds_a_changed_overlay(overlay: str, change: Mutation, problem: str) -> None:
    documents = documents_of(overlay)

    change(documents)

    assert any(problem in found for found in problems(documents)), problems(documents)


@pytest.mark.parametrize(
    ("overlay", "change"),
    [
        ("jobset", put("JobSet", "spec/successPolicy/operator", "Some")),
        ("jobset", put("JobSet", "spec/failurePolicy/rules/0/action", "RestartPod")),
        ("jobset", put("JobSet", f"{REPLICATED}/1/dependsOn/0/status", "Started")),
        ("jobset", put("JobSet", f"{REPLICATED}/1/dependson", [])),
        ("paddle", put("PaddleJob", "spec/intranet", "Pod")),
        ("paddle", put("PaddleJob", "spec/ps/template", None)),
        ("kubeflow", put("TFJob", "spec/tfReplicaSpecs/PS/restartPolicy", "OnExit")),
        ("production", put("ServiceMonitor", "spec/endpoints/0/token", "x")),
    ],
)
def test_schema_refuses_a_changed_resource(overlay: str, change: Mutation) -> None:
    documents = documents_of(overlay)
    (custom,) = (
        each for each in documents if each["kind"] in CUSTOM and each["kind"] != "PodMonitor"
    )
    schema = CUSTOM[custom["kind"]]
    jsonschema.validate(custom, schema)

    change(documents)

    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(custom, schema)
