"""What no schema sees: whether the documents of an overlay fit each other, the programs and the job.

A rule yields a sentence for each thing that is wrong.
"""

import signal
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence

from typer.main import get_command

import ps_server.cli
from deploy.plan import exit_code_of
from protos.errors import JobError, NoMemoryError, RoleError
from protos.role import ServerRole, WorkerRole, role_from_environment
from ps_server.rpc import health
from ps_server.settings import bytes_of_size
from ps_worker.job import override_job
from tests.deploy.k8s.overlays import Document, Pods, of_kind, pods_of, values_of

WORK = "/work"
"""The image's working directory, to which paths of a job are relative."""

USERS_CLAIMS = {"ctr-ps-data"}
CERTIFICATE_NAME = "ps-server"
SECRETS = {"ctr-ps-token", "ctr-ps-tls"}
"""What docs/kubernetes.md has the user make."""

KILLS = {
    exit_code_of(-number)
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)
}
MONITORING = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
CHOICES: Mapping[str, Sequence[object]] = {
    "accessModes": [["ReadWriteMany"], ["ReadWriteOnce"], ["ReadOnlyMany"]],
    "imagePullPolicy": ["Always", "IfNotPresent", "Never"],
    "fsGroupChangePolicy": ["Always", "OnRootMismatch"],
    "podManagementPolicy": ["OrderedReady", "Parallel"],
    "terminationMessagePolicy": ["File", "FallbackToLogsOnError"],
    "unhealthyPodEvictionPolicy": ["IfHealthyBudget", "AlwaysAllow"],
    "whenUnsatisfiable": ["DoNotSchedule", "ScheduleAnyway"],
    "completionMode": ["Indexed"],
}

Rule = Callable[[Sequence[Document]], Iterator[str]]


def problems(documents: Sequence[Document]) -> list[str]:
    """Returns all that is wrong with an overlay."""
    return [problem for rule in RULES for problem in rule(documents)]


def _both(documents: Sequence[Document]) -> Iterator[tuple[Pods, Pods]]:
    servers, workers = pods_of(documents)
    yield servers, workers
    yield workers, servers


def roles_are_as_programs_read_them(documents: Sequence[Document]) -> Iterator[str]:
    """Each pod's variables make it the server or worker that it is to be, of the same cluster."""
    servers, workers = pods_of(documents)
    (port,) = {each["containerPort"] for each in servers.main["ports"] if each["name"] == "grpc"}
    endpoints = tuple(f"{servers.host.format(index)}:{port}" for index in range(servers.count))
    for pods, others in _both(documents):
        for index in range(pods.count):
            try:
                role = role_from_environment(pods.environment(index, others))
            except RoleError as error:
                yield f"{pods.role} {index}: {error}"
                continue
            if isinstance(role, ServerRole | WorkerRole):
                own = role.server_index if isinstance(role, ServerRole) else role.worker_index
                found = (type(role), own, role.endpoints, role.num_workers)
            kind = ServerRole if pods.role == "server" else WorkerRole
            if found != (kind, index, endpoints, workers.count):
                yield f"{pods.role} {index} is {role}, expected {endpoints}, {workers.count} workers"


def numbers_agree(documents: Sequence[Document]) -> Iterator[str]:
    """All pods of a Job train at once, since they wait for each other."""
    jobs = [job["spec"] for job in of_kind(documents, "Job")]
    for jobset in of_kind(documents, "JobSet"):
        for job in jobset["spec"]["replicatedJobs"]:
            jobs.append(job["template"]["spec"])
            if job["replicas"] != 1:
                yield f"{job['name']} has {job['replicas']} Jobs, so two pods have each index"
    for job in jobs:
        if job["completions"] != job["parallelism"] or job["completionMode"] != "Indexed":
            yield f"{job['completions']} completions, {job['parallelism']} at once, {job['completionMode']}"


