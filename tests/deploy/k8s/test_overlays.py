"""Every overlay of deploy/k8s, rendered: its kinds, their schemas, and its size."""

from collections.abc import Sequence
from pathlib import Path

import jsonschema  # type: ignore[import-untyped]
import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from tests.deploy.k8s.overlays import (
    ANOTHER_SIZE,
    FOLDER,
    OVERLAYS,
    Document,
    documents_of,
    pods_of,
)
from tests.deploy.k8s.schemas import CUSTOM, embedded
from tests.support.needs import is_missing

pytestmark = pytest.mark.skipif(is_missing("kubectl"), reason="kubectl is not installed")

ROOT = Path(__file__).parents[3]
NEWEST = [
    f"1.{minor}"
    for minor in sorted(
        {int(version.split(".")[1]) for version in kubernetes_validate.utils.all_versions()}
    )[-3:]
]
KINDS = {
    "local": {"ConfigMap", "PersistentVolumeClaim", "NetworkPolicy"}
    | {"StatefulSet", "Job", "Service", "PodDisruptionBudget"},
    "jobset": {"ConfigMap", "PersistentVolumeClaim", "NetworkPolicy", "JobSet"},
    "paddle": {"ConfigMap", "PersistentVolumeClaim", "NetworkPolicy", "PaddleJob"},
    "kubeflow": {"ConfigMap", "PersistentVolumeClaim", "NetworkPolicy", "TFJob"},
}
KINDS["online"] = KINDS["local"] | {"Deployment", "PodMonitor"}
KINDS["production"] = KINDS["local"] | {"ServiceMonitor", "PodMonitor"}


def require_schema(documents: Sequence[Document], version: str) -> None:
    for document in documents:
        if schema := CUSTOM.get(document["kind"]):
            jsonschema.validate(document, schema)
            for each in embedded(document):
                kubernetes_validate.validate(each, version, strict=True)
        else:
            kubernetes_validate.validate(document, version, strict=True)


def test_every_overlay_is_known() -> None:
    assert {*OVERLAYS} == KINDS.keys()


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlay_has_its_kinds_and_fits_their_schemas(overlay: str) -> None:
    documents = documents_of(overlay)

    assert {document["kind"] for document in documents} == KINDS[overlay]
    for version in NEWEST:
        require_schema(documents, version)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_size_is_in_one_place(overlay: str) -> None:
    size = yaml.safe_load((FOLDER / "overlays" / overlay / "size.yaml").read_text())
    servers, workers = pods_of(documents_of(overlay))

    assert {"servers": str(servers.count), "workers": str(workers.count)} == size["data"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_another_size_fits_the_schemas(overlay: str) -> None:
    documents = documents_of(overlay, ANOTHER_SIZE)

    assert tuple(pods.count for pods in pods_of(documents)) == ANOTHER_SIZE
    require_schema(documents, NEWEST[-1])


def test_schema_of_the_online_overlay_is_that_of_the_example() -> None:
    written, example = FOLDER / "overlays/online/schema.toml", ROOT / "examples/online/schema.toml"

    assert written.read_text() == example.read_text()


def test_job_of_the_base_is_the_demo() -> None:
    assert (FOLDER / "base/job.toml").read_text() == (ROOT / "examples/demo.toml").read_text()
