"""The example jobs on real clicks: parts 0 to 4 of the sample, one epoch, tested on part 5."""

from pathlib import Path

import pytest

from tests.support.commands import ROOT, result_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MIN_AUC = 0.70
MIN_AUC_WITHOUT_LOCKSTEP = 0.695  # depends on timing: 0.705 to 0.711 were seen
MAX_LOG_LOSS = 0.134  # the base rate alone gives 0.1396


def data_of(sample: Path) -> list[str]:
    return [
        f"--set=data.train={sample}/part-[0-4].tsv.gz",
        f"--set=data.test={sample}/part-5.tsv.gz",
    ]


@pytest.mark.parametrize(
    ("example", "how"),
    [
        ("ctr_dnn", "embedded"),
        ("ctr_dnn", "async"),
        ("ctr_dnn", "sync"),
        ("ctr_dnn", "half_async"),
        ("ctr_dnn", "bounded_staleness"),
        ("ctr_dnn", "geo"),
        ("wide_deep", "embedded"),
        ("deepfm", "embedded"),
    ],
)
def test_example_learns_and_infer_agrees(
    example: str, how: str, criteo_sample: Path, tmp_path: Path
) -> None:
    job = ROOT / f"examples/{example}.toml"
    arguments = [job, *data_of(criteo_sample), f"--set=checkpoint.dir={tmp_path}/model"]
    if how == "embedded":
        trained = result_of("ps-worker", "train", *arguments)
    else:
        cluster = ["--server-num", 2, "--worker-num", 2, "--log-dir", tmp_path / "log"]
        more = ", k_steps=10" if how == "geo" else ""
        mode = [] if how == "async" else [f"--set=strategy={{mode='{how}'{more}}}"]
        trained = result_of("ps-launch", *cluster, *arguments, *mode, cwd=tmp_path)

    inferred = result_of(
        "ps-worker",
        "infer",
        "--model",
        tmp_path / "model",
        "--data",
        criteo_sample / "part-5.tsv.gz",
    )

    print(f"{example} {how}: auc={trained['auc']:.4f} log_loss={trained['log_loss']:.4f}")
    assert trained["examples"] == 50_000
    is_lockstep = how in ("embedded", "sync")
    assert trained["auc"] >= (MIN_AUC if is_lockstep else MIN_AUC_WITHOUT_LOCKSTEP)
    assert trained["log_loss"] < MAX_LOG_LOSS
    for figure in ("auc", "log_loss", "accuracy", "calibration", "model_digest", "test_examples"):
        assert inferred[figure] == trained[figure]