def networks_are_closed(documents: Sequence[Document]) -> Iterator[str]:
    """Workers alone reach the servers, over TCP; metrics are for the namespace `monitoring`."""
    servers, workers = pods_of(documents)
    from_workers = [{"podSelector": {"matchLabels": workers.labels}}]
    allowed = {
        "server": [(from_workers, "grpc"), (MONITORING, "metrics")],
        "worker": [(MONITORING, "metrics")],
    }
    policies = [each["spec"] for each in of_kind(documents, "NetworkPolicy")]
    for pods in (servers, workers):
        own = [each for each in policies if each["podSelector"] == {"matchLabels": pods.labels}]
        if len(own) != 1:
            yield f"{len(own)} network policies for {pods.role}s"
            continue
        if own[0]["policyTypes"] != ["Ingress"]:
            yield f"the network policy of {pods.role}s is of type {own[0]['policyTypes']}"
        named = {each["name"] for each in pods.main["ports"]}
        expected = [
            {"from": source, "ports": [{"protocol": "TCP", "port": port}]}
            for source, port in allowed[pods.role]
        ]
        if own[0].get("ingress") != expected:
            yield f"{pods.role}s are reached by {own[0].get('ingress')}"
        for port in {port for _, port in allowed[pods.role]} - named:
            yield f"{pods.role}s have no port {port}"


def ports_are_one(documents: Sequence[Document]) -> Iterator[str]:
    """Programs listen where Services, probes and Prometheus look."""
    for pods, others in _both(documents):
        variables = pods.environment(0, others)
        ports = {each["name"]: each["containerPort"] for each in pods.main["ports"]}
        if variables.get("CTR_PS_METRICS") != f"0.0.0.0:{ports.get('metrics')}":
            yield f"metrics of {pods.role}s at {variables.get('CTR_PS_METRICS')}, port {ports}"
        if any(each.get("protocol", "TCP") != "TCP" for each in pods.main["ports"]):
            yield f"a port of {pods.role}s is not TCP"
        if pods.role == "server":
            probed = {ports.get(port, port) for port in values_of("port", _probes(pods))}
            if probed != {ports["grpc"]} or str(ports["grpc"]) != variables["PADDLE_PORT"]:
                yield f"probes of {probed}, PADDLE_PORT {variables['PADDLE_PORT']}, port {ports}"
    for service in of_kind(documents, "Service"):
        pods = pods_of(documents)[0]
        for each in service["spec"]["ports"]:
            target = [port for port in pods.main["ports"] if port["name"] == each["targetPort"]]
            if [port["containerPort"] for port in target] != [each["port"]]:
                yield f"the Service sends {each['name']} to {each['targetPort']} of {pods.main['ports']}"


def _probes(pods: Pods) -> list[Document]:
    return [pods.main.get(f"{name}Probe", {}) for name in ("startup", "readiness", "liveness")]


def probes_are_apart(documents: Sequence[Document]) -> Iterator[str]:
    """A server may load for minutes and be slow for one, and with TLS it answers no plain gRPC."""
    servers = pods_of(documents)[0]
    has_tls = any(each["name"] == "CTR_PS_TLS_CERT" for each in servers.main["env"])
    for name, probe in zip(("startup", "readiness", "liveness"), _probes(servers), strict=True):
        limit_s = probe.get("periodSeconds", 0) * probe.get("failureThreshold", 3)
        if limit_s < {"startup": 600, "readiness": 10, "liveness": 60}[name]:
            yield f"the {name} probe gives up after {limit_s} s"
        # Of the service as soon as it ends; whether the process lives is asked without a name.
        service = None if name == "liveness" else health.SERVICE
        if "grpc" in probe and probe["grpc"].get("service") != service:
            yield f"the {name} probe asks for {probe['grpc'].get('service')}"
        if has_tls == ("grpc" in probe):
            yield f"the {name} probe is by {[*probe]}, with TLS: {has_tls}"
        if probe.get("exec", {"command": ["ps-server", "--check"]}) != {
            "command": ["ps-server", "--check"]
        }:
            yield f"the {name} probe runs {probe['exec']}"


