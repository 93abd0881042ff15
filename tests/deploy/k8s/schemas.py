"""Schemas of resources that are no part of Kubernetes: the fields that deploy/k8s uses, and their values.

What an operator embeds, as pods and Jobs, is validated as those.
"""

from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
TEXTS: Schema = {"type": "array", "items": TEXT, "minItems": 1}
COUNT: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "boolean"}
ANY: Schema = {"type": "object"}
LABELS: Schema = {"type": "object", "additionalProperties": TEXT}


def one_of(*values: str) -> Schema:
    return {"enum": [*values]}


def fields(required: tuple[str, ...] = (), /, **known: Schema) -> Schema:
    """Returns the schema of an object with these fields and no others."""
    return {
        "type": "object",
        "properties": known,
        "required": [*required],
        "additionalProperties": False,
    }


def items(schema: Schema) -> Schema:
    """Returns the schema of a list with at least one element."""
    return {"type": "array", "items": schema, "minItems": 1}


def resource(api_version: str, kind: str, spec: Schema) -> Schema:
    return fields(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"const": api_version},
        kind={"const": kind},
        metadata=fields(("name",), name=TEXT, labels=LABELS),
        spec=spec,
    )


_RULE = fields(
    ("action", "name"),
    name={"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:-]*[A-Za-z0-9_])?$"},
    action=one_of(
        "FailJobSet",
        "RestartJobSet",
        "RestartJobSetAndIgnoreMaxRestarts",
        "RestartJob",
        "RestartJobAndIgnoreMaxRestarts",
    ),
    onJobFailureReasons=items(
        one_of(
            "BackoffLimitExceeded",
            "DeadlineExceeded",
            "FailedIndexes",
            "MaxFailedIndexesExceeded",
            "PodFailurePolicy",
        )
    ),
    targetReplicatedJobs=TEXTS,
)
JOBSET = resource(
    "jobset.x-k8s.io/v1alpha2",
    "JobSet",
    fields(
        ("replicatedJobs",),
        network=fields(enableDNSHostnames=FLAG, subdomain=TEXT, publishNotReadyAddresses=FLAG),
        successPolicy=fields(
            ("operator",), operator=one_of("All", "Any"), targetReplicatedJobs=TEXTS
        ),
        failurePolicy=fields(
            maxRestarts=COUNT,
            restartStrategy=one_of("Recreate", "BlockingRecreate"),
            rules=items(_RULE),
        ),
        replicatedJobs=items(
            fields(
                ("name", "template"),
                name=TEXT,
                replicas=COUNT,
                template=fields(("spec",), spec=ANY),
                dependsOn=items(
                    fields(("name", "status"), name=TEXT, status=one_of("Ready", "Complete"))
                ),
            )
        ),
    ),
)
_PADDLE_PODS = fields(
    ("replicas", "template"), replicas={"type": "integer", "minimum": 1}, template=ANY
)
PADDLEJOB = resource(
    "batch.paddlepaddle.org/v1",
    "PaddleJob",
    fields(
        ("ps", "worker"),
        intranet=one_of("PodIP", "Service", "Host"),
        cleanPodPolicy=one_of("Always", "Never", "OnFailure", "OnCompletion"),
        ps=_PADDLE_PODS,
        worker=_PADDLE_PODS,
    ),
)
_TF_PODS = fields(
    ("replicas", "restartPolicy", "template"),
    replicas={"type": "integer", "minimum": 1},
    restartPolicy=one_of("Always", "OnFailure", "Never", "ExitCode"),
    template=ANY,
)
TFJOB = resource(
    "kubeflow.org/v1",
    "TFJob",
    fields(
        ("tfReplicaSpecs",),
        successPolicy=one_of("", "AllWorkers"),
        runPolicy=fields(backoffLimit=COUNT, cleanPodPolicy=one_of("All", "Running", "None")),
        tfReplicaSpecs=fields(("PS", "Worker"), PS=_TF_PODS, Worker=_TF_PODS),
    ),
)
_AUTHORIZATION = fields(("credentials",), credentials=fields(("name", "key"), name=TEXT, key=TEXT))
_RELABELINGS = items(fields(("targetLabel", "replacement"), targetLabel=TEXT, replacement=TEXT))
_SELECTOR = fields(("matchLabels",), matchLabels=LABELS)
SERVICE_MONITOR = resource(
    "monitoring.coreos.com/v1",
    "ServiceMonitor",
    fields(
        ("selector", "endpoints"),
        selector=_SELECTOR,
        endpoints=items(
            fields(
                ("port",),
                port=TEXT,
                scheme=one_of("http", "https"),
                tlsConfig=fields(
                    ca=fields(secret=fields(("name", "key"), name=TEXT, key=TEXT)), serverName=TEXT
                ),
                authorization=_AUTHORIZATION,
                relabelings=_RELABELINGS,
            )
        ),
    ),
)
POD_MONITOR = resource(
    "monitoring.coreos.com/v1",
    "PodMonitor",
    fields(
        ("selector", "podMetricsEndpoints"),
        selector=_SELECTOR,
        podMetricsEndpoints=items(
            fields(
                ("port",),
                port=TEXT,
                scheme=one_of("http", "https"),
                authorization=_AUTHORIZATION,
                relabelings=_RELABELINGS,
            )
        ),
    ),
)
CUSTOM: dict[str, Schema] = {
    "JobSet": JOBSET,
    "PaddleJob": PADDLEJOB,
    "TFJob": TFJOB,
    "ServiceMonitor": SERVICE_MONITOR,
    "PodMonitor": POD_MONITOR,
}
"""By kind."""


def embedded(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields what a custom resource embeds, as documents of Kubernetes' own kinds."""
    spec = document["spec"]
    for job in spec.get("replicatedJobs", []):
        yield _document("batch/v1", "Job", spec=job["template"]["spec"])
    replicas = spec.get("tfReplicaSpecs", spec)
    for key in ("ps", "PS", "worker", "Worker"):
        if key in replicas:
            yield _document("v1", "PodTemplate", template=replicas[key]["template"])


def _document(api_version: str, kind: str, **content: Any) -> dict[str, Any]:
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {"name": "embedded"},
        **content,
    }
