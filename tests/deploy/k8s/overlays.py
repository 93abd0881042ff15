"""The overlays of deploy/k8s, rendered, and the pods that they make, whatever resource makes them."""

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[3] / "deploy/k8s"
OVERLAYS = sorted(path.name for path in (FOLDER / "overlays").iterdir())
ANOTHER_SIZE = (5, 3)
COMPLETION_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
REPLICA_INDEX = "metadata.labels['training.kubeflow.org/replica-index']"
PADDLE_PORT = "2379"
"""The port that Paddle's operator gives to all processes."""

USERS_CLAIMS = {"ctr-ps-data"}
SECRETS = {"ctr-ps-token", "ctr-ps-tls", "ctr-ps-stream"}
"""What docs/kubernetes.md has the user make."""

Document = dict[str, Any]


@cache
def documents_of(overlay: str, size: tuple[int, int] | None = None) -> list[Document]:
    """Returns what `kubectl apply -k` sends of an overlay.

    `size` are servers and workers, as a user changes two numbers in one file; None: as they are there.
    """
    with tempfile.TemporaryDirectory() as copied:
        folder = FOLDER / "overlays" / overlay
        if size is not None:
            folder = Path(shutil.copytree(FOLDER, f"{copied}/k8s")) / "overlays" / overlay
            config = yaml.safe_load((folder / "size.yaml").read_text())
            config["data"] = {"servers": str(size[0]), "workers": str(size[1])}
            (folder / "size.yaml").write_text(yaml.safe_dump(config))
        command = ["kubectl", "kustomize", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def of_kind(documents: Sequence[Document], kind: str) -> list[Document]:
    return [document for document in documents if document["kind"] == kind]


def values_of(key: str, node: Any) -> Iterator[Any]:
    """Yields the values of a key, at any depth."""
    if isinstance(node, dict):
        yield from (value for name, value in node.items() if name == key)
        for value in node.values():
            yield from values_of(key, value)
    elif isinstance(node, list):
        for value in node:
            yield from values_of(key, value)


@dataclass(frozen=True)
class Pods:
    """All pods of one role."""

    owner: str  # kind of the resource that makes them
    role: str  # "server" or "worker"
    count: int
    template: Document  # labels and spec
    host: str  # where others find pod {}; only servers are looked for

    @property
    def spec(self) -> Document:
        spec: Document = self.template["spec"]
        return spec

    @property
    def labels(self) -> Mapping[str, str]:
        labels: Mapping[str, str] = self.template["metadata"]["labels"]
        return labels

    @property
    def main(self) -> Document:
        """The container that serves or trains."""
        (container,) = self.spec["containers"]
        assert isinstance(container, dict)
        return container

    @property
    def containers(self) -> list[Document]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def claims(self) -> dict[str, str]:
        """Claims that all these pods share, by the name of the volume."""
        return {
            volume["name"]: volume["persistentVolumeClaim"]["claimName"]
            for volume in self.spec["volumes"]
            if "persistentVolumeClaim" in volume
        }

    def mounts(self) -> dict[str, str]:
        """Returns the volume at each path of the main container."""
        return {mount["mountPath"]: mount["name"] for mount in self.main["volumeMounts"]}

    def volume_at(self, path: str) -> str | None:
        """Returns the volume that holds an absolute path; None: the container's own file system."""
        holders = [
            mount for mount in self.mounts() if path == mount or path.startswith(f"{mount}/")
        ]
        return self.mounts()[max(holders, key=len)] if holders else None

    def environment(self, index: int, others: "Pods") -> dict[str, str]:
        """Returns the variables of pod `index`, as Kubernetes and the operator make them."""
        fields = {
            "metadata.name": self.host.partition(".")[0].format(index),
            COMPLETION_INDEX if self.owner in ("Job", "JobSet") else REPLICA_INDEX: str(index),
        }
        variables = self._set_by_operator(index, others)
        for each in self.main["env"]:
            if "value" in each:
                variables[each["name"]] = expanded(each["value"], variables)
            else:
                variables[each["name"]] = fields.get(
                    each["valueFrom"]["fieldRef"]["fieldPath"], "no such field here"
                )
        return variables

    def _set_by_operator(self, index: int, others: "Pods") -> dict[str, str]:
        if self.owner != "PaddleJob":
            return {}
        servers, workers = (self, others) if self.role == "server" else (others, self)
        listed = [f"{servers.host.format(i)}:{PADDLE_PORT}" for i in range(servers.count)]
        return {
            "TRAINING_ROLE": "PSERVER" if self.role == "server" else "TRAINER",
            "POD_IP": self.host.format(index),
            "PADDLE_TRAINER_ID": str(index),
            "PADDLE_PORT": PADDLE_PORT,
            "PADDLE_PSERVERS_IP_PORT_LIST": ",".join(listed),
            "PADDLE_TRAINERS_NUM": str(workers.count),
        }

    def arguments(self, index: int, others: "Pods") -> list[str]:
        variables = self.environment(index, others)
        return [expanded(each, variables) for each in self.main["args"]]


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """Returns text with $(NAME) replaced; an unknown name stays, as in Kubernetes."""
    return re.sub(r"\$\((\w+)\)", lambda match: variables.get(match[1], match[0]), text)


def pods_of(documents: Sequence[Document]) -> tuple[Pods, Pods]:
    if sets := of_kind(documents, "JobSet"):
        (jobset,) = sets
        jobs = {each["name"]: each["template"]["spec"] for each in jobset["spec"]["replicatedJobs"]}
        name, subdomain = jobset["metadata"]["name"], jobset["spec"]["network"]["subdomain"]
        server, worker = (
            Pods(
                "JobSet",
                role,
                job["completions"],
                job["template"],
                f"{name}-{role}-0-{{}}.{subdomain}",
            )
            for role, job in jobs.items()
        )
        return server, worker
    if jobs := of_kind(documents, "PaddleJob") + of_kind(documents, "TFJob"):
        (job,) = jobs
        name, spec = job["metadata"]["name"], job["spec"].get("tfReplicaSpecs", job["spec"])
        found = {key.lower(): spec[key] for key in spec if key.lower() in ("ps", "worker")}
        server, worker = (
            Pods(
                job["kind"],
                role,
                found[key]["replicas"],
                found[key]["template"],
                f"{name}-{key}-{{}}",
            )
            for role, key in (("server", "ps"), ("worker", "worker"))
        )
        return server, worker
    ((servers,), (workers,)) = of_kind(documents, "StatefulSet"), of_kind(documents, "Job")
    name, spec = servers["metadata"]["name"], servers["spec"]
    host, job = f"{name}-{{}}.{spec['serviceName']}", workers["spec"]
    return (
        Pods("StatefulSet", "server", spec["replicas"], spec["template"], host),
        Pods("Job", "worker", job["completions"], job["template"], "none"),
    )
