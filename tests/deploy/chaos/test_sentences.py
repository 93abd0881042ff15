"""Sentences of `--chaos`."""

import pytest

from deploy.chaos.sentences import FORMS, CallFault, Disturbance, SentenceError, parse


def parsed(text: str) -> tuple[tuple[Disturbance, ...], tuple[CallFault, ...]]:
    chaos = parse(text, num_servers=2, num_workers=2)
    return chaos.disturbances, chaos.call_faults


@pytest.mark.parametrize(
    ("text", "disturbance"),
    [
        ("kill server 1 at step 200", Disturbance(role="server", index=1, step=200)),
        ("kill worker 0 at 5s", Disturbance(role="worker", index=0, at_s=5.0)),
        ("kill worker 0 at 1500ms", Disturbance(role="worker", index=0, at_s=1.5)),
        (
            "pause worker 0 for 5s at step 100",
            Disturbance(role="worker", index=0, step=100, pause_s=5.0),
        ),
        (
            "  pause  server 1 for 0.5s at 20ms ",
            Disturbance(role="server", index=1, at_s=0.02, pause_s=0.5),
        ),
    ],
)
def test_processes_are_killed_and_paused(text: str, disturbance: Disturbance) -> None:
    assert parsed(text) == ((disturbance,), ())


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("drop 5% pushes", CallFault("drop", "pushes", 0.05)),
        ("drop 100% calls", CallFault("drop", "calls", 1.0)),
        ("duplicate 0.5% pulls", CallFault("duplicate", "pulls", 0.005)),
        ("delay 20ms", CallFault("delay", "calls", 0.02)),
        ("delay 0.1s pushes", CallFault("delay", "pushes", 0.1)),
    ],
)
def test_calls_are_dropped_duplicated_and_delayed(text: str, fault: CallFault) -> None:
    assert parsed(text) == ((), (fault,))


def test_sentences_are_separated_by_semicolons() -> None:
    disturbances, faults = parsed("kill server 1 at 1s; drop 5% pushes;kill worker 0 at 5s; ")

    assert [each.process for each in disturbances] == ["pserver.1", "trainer.0"]
    assert len(faults) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("drop 5% pushes; murder server 1", "'murder server 1' is not understood"),
        ("kill sever 1 at 5s", "'sever 1 at 5s' in 'kill sever 1 at 5s' is not understood"),
        ("kill server one at 5s", "'one at 5s' in 'kill server one at 5s' is not understood"),
        ("kill server 1", "'kill server 1' ends too early"),
        ("kill server 1 at 5", "'5' in 'kill server 1 at 5' is not understood"),
        ("kill server 1 at step 2.5", "'2.5' in"),
        ("kill server 1 at 5s please", "'please' in"),
        ("kill server 1 after 5s", "'after 5s' in"),
        ("pause server 1 at 5s", "'at 5s' in"),
        ("pause server 1 for 0s at 5s", "'0s at 5s' in"),
        ("drop 5 pushes", "'5 pushes' in"),
        ("drop 0% pushes", "'0% pushes' in"),
        ("drop 101% pushes", "'101% pushes' in"),
        ("drop 5% barriers", "'barriers' in"),
        ("drop 5%", "'drop 5%' ends too early"),
        ("delay 20", "'20' in"),
        (" ; ", "' ; ' says nothing"),
    ],
)
def test_wrong_sentence_is_refused_with_the_part_and_the_forms(text: str, said: str) -> None:
    with pytest.raises(SentenceError) as refused:
        parsed(text)

    assert str(refused.value).startswith(said)
    for form in FORMS:
        assert form in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kill server 2 at 5s", "there is no server 2: the run has 2, numbered from 0"),
        ("pause worker 9 for 1s at 5s", "there is no worker 9: the run has 2, numbered from 0"),
    ],
)
def test_process_that_there_is_not_is_refused(text: str, said: str) -> None:
    with pytest.raises(SentenceError, match=said):
        parsed(text)
