"""Every overlay of deploy/k8s read as its programs read it: roles, ports, options, files and exit codes."""

import re
import signal
import tomllib
from collections.abc import Iterator, Sequence

import pytest
from typer.main import get_command

import ctr_ps.ps_server.cli
from ctr_ps.deploy.plan import exit_code_of
from ctr_ps.protos.errors import NoMemoryError
from ctr_ps.protos.role import ServerRole, WorkerRole, role_from_environment
from ctr_ps.ps_server.rpc.health import SERVICE
from ctr_ps.ps_server.settings import bytes_of_size
from ctr_ps.ps_worker.extras.moves.cli import OTHER_S
from ctr_ps.ps_worker.extras.moves.move import HOLD_S
from ctr_ps.ps_worker.job import override_job
from tests.deploy.k8s.overlays import (
    ANOTHER_SIZE,
    OVERLAYS,
    SECRETS,
    USERS_CLAIMS,
    Document,
    Pods,
    documents_of,
    of_kind,
    pods_of,
    values_of,
)
from tests.support.needs import is_missing

pytestmark = pytest.mark.skipif(is_missing("kubectl"), reason="kubectl is not installed")

WORK = "/work"
"""The image's working directory, to which paths of a job are relative."""

CHECK = {"command": ["ps-server", "--check"]}
DRAINED_S_A_GIB = 20
CERTIFICATE_NAME = "ps-server"
KILLS = {
    exit_code_of(-number)
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)
}


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[None, ANOTHER_SIZE], ids=["as-it-is", "5-and-3"])
def documents(request: pytest.FixtureRequest, overlay: str) -> Sequence[Document]:
    return documents_of(overlay, request.param)


def both(documents: Sequence[Document]) -> Iterator[tuple[Pods, Pods]]:
    servers, workers = pods_of(documents)
    yield servers, workers
    yield workers, servers


def options(arguments: Sequence[str], name: str) -> list[str]:
    return [each.partition("=")[2] for each in arguments if each.partition("=")[0] == name]


def jobs_of(documents: Sequence[Document]) -> Iterator[tuple[str, Document]]:
    """Yields the role and the spec of each Job of Kubernetes, of a JobSet those of its Jobs."""
    yield from (("worker", each["spec"]) for each in of_kind(documents, "Job"))
    for jobset in of_kind(documents, "JobSet"):
        yield from (
            (each["name"], each["template"]["spec"]) for each in jobset["spec"]["replicatedJobs"]
        )


def services_of(documents: Sequence[Document], pods: Pods) -> list[Document]:
    return [
        each for each in of_kind(documents, "Service") if each["spec"]["selector"] == pods.labels
    ]


def test_pods_have_the_roles_that_programs_read(documents: Sequence[Document]) -> None:
    servers, workers = pods_of(documents)
    (port,) = (each["containerPort"] for each in servers.main["ports"] if each["name"] == "grpc")
    endpoints = tuple(f"{servers.host.format(index)}:{port}" for index in range(servers.count))

    for pods, others in both(documents):
        for index in range(pods.count):
            role = role_from_environment(pods.environment(index, others))
            assert isinstance(role, ServerRole if pods.role == "server" else WorkerRole)
            own = role.server_index if isinstance(role, ServerRole) else role.worker_index
            assert (own, role.endpoints, role.num_workers) == (index, endpoints, workers.count)


def test_a_server_above_the_size_waits_to_be_added(documents: Sequence[Document]) -> None:
    servers, workers = pods_of(documents)
    for _ in of_kind(documents, "StatefulSet"):
        assert "--spare" in servers.main["args"]
        role = role_from_environment(servers.environment(servers.count, workers), may_be_spare=True)
        assert isinstance(role, ServerRole)
        (port,) = (
            each["containerPort"] for each in servers.main["ports"] if each["name"] == "grpc"
        )
        assert role.is_spare
        assert role.endpoint == f"{servers.host.format(servers.count)}:{port}"


def test_all_pods_of_a_job_run_at_once_since_they_wait_for_each_other(
    documents: Sequence[Document],
) -> None:
    for _, job in jobs_of(documents):
        assert job["completions"] == job["parallelism"]
        assert job["completionMode"] == "Indexed"


def test_programs_listen_where_services_probes_and_prometheus_look(
    documents: Sequence[Document],
) -> None:
    for pods, others in both(documents):
        ports = {each["name"]: each["containerPort"] for each in pods.main["ports"]}
        assert pods.environment(0, others)["CTR_PS_METRICS"] == f"0.0.0.0:{ports['metrics']}"
    servers, workers = pods_of(documents)
    ports = {each["name"]: each["containerPort"] for each in servers.main["ports"]}
    assert servers.environment(0, workers)["PADDLE_PORT"] == str(ports["grpc"])
    has_tls = "CTR_PS_TLS_CERT" in servers.environment(0, workers)
    for name in ("startup", "readiness", "liveness"):
        probe = servers.main[f"{name}Probe"]
        assert has_tls == ("grpc" not in probe)  # which is plain
        if "grpc" in probe:  # whether the process lives is asked without a name
            assert probe["grpc"].get("service") == (None if name == "liveness" else SERVICE)
        limit_s = probe["periodSeconds"] * probe.get("failureThreshold", 3)
        # It may load for minutes, and be slow for one.
        assert limit_s >= {"startup": 600, "readiness": 10, "liveness": 60}[name]
        assert {ports.get(port, port) for port in values_of("port", probe)} <= {ports["grpc"]}
        assert probe.get("exec", CHECK) == CHECK
    for service in services_of(documents, servers):
        for each in service["spec"]["ports"]:
            assert ports[each["targetPort"]] == each["port"]


