"""Settings that a message tells to try."""

import pytest

from ctr_ps.ps_worker.job import Job, override_job
from ctr_ps.ps_worker.training.evaluation.base_rate import advice_on_loss, warning_of_test


def advice(*overrides: str) -> str:
    return advice_on_loss(override_job({}, overrides, source="test"))


def test_own_learning_rate_is_named_with_its_value() -> None:
    text = advice("optimizer.sparse.learning_rate=0.5")

    assert "optimizer.sparse.learning_rate below 0.5, or the optimizer's default" in text
    assert "a optimizer" not in text
    assert "optimizer.dense.learning_rate below its default" in text


@pytest.mark.parametrize(
    ("mode", "key"),
    [
        ("async", 'strategy.mode = "sync" or "half_async"'),
        ("async", "max_staleness = 1"),
        ("half_async", 'strategy.mode = "sync"'),
        ("geo", "strategy.geo.k_steps below 100"),
        ("bounded_staleness", "strategy.bounded_staleness.max_staleness below 8"),
    ],
)
def test_mode_is_told_how_to_be_less_stale(mode: str, key: str) -> None:
    assert key in advice(f"strategy.mode={mode}")


def test_synchronous_training_is_not_told_to_be_synchronous() -> None:
    assert "strategy" not in advice("strategy.mode=sync")
    assert "train.batch_size above 128" in advice("strategy.mode=sync")


@pytest.mark.parametrize("mode", ["half_async", "async", "geo", "bounded_staleness"])
def test_no_mode_is_stale_in_one_process(mode: str) -> None:
    job = override_job({}, [f"strategy.mode={mode}"], source="test")
    assert "strategy" in advice_on_loss(job)
    assert "strategy" not in advice_on_loss(job, is_in_process=True)


def test_keys_are_those_of_a_job() -> None:
    for mode in ("async", "geo", "bounded_staleness"):
        for word in advice(f"strategy.mode={mode}").replace(",", "").split():
            path = word.split(".")
            if path[0] in Job.model_fields and path[-1] != "learning_rate":
                node = Job().model_dump(by_alias=True, context={"all": True})
                assert path[0] in node


def test_test_loss_above_the_base_rate_is_overfitting_only_if_training_went_well() -> None:
    job = override_job({}, ["train.epochs=3"], source="test")

    overfit = warning_of_test(job, log_loss=0.2, base_log_loss=0.1, is_learnt=True)
    unlearnt = warning_of_test(job, log_loss=0.2, base_log_loss=0.1, is_learnt=False)
    once = override_job({}, ["train.epochs=1"], source="test")
    in_one_pass = warning_of_test(once, log_loss=0.2, base_log_loss=0.1, is_learnt=True)

    assert "by heart" in overfit
    assert "train.epochs below 3" in overfit
    assert "train.epochs" not in in_one_pass
    assert "valid.patience" in overfit
    assert "by heart" not in unlearnt
    assert unlearnt.endswith(advice_on_loss(job))


def test_test_loss_above_the_base_rate_is_not_laid_to_stale_gradients_in_process() -> None:
    job = override_job({}, ["strategy.mode=async"], source="test")

    warning = warning_of_test(
        job, log_loss=0.2, base_log_loss=0.1, is_learnt=False, is_in_process=True
    )

    assert warning.endswith(advice_on_loss(job, is_in_process=True))
    assert "strategy" not in warning


@pytest.mark.parametrize("losses", [(0.1, 0.2), (0.2, 0.2), (None, 0.2), (0.2, None)])
def test_test_loss_that_is_no_worse_or_no_number_needs_no_words(
    losses: tuple[float | None, float | None],
) -> None:
    job = override_job({}, [], source="test")
    assert not warning_of_test(job, log_loss=losses[0], base_log_loss=losses[1], is_learnt=True)
