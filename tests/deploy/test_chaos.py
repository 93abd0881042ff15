"""Sentences of `--chaos`."""

import pytest

from ctr_ps.deploy.chaos import FORMS, CallFault, Disturbance, SentenceError, parse


def parsed(text: str) -> tuple[tuple[Disturbance, ...], tuple[CallFault, ...]]:
    chaos = parse(text, num_servers=2, num_workers=2, num_heter=1)
    return chaos.disturbances, chaos.call_faults


@pytest.mark.parametrize(
    ("text", "disturbance"),
    [
        ("kill server 1 at step 200", Disturbance(role="server", index=1, step=200)),
        ("kill heter 0 at step 7", Disturbance(role="heter", index=0, step=7)),
        ("kill server 0 at step 0", Disturbance(role="server", index=0, step=0)),
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
        ("drop 100.0% calls", CallFault("drop", "calls", 1.0)),
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
    "text",
    [
        "kill sever 1 at 5s",
        "kill server one at 5s",
        "kill server 1",
        "kill server 1 at",
        "kill server 1 at 5",
        "kill server 1 at step 2.5",
        "kill server 1 at step -1",
        "kill server 1 at 5s now",
        "kill server 1 after 5s",
        "pause server 1 at 5s",
        "drop 5 pushes",
        "drop 101% pushes",
        "drop 5% barriers",
        "drop 5%",
        "delay 20",
    ],
)
def test_wrong_sentence_is_refused_with_its_form(text: str) -> None:
    with pytest.raises(SentenceError) as refused:
        parsed(f"drop 5% pushes; {text} ")

    form = FORMS[text.split(maxsplit=1)[0]]
    assert str(refused.value).startswith(f"{text!r}: expected {form}, where N is a number, TIME as")


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("pause server 1 for 0s at 5s", "0s"),
        ("kill server 1 at 0ms", "0ms"),
        ("drop 0% pushes", "0%"),
        ("drop 0.0% pushes", "0.0%"),
        ("delay 0.0s", "0.0s"),
    ],
)
def test_amount_of_nothing_is_refused(text: str, amount: str) -> None:
    with pytest.raises(SentenceError, match=f"'{amount}' in '{text}': expected an amount above 0"):
        parsed(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "drop 5% pushes; murder server 1",
            "'murder' in 'murder server 1' is not a known fault, expected",
        ),
        ("", "'' has no fault, expected"),
        (" ; ", "' ; ' has no fault, expected"),
    ],
)
def test_sentence_without_a_verb_is_refused_with_all_verbs(text: str, said: str) -> None:
    with pytest.raises(SentenceError) as refused:
        parsed(text)

    assert str(refused.value) == f"{said} kill, pause, drop, duplicate, delay"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kill server 2 at 5s", "there is no server 2: the run has 2, numbered from 0"),
        ("kill heter 1 at 5s", "there is no heter trainer 1: the run has 1, numbered from 0"),
        ("pause worker 9 for 1s at 5s", "there is no worker 9: the run has 2, numbered from 0"),
    ],
)
def test_process_that_there_is_not_is_refused(text: str, said: str) -> None:
    with pytest.raises(SentenceError, match=said):
        parsed(text)