def test_workers_and_servers_alone_reach_the_servers(documents: Sequence[Document]) -> None:
    servers, workers = pods_of(documents)

    (policy,) = (
        each["spec"]
        for each in of_kind(documents, "NetworkPolicy")
        if each["spec"]["podSelector"] == {"matchLabels": servers.labels}
    )
    assert policy["policyTypes"] == ["Ingress"]
    (calls,) = (
        each for each in policy["ingress"] if any(port["port"] == "grpc" for port in each["ports"])
    )
    assert calls["from"] == [
        {"podSelector": {"matchLabels": each.labels}} for each in (workers, servers)
    ]


def test_options_exist_and_the_job_is_one(documents: Sequence[Document]) -> None:
    servers, workers = pods_of(documents)
    known = {name for each in get_command(ctr_ps.ps_server.cli.app).params for name in each.opts}
    (text,) = values_of("job.toml", documents)
    settings = options(workers.main["args"], "--set")
    path = next(each for each in workers.main["args"] if each.endswith(".toml"))
    volumes = {volume["name"]: volume for volume in workers.spec["volumes"]}

    assert {each.partition("=")[0] for each in servers.main["args"][1:]} <= known
    job = override_job(tomllib.loads(text), settings, source="job.toml")
    assert job.cluster.on_worker_loss == "wait"  # for the one that is made again
    assert "configMap" in volumes[workers.volume_at(path) or ""]
    for limit in options(servers.main["args"], "--memory-limit"):
        most = servers.main["resources"]["limits"]["memory"].removesuffix("i")
        assert bytes_of_size(limit) <= 0.9 * bytes_of_size(most)
    for pods, _ in both(documents):  # the image's entry point is kept
        assert not any("command" in container for container in pods.containers)


def test_servers_stay_unless_a_job_runs_them_which_needs_their_end(
    documents: Sequence[Document],
) -> None:
    servers, _ = pods_of(documents)
    arguments = servers.main["args"]

    assert ("--stay" in arguments) == (servers.owner == "StatefulSet")
    assert ("--sigterm-exit-code=143" in arguments) == (servers.owner != "StatefulSet")


def test_data_is_mounted_and_checkpoints_and_update_logs_outlive_their_pods(
    documents: Sequence[Document],
) -> None:
    servers, workers = pods_of(documents)
    (job,) = (tomllib.loads(text) for text in values_of("job.toml", documents))
    folder = f"{WORK}/{job['checkpoint']['dir']}"
    for pods in (servers, workers):
        assert pods.claims[pods.volume_at(folder) or ""] == "ctr-ps-output"
    for path in (job["data"][each] for each in ("train", "test") if each in job["data"]):
        assert workers.volume_at(f"{WORK}/{path}") is not None
    (root,) = options(servers.main["args"], "--checkpoint-root")
    assert f"{folder}/".startswith(f"{root}/")
    own = {  # of each server
        claim["metadata"]["name"]
        for each in of_kind(documents, "StatefulSet")
        for claim in each["spec"]["volumeClaimTemplates"]
    }

    logs = set()
    for index in range(servers.count):
        (log,) = options(servers.arguments(index, workers), "--update-log")
        volume = servers.volume_at(log)
        assert "$(" not in log
        assert volume in {*own, *servers.claims}
        assert log not in servers.mounts()  # whose root may have files of its file system
        logs.add((index if volume in own else 0, log))

    assert len(logs) == servers.count


def test_what_pods_refer_to_is_in_the_overlay_or_made_by_the_user(
    documents: Sequence[Document],
) -> None:
    made = {
        kind: {each["metadata"]["name"] for each in of_kind(documents, kind)}
        for kind in ("ConfigMap", "PersistentVolumeClaim")
    }
    known = {
        ("configMap", "name"): made["ConfigMap"],
        ("persistentVolumeClaim", "claimName"): USERS_CLAIMS | made["PersistentVolumeClaim"],
        ("secret", "secretName"): SECRETS,
    }

    for pods, _ in both(documents):
        for (source, key), names in known.items():
            assert {each[key] for each in values_of(source, pods.spec["volumes"])} <= names
        if of_kind(documents, "TFJob"):
            assert pods.spec["containers"][0]["name"] == "tensorflow"  # the operator looks for it


