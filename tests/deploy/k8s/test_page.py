"""docs/kubernetes.md says what the overlays are."""

import re
from pathlib import Path

import pytest

from tests.deploy.k8s.overlays import (
    FOLDER,
    OVERLAYS,
    SECRETS,
    USERS_CLAIMS,
    documents_of,
    of_kind,
    pods_of,
)
from tests.support.needs import is_missing

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/kubernetes.md").read_text()
MIB = {"Mi": 1, "Gi": 1024}


def mib(size: str) -> int:
    return int(size[:-2]) * MIB[size[-2:]]


def milli(cpus: str) -> int:
    return int(cpus[:-1]) if cpus.endswith("m") else int(cpus) * 1000


@pytest.mark.skipif(is_missing("kubectl"), reason="kubectl is not installed")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_page_says_what_an_overlay_asks_for(overlay: str) -> None:
    (row,) = re.findall(
        rf"^\| (?:`\w+`, )*`{overlay}`(?:, `\w+`)* \|(.*?)\|(.*?)\|", PAGE, re.MULTILINE
    )
    documents = documents_of(overlay)
    pods = pods_of(documents)
    requests = [(each.count, each.main["resources"]["requests"]) for each in pods]
    cpus = sum(count * milli(request["cpu"]) for count, request in requests) / 1000
    memory = sum(count * mib(request["memory"]) for count, request in requests) / 1024
    claims = [(1, each) for each in of_kind(documents, "PersistentVolumeClaim")]
    for each in of_kind(documents, "StatefulSet"):
        claims += [(pods[0].count, claim) for claim in each["spec"]["volumeClaimTemplates"]]
    disk = sum(
        count * mib(claim["spec"]["resources"]["requests"]["storage"]) for count, claim in claims
    )
    asks = (
        f"{cpus:g} CPU{'s' if cpus > 1 else ''}, {memory:g} GiB, and {disk / 1024:g} GiB of volumes"
    )

    assert row[0].strip() == f"{pods[0].count} and {pods[1].count}"
    assert row[1].strip() == asks


def test_folders_that_pages_name_are_there() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *FOLDER.rglob("*.yaml")]
    named = {
        path for page in pages for path in re.findall(r"deploy/k8s/?[\w/.-]*", page.read_text())
    }

    assert {f"deploy/k8s/overlays/{overlay}" for overlay in OVERLAYS} <= named | {
        f"deploy/k8s/overlays/{name}" for name in re.findall(r"`overlays/(\w+)`", PAGE)
    }
    for path in named:
        assert (ROOT / path).exists(), path


def test_page_has_the_user_make_what_manifests_take_for_granted() -> None:
    for name in SECRETS | USERS_CLAIMS:
        assert f"`{name}`" in PAGE
    assert "create secret generic ctr-ps-token --from-literal=metrics=" in PAGE
    assert '--from-literal=token="admin $(token)\nreader $reader"' in PAGE