def ends_are_in_order(documents: Sequence[Document]) -> Iterator[str]:
    """Servers end after the workers that need them, and have the time for it."""
    servers, workers = pods_of(documents)
    sleep_s = (
        servers.main.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    )
    if sleep_s < 9:  # of a worker after SIGTERM: 8, and one to free its place
        yield f"servers end {sleep_s} s after the workers are told to"
    for pods, own_s in ((servers, sleep_s + 10), (workers, 10)):
        if pods.spec["terminationGracePeriodSeconds"] < own_s:
            yield f"{pods.role}s are killed before they can end"
    stays = "--stay" in servers.main["args"]
    if stays != (servers.owner == "StatefulSet"):  # what a Job runs has an end
        yield f"servers of a {servers.owner} have the arguments {servers.main['args']}"
    if not stays and "--sigterm-exit-code=143" not in servers.main["args"]:
        yield "a server that is told to end in mid-job would count as done"


def commands_are_known(documents: Sequence[Document]) -> Iterator[str]:
    """Options exist, and the image's entry point is kept."""
    servers, workers = pods_of(documents)
    known = {name for each in get_command(ps_server.cli.app).params for name in each.opts}
    for option in servers.main["args"][1:]:
        if option.partition("=")[0] not in known:
            yield f"ps-server has no option {option}"
    if "--set=cluster.on_worker_loss=wait" not in workers.main["args"]:
        yield "the job does not wait for a worker that is made again"
    for limit in _options(servers.main["args"], "--memory-limit"):
        most = servers.main["resources"]["limits"]["memory"]
        if bytes_of_size(limit) > 0.9 * bytes_of_size(most.removesuffix("i")):
            yield f"servers take up to {limit}, and are killed at {most}"
    for pods in (servers, workers):
        for container in pods.containers:
            if "command" in container:
                yield f"{container['name']} has a command, which replaces the image's entry point"


def files_are_on_volumes(documents: Sequence[Document]) -> Iterator[str]:
    """Checkpoints are on one claim of all, logs on one that stays, a folder for each server."""
    servers, workers = pods_of(documents)
    (job,) = (tomllib.loads(text) for text in values_of("job.toml", documents))
    folder = f"{WORK}/{job['checkpoint']['dir']}"
    for pods in (servers, workers):
        if pods.claims.get(pods.volume_at(folder) or "") != "ctr-ps-output":
            yield f"{pods.role}s have {folder} on {pods.volume_at(folder)}"
    roots = _options(servers.main["args"], "--checkpoint-root")
    if not any(f"{folder}/".startswith(f"{root}/") for root in roots):
        yield f"checkpoints in {folder}, which is in none of the servers' roots {roots}"
    for root in roots:
        if servers.volume_at(root) != servers.volume_at(folder):
            yield f"the checkpoint root {root} is not on the volume of checkpoints"
    for path in (job["data"]["train"], job["data"]["test"]):
        if workers.volume_at(f"{WORK}/{path}") is None:
            yield f"data in {path}, where nothing is mounted"
    yield from _logs(documents, servers, workers)


def _logs(documents: Sequence[Document], servers: Pods, workers: Pods) -> Iterator[str]:
    own = set()
    for each in of_kind(documents, "StatefulSet"):
        own = {claim["metadata"]["name"] for claim in each["spec"]["volumeClaimTemplates"]}
    folders = []
    for index in range(servers.count):
        (log,) = _options(servers.arguments(index, workers), "--update-log") or ("none",)
        volume = servers.volume_at(log)
        if volume not in {*own, *servers.claims}:
            yield f"the update log {log} of server {index} is on {volume}, which is lost with its pod"
        if log in servers.mounts():
            yield "the update log is the root of its volume, which may have files of its file system"
        folders.append(log if volume not in own else f"{index}:{log}")
    if len({*folders}) != len(folders) or any("$(" in folder for folder in folders):
        yield f"servers share an update log: {folders}"


def _options(arguments: Sequence[str], name: str) -> list[str]:
    return [each.partition("=")[2] for each in arguments if each.partition("=")[0] == name]