def test_credentials_are_files_of_mounted_secrets_and_workers_have_no_key(
    documents: Sequence[Document],
) -> None:
    servers, workers = pods_of(documents)
    for pods, others in both(documents):
        secrets = {each["name"]: each.get("secret") for each in pods.spec["volumes"]}
        files = {
            name: path
            for name, path in pods.environment(0, others).items()
            if name == "CTR_PS_TOKEN_FILE"
            or (name.startswith("CTR_PS_TLS") and path.startswith("/"))
        }
        assert "CTR_PS_TOKEN_FILE" in files
        for name, path in files.items():
            secret = secrets[pods.volume_at(path) or ""]
            shown = {each["path"] for each in secret.get("items", [])}
            of = "ctr-ps-token" if name == "CTR_PS_TOKEN_FILE" else "ctr-ps-tls"
            assert secret["secretName"] == of
            assert not shown or path.rpartition("/")[2] in shown

    for volume in workers.spec["volumes"]:
        if volume.get("secret", {}).get("secretName") == "ctr-ps-tls":
            assert [each["key"] for each in volume["secret"]["items"]] == ["ca.crt"]
    names = {*values_of("serverName", list(documents))}
    names |= {each.environment(0, of).get("CTR_PS_TLS_NAME") for each, of in both(documents)}
    assert names <= {CERTIFICATE_NAME, None}
    speaks_tls = "CTR_PS_TLS_CERT" in servers.environment(0, workers)
    assert speaks_tls == ("CTR_PS_TLS_CA" in workers.environment(0, servers))


def test_killed_pods_are_made_again_and_failed_ones_are_not(documents: Sequence[Document]) -> None:
    for role, job in jobs_of(documents):
        drained, failed = job["podFailurePolicy"]["rules"]
        made_again = {*failed["onExitCodes"]["values"]}

        assert drained == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}
        assert (failed["action"], failed["onExitCodes"]["operator"]) == ("FailJob", "NotIn")
        assert made_again >= KILLS
        errors = {code for code in made_again if code <= 128}
        assert errors == ({NoMemoryError.exit_code} if role == "server" else set())
        container = job["template"]["spec"]["containers"][0]["name"]
        assert failed["onExitCodes"]["containerName"] == container
        assert job["backoffLimit"] >= 1
        assert job["template"]["spec"]["restartPolicy"] == "Never"


def test_pods_of_operators_are_restarted_where_they_are(documents: Sequence[Document]) -> None:
    if of_kind(documents, "PaddleJob"):
        assert [pods.spec["restartPolicy"] for pods, _ in both(documents)] == ["OnFailure"] * 2
    for jobset in of_kind(documents, "JobSet"):  # else two pods may have one update log
        servers = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
        assert servers["podReplacementPolicy"] == "Failed"


def test_servers_keep_their_names_and_apply_restarts_none(documents: Sequence[Document]) -> None:
    servers, _ = pods_of(documents)
    for each in of_kind(documents, "StatefulSet"):
        (service,) = services_of(documents, servers)
        assert service["spec"]["clusterIP"] == "None"
        # Workers look for one that loads.
        assert service["spec"]["publishNotReadyAddresses"] is True
        assert service["spec"]["selector"] == servers.labels
        assert each["spec"]["serviceName"] == service["metadata"]["name"]
        assert each["spec"]["updateStrategy"] == {"type": "OnDelete"}
    for jobset in of_kind(documents, "JobSet"):
        assert jobset["spec"]["network"]["enableDNSHostnames"] is True


def test_servers_end_after_the_workers_that_need_them(documents: Sequence[Document]) -> None:
    servers, workers = pods_of(documents)
    *_, hook = servers.main["lifecycle"]["preStop"]["exec"]["command"]
    asleep_s = {int(each) for each in re.findall(r"exec sleep (\d+)", hook)}

    assert min(asleep_s) >= 9  # of a worker after SIGTERM: 8, and one to free its place
    gib = bytes_of_size(servers.main["resources"]["limits"]["memory"].removesuffix("i")) / 2**30
    drained_s = DRAINED_S_A_GIB * gib + HOLD_S + OTHER_S
    assert servers.spec["terminationGracePeriodSeconds"] >= drained_s + 45
    assert servers.main["livenessProbe"]["terminationGracePeriodSeconds"] == 45
    assert workers.spec["terminationGracePeriodSeconds"] >= 10


def test_pods_are_confined_and_ask_for_what_they_need(documents: Sequence[Document]) -> None:
    """As PodSecurity's level `restricted` wants it."""
    for pods, _ in both(documents):
        assert pods.spec["securityContext"]["runAsNonRoot"] is True
        assert pods.spec["securityContext"]["runAsUser"] == 10001  # the image names its user
        assert pods.spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pods.spec["automountServiceAccountToken"] is False
        for container in pods.containers:
            confined, resources = container["securityContext"], container["resources"]
            assert confined["allowPrivilegeEscalation"] is False
            assert confined["readOnlyRootFilesystem"] is True
            written = {mount["mountPath"] for mount in container["volumeMounts"]}
            assert written >= {"/tmp", "/var/cache/numba"}
            assert confined["capabilities"] == {"drop": ["ALL"]}
            assert resources["requests"].keys() >= {"cpu", "memory"}
            assert "memory" in resources["limits"]
