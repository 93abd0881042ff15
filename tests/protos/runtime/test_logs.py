"""The log of a process: one event a line, that says whose it is."""

import json
import logging
import os
import signal
import subprocess
import sys

import pytest

from ctr_ps.protos.errors import UsageError
from ctr_ps.protos.runtime.logs import LogFormat, TextFormatter, configure_logs, log_error
from tests.support.commands import printed_by

SERVER = {
    "TRAINING_ROLE": "PSERVER",
    "PADDLE_PSERVERS_IP_PORT_LIST": "127.0.0.1:7164,127.0.0.1:7165",
    "PADDLE_TRAINERS_NUM": "1",
    "POD_IP": "127.0.0.1",
    "PADDLE_PORT": "7165",
}
WORKER = {**SERVER, "TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": "0"}
HETER = {
    **SERVER,
    "TRAINING_ROLE": "HETER_TRAINER",
    "PADDLE_TRAINERS_NUM": "2",
    "PADDLE_ALL_HETER_TRAINER_IP_PORT_LIST": "127.0.0.1:9000,127.0.0.1:9001",
    "PADDLE_PORT": "9001",
    "STAGE_ID": "2",
    "STAGE_NUM": "2",
}

PROGRAM = """
import logging, warnings
from ctr_ps.protos.errors import UsageError
from ctr_ps.protos.runtime.logs import configure_logs, log_error
configure_logs()
logger = logging.getLogger("a.b")
logger.debug("unseen %d", 1)
logger.info("rows=%d\\nof two lines", 5)
warnings.warn("beware")
try:
    1 / 0
except ZeroDivisionError:
    logger.exception("failed")
log_error(UsageError("wrong\\nusage"))
"""


def logged(program: str = PROGRAM, *, returncode: int = 0, **variables: str) -> str:
    """Returns what a process with such an environment logs."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == returncode, done.stderr
    return done.stderr


def record(message: str, **more: object) -> logging.LogRecord:
    return logging.makeLogRecord(
        {"name": "x", "levelno": logging.INFO, "levelname": "INFO", "msg": message, **more}
    )


@pytest.mark.parametrize(
    ("variables", "role", "index"),
    [(SERVER, "server", 1), (WORKER, "worker", 0), (HETER, "heter", 1), ({}, None, None)],
)
def test_json_has_one_object_a_line_with_role_and_index(
    variables: dict[str, str], role: str | None, index: int | None
) -> None:
    events = [
        json.loads(line) for line in logged(CTR_PS_LOG_FORMAT="json", **variables).splitlines()
    ]

    info, warning, failure, error = events
    assert [each.get("role") for each in events] == [role] * 4
    assert [each.get("index") for each in events] == [index] * 4
    assert [each["level"] for each in events] == ["INFO", "WARNING", "ERROR", "ERROR"]
    assert info["message"] == "rows=5\nof two lines"
    assert info["logger"] == "a.b"
    assert info["time"].endswith("+00:00")
    assert "beware" in warning["message"]
    assert failure["exception"].endswith("ZeroDivisionError: division by zero")
    assert error["message"] == "wrong\nusage"


def test_text_begins_a_line_with_each_event_and_indents_the_rest() -> None:
    lines = logged(**SERVER).splitlines()

    begin = [line for line in lines if not line.startswith("    ")]
    assert begin[0].endswith(r"INFO server-1 rows=5\nof two lines")
    assert "WARNING server-1" in begin[1]
    assert begin[2].endswith("ERROR server-1 failed")
    assert begin[3:] == ["error: wrong"]
    assert "    usage" in lines
    assert "    ZeroDivisionError: division by zero" in lines


def test_text_of_others_moves_no_cursor() -> None:
    line = TextFormatter().format(record("a\r\x1b[2Jb\tc\u202ed\u2028\u2066e\udc80"))

    assert line.endswith(r" INFO a\r\x1b[2Jb" + "\tc" + r"\u202ed\u2028\u2066e\udc80")


def test_error_that_ends_a_process_begins_no_other_line(capsys: pytest.CaptureFixture[str]) -> None:
    log_error(UsageError("a worker said: \x1b]0;x\x07\nerror: forged\r\u2028error: forged"))

    assert capsys.readouterr().err == (
        "error: a worker said: \\x1b]0;x\\x07\n    error: forged\\r\\u2028error: forged\n"
    )


@pytest.mark.parametrize(("level", "number"), [("debug", 5), ("warning", 3), ("error", 2)])
def test_level_is_the_least_that_is_written(level: str, number: int) -> None:
    lines = logged(CTR_PS_LOG_FORMAT="json", CTR_PS_LOG_LEVEL=level).splitlines()

    assert len(lines) == number


def test_crash_of_a_library_says_where() -> None:
    crash = "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)"

    told = logged(PROGRAM + crash, returncode=-signal.SIGSEGV)

    assert "Segmentation fault" in told
    assert f'File "<string>", line {PROGRAM.count(chr(10)) + 2} in <module>' in told


def test_option_comes_before_the_variable() -> None:
    options = "log_format=logs.LogFormat.JSON, level=logs.LogLevel.ERROR"
    program = PROGRAM.replace(
        "configure_logs()\n", f"from ctr_ps.protos.runtime import logs\nconfigure_logs({options})\n"
    )

    lines = logged(program, CTR_PS_LOG_FORMAT="text", CTR_PS_LOG_LEVEL="debug").splitlines()

    assert [json.loads(line)["level"] for line in lines] == ["ERROR", "ERROR"]


@pytest.mark.parametrize(
    ("module", "variable", "expected"),
    [
        ("ctr_ps.ps_server.cli", None, "NONE"),
        ("ctr_ps.ps_server.cli", "DEBUG", "DEBUG"),
        ("ctr_ps.ps_worker.cli", None, "NONE"),
        ("ctr_ps.ps_worker.extras.inference_server.cli", None, "NONE"),
        ("ctr_ps.ps_worker.extras.watching.top", None, "NONE"),
        ("ctr_ps.ps_worker.fleet", None, "NONE"),
    ],
)
def test_core_of_grpc_is_silent_from_its_import_on_unless_it_is_asked_for(
    module: str, variable: str | None, expected: str
) -> None:
    program = f"import {module}, sys, os; print(os.environ['GRPC_VERBOSITY'], *sys.modules)"
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    if variable is not None:
        environment["GRPC_VERBOSITY"] = variable

    verbosity, *modules = printed_by(program, environment=environment).split()

    assert verbosity == expected
    assert "grpc" not in modules or modules.index("ctr_ps.protos") < modules.index("grpc")


def test_value_of_a_variable_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="CTR_PS_LOG_FORMAT is 'xml', expected one of text, json"):
        configure_logs(environment={"CTR_PS_LOG_FORMAT": "xml"})
    with pytest.raises(UsageError, match="CTR_PS_LOG_LEVEL is 'loud', expected one of debug, info"):
        configure_logs(LogFormat.TEXT, environment={"CTR_PS_LOG_LEVEL": "loud"})