def job_is_one(documents: Sequence[Document]) -> Iterator[str]:
    """The job in the ConfigMap, with the overrides of the workers, is a job, and the one that they read."""
    (text,) = values_of("job.toml", documents)
    workers = pods_of(documents)[1]
    try:
        override_job(
            tomllib.loads(text), _options(workers.main["args"], "--set"), source="job.toml"
        )
    except JobError as error:
        yield f"not a job: {error}"
    path = next(each for each in workers.main["args"] if each.endswith(".toml"))
    volumes = {volume["name"]: volume for volume in workers.spec["volumes"]}
    if "configMap" not in volumes.get(workers.volume_at(path) or "", {}):
        yield f"workers read {path}, where no ConfigMap is mounted"


def pods_are_confined(documents: Sequence[Document]) -> Iterator[str]:
    """As PodSecurity's level `restricted` wants it, with what the scheduler needs to know."""
    for pods, _ in _both(documents):
        context = pods.spec["securityContext"]
        wanted = {
            "runAsNonRoot": True,
            "runAsUser": 10001,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        if any(context.get(name) != value for name, value in wanted.items()):
            yield f"{pods.role}s run as {context}"
        if pods.spec["automountServiceAccountToken"] is not False:
            yield f"{pods.role}s have a token of Kubernetes' API"
        for container in pods.containers:
            confined = container["securityContext"]
            if (
                confined.get("allowPrivilegeEscalation") is not False
                or confined.get("readOnlyRootFilesystem") is not True
                or confined.get("capabilities") != {"drop": ["ALL"]}
            ):
                yield f"{container['name']} has {confined}"
            resources = container["resources"]
            if (
                not {"cpu", "memory"} <= resources["requests"].keys()
                or "memory" not in resources["limits"]
            ):
                yield f"{container['name']} asks for {resources}"
            paths = {mount["mountPath"] for mount in container["volumeMounts"]}
            if not {"/tmp", "/var/cache/numba"} <= paths:
                yield f"{container['name']} cannot write below {paths}"


def names_exist(documents: Sequence[Document]) -> Iterator[str]:
    """What a pod refers to is in the overlay, or made by the user."""
    known = {
        "configMap": {each["metadata"]["name"] for each in of_kind(documents, "ConfigMap")},
        "persistentVolumeClaim": USERS_CLAIMS
        | {each["metadata"]["name"] for each in of_kind(documents, "PersistentVolumeClaim")},
        "secret": SECRETS,
    }
    keys = {"configMap": "name", "persistentVolumeClaim": "claimName", "secret": "secretName"}
    claimed = {
        claim["metadata"]["name"]
        for each in of_kind(documents, "StatefulSet")
        for claim in each["spec"]["volumeClaimTemplates"]
    }
    for pods, _ in _both(documents):
        for source, key in keys.items():
            for each in values_of(source, pods.spec["volumes"]):
                if each[key] not in known[source]:
                    yield f"{pods.role}s want the {source} {each[key]}, which is not there"
        volumes = {each["name"] for each in pods.spec["volumes"]}
        volumes |= claimed if pods.role == "server" else set()
        mounted = {
            mount["name"] for mounts in values_of("volumeMounts", pods.spec) for mount in mounts
        }
        if volumes != mounted:
            yield f"{pods.role}s have the volumes {volumes} and mount {mounted}"
        if any(
            pods.spec["containers"][0]["name"] != "tensorflow" for _ in of_kind(documents, "TFJob")
        ):
            yield f"the operator looks for a container `tensorflow` in {pods.role}s"


def credentials_are_mounted(documents: Sequence[Document]) -> Iterator[str]:
    """Each variable that names a file of a Secret names one that is there; workers have no key of servers."""
    for pods, others in _both(documents):
        volumes = {volume["name"]: volume for volume in pods.spec["volumes"]}
        files = {
            name: path
            for name, path in pods.environment(0, others).items()
            if name == "CTR_PS_TOKEN_FILE"
            or (name.startswith("CTR_PS_TLS") and path.startswith("/"))
        }
        if "CTR_PS_TOKEN_FILE" not in files:
            yield f"{pods.role}s have no token"
        for name, path in files.items():
            secret = volumes.get(pods.volume_at(path) or "", {}).get("secret", {})
            expected = "ctr-ps-token" if name == "CTR_PS_TOKEN_FILE" else "ctr-ps-tls"
            shown = {each["path"] for each in secret.get("items", [])}
            if secret.get("secretName") != expected or (
                shown and path.rpartition("/")[2] not in shown
            ):
                yield f"{name} of {pods.role}s is {path}, which is in the Secret {secret}"
        for volume in volumes.values():
            secret = volume.get("secret", {})
            is_foreign = pods.role == "worker" and secret.get("secretName") == "ctr-ps-tls"
            if is_foreign and [each["key"] for each in secret.get("items", [])] != ["ca.crt"]:
                yield "workers have the servers' key"
    servers, workers = pods_of(documents)
    names = {
        *values_of("serverName", list(documents)),
        *(
            pods.environment(0, others)["CTR_PS_TLS_NAME"]
            for pods, others in _both(documents)
            if "CTR_PS_TLS_CA" in pods.environment(0, others)
        ),
    }
    if not names <= {CERTIFICATE_NAME}:
        yield f"servers' certificate is for {CERTIFICATE_NAME}, and callers expect {names}"
    speaks = "CTR_PS_TLS_CERT" in servers.environment(0, workers)
    if speaks != ("CTR_PS_TLS_CA" in workers.environment(0, servers)):
        yield "of servers and workers, only one side speaks TLS"


def killed_pods_are_made_again(documents: Sequence[Document]) -> Iterator[str]:
    """What was killed is replaced, and what ended by its own error is not."""
    jobs = [("worker", each["spec"]) for each in of_kind(documents, "Job")]
    for jobset in of_kind(documents, "JobSet"):
        jobs += [
            (each["name"], each["template"]["spec"]) for each in jobset["spec"]["replicatedJobs"]
        ]
    for name, job in jobs:
        drained, failed = job["podFailurePolicy"]["rules"]
        codes = failed["onExitCodes"]
        if drained != {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}:
            yield f"a drained node counts for {name}: {drained}"
        if (failed["action"], codes["operator"]) != ("FailJob", "NotIn") or not {
            *codes["values"]
        } >= KILLS:
            yield f"{name} fails by {failed}"
        errors = [code for code in codes["values"] if code <= 128]
        replaced = [NoMemoryError.exit_code] if name == "server" else []
        if errors != replaced or codes["values"] != sorted(codes["values"]):
            yield f"exit codes of {name} to be replaced: {codes['values']}"
        if codes["containerName"] != job["template"]["spec"]["containers"][0]["name"]:
            yield f"exit codes of a container {codes['containerName']}, which {name} has not"
        if job["backoffLimit"] < 1 or job["template"]["spec"]["restartPolicy"] != "Never":
            yield f"{name}: {job['backoffLimit']} restarts, {job['template']['spec']['restartPolicy']}"
    if of_kind(documents, "PaddleJob"):
        for pods, _ in _both(documents):
            if pods.spec.get("restartPolicy") != "OnFailure":
                yield f"a killed {pods.role} fails the PaddleJob"
    if of_kind(documents, "TFJob") and "Never" in values_of("restartPolicy", documents):
        yield "a pod's restartPolicy hides that of the TFJob"


def parts_of_a_jobset_know_each_other(documents: Sequence[Document]) -> Iterator[str]:
    """Workers wait for servers and end the JobSet; a Job that fails is made again alone."""
    for jobset in of_kind(documents, "JobSet"):
        spec = jobset["spec"]
        waits = {each["name"]: each.get("dependsOn") for each in spec["replicatedJobs"]}
        if waits != {"server": None, "worker": [{"name": "server", "status": "Ready"}]}:
            yield f"the Jobs wait for {waits}"
        if spec["successPolicy"] != {"operator": "All", "targetReplicatedJobs": ["worker"]}:
            yield f"the JobSet ends with {spec['successPolicy']}"
        actions = [
            (each["action"], each.get("onJobFailureReasons"))
            for each in spec["failurePolicy"]["rules"]
        ]
        if actions != [("FailJobSet", ["PodFailurePolicy"]), ("RestartJob", None)]:
            yield f"a failed Job is followed by {actions}"
        if spec["replicatedJobs"][0]["template"]["spec"].get("podReplacementPolicy") != "Failed":
            yield "two pods may have one update log"
        if not spec["network"]["enableDNSHostnames"]:
            yield "pods of the JobSet have no names"


def servers_keep_their_names(documents: Sequence[Document]) -> Iterator[str]:
    """The Service, the budget and the spread are those of the servers; `apply` restarts none of them."""
    pods = pods_of(documents)[0]
    for each in of_kind(documents, "StatefulSet"):
        (service,) = of_kind(documents, "Service")
        if (
            service["spec"]["clusterIP"] != "None"
            or each["spec"]["serviceName"] != service["metadata"]["name"]
        ):
            yield f"servers have no names of their own in {service['spec']}"
        if service["spec"].get("publishNotReadyAddresses") is not True:
            yield "a server has no name until it is ready, so workers look in vain for one that loads"
        if (
            service["spec"]["selector"] != pods.labels
            or each["spec"]["selector"]["matchLabels"] != pods.labels
        ):
            yield "the Service or the StatefulSet selects other pods"
        if each["spec"]["updateStrategy"] != {"type": "OnDelete"}:
            yield f"`apply` restarts servers under a job: {each['spec']['updateStrategy']}"
        if len(of_kind(documents, "PodDisruptionBudget")) != 1:
            yield "several nodes may be drained at once"
    for budget in of_kind(documents, "PodDisruptionBudget"):
        if (
            budget["spec"]["selector"]["matchLabels"] != pods.labels
            or budget["spec"].get("maxUnavailable") != 1
        ):
            yield f"a drained node waits for {budget['spec']}"
        if pods.owner != "StatefulSet":
            yield "a budget of pods that have no scale holds up every drained node"
    spreads = pods.spec.get("topologySpreadConstraints", [])
    if [each["labelSelector"]["matchLabels"] for each in spreads] != [pods.labels]:
        yield f"servers are spread by {spreads}"


def metrics_are_found(documents: Sequence[Document]) -> Iterator[str]:
    """Prometheus' operator finds the pods, speaks their protocol and shows a token that is no trainer's."""
    servers, workers = pods_of(documents)
    has_tls = "CTR_PS_TLS_CERT" in servers.environment(0, workers)
    found = [
        ("ServiceMonitor", "endpoints", servers),
        ("PodMonitor", "podMetricsEndpoints", workers),
    ]
    for kind, key, pods in found:
        for each in of_kind(documents, kind):
            (endpoint,) = each["spec"][key]
            if each["spec"]["selector"]["matchLabels"] != pods.labels:
                yield f"the {kind} selects other pods than {pods.role}s"
            if endpoint["port"] != "metrics":
                yield f"the {kind} reads port {endpoint['port']}"
            if endpoint["authorization"]["credentials"] != {
                "name": "ctr-ps-token",
                "key": "metrics",
            }:
                yield f"the {kind} shows {endpoint['authorization']}"
            if (endpoint.get("scheme", "http") == "https") != (has_tls and pods is servers):
                yield f"the {kind} speaks {endpoint.get('scheme')}"
            names = [
                rule["replacement"]
                for rule in endpoint["relabelings"]
                if rule["targetLabel"] == "job"
            ]
            if names != [f"ctr-ps-{pods.role}"]:  # of deploy/monitoring
                yield f"the dashboard knows no job {names}"


def choices_are_known(documents: Sequence[Document]) -> Iterator[str]:
    """Enumerated fields, which are plain texts in Kubernetes' schemas."""
    for key, known in CHOICES.items():
        for value in values_of(key, list(documents)):
            if value not in known:
                yield f"{key} is {value}, expected one of {known}"


RULES: Sequence[Rule] = (
    roles_are_as_programs_read_them,
    numbers_agree,
    networks_are_closed,
    ports_are_one,
    probes_are_apart,
    ends_are_in_order,
    commands_are_known,
    files_are_on_volumes,
    job_is_one,
    pods_are_confined,
    names_exist,
    credentials_are_mounted,
    killed_pods_are_made_again,
    parts_of_a_jobset_know_each_other,
    servers_keep_their_names,
    metrics_are_found,
    choices_are_known,
)
