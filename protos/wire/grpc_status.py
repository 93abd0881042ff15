"""Exceptions <-> gRPC status.

The status code is for tools and dashboards; the exact class travels in the trailing metadata
`ctr-ps-error`, so that a worker raises what the server raised.
"""

import math
from collections.abc import Iterator, Mapping

import grpc

from ctr_ps.protos import errors

METADATA_KEY = "ctr-ps-error"

RETRY_AFTER_KEY = "ctr-ps-retry-after"
"""Milliseconds after which a call that met an overloaded server may be repeated."""

PROGRESS_KEY = "ctr-ps-progress"
"""Shards and calls that a server has done which recovers."""

# Details travel in a header, and a call whose headers exceed some 8 KiB fails for that alone.
MAX_DETAILS_CHARACTERS = 2_000

# Classes that a server answers with; a subclass without a row has the code of its base.
_CODES: dict[type[errors.CtrPsError], grpc.StatusCode] = {
    errors.CtrPsError: grpc.StatusCode.INTERNAL,
    errors.UsageError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.RecoveringError: grpc.StatusCode.UNAVAILABLE,
    errors.CheckpointError: grpc.StatusCode.DATA_LOSS,
    errors.GradientError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.WaitTimeoutError: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.ProtocolError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.UnknownTableError: grpc.StatusCode.NOT_FOUND,
    errors.SpecError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.SpecConflictError: grpc.StatusCode.ALREADY_EXISTS,
    errors.AbortedError: grpc.StatusCode.ABORTED,
    errors.AccessError: grpc.StatusCode.PERMISSION_DENIED,
    errors.UnknownCallerError: grpc.StatusCode.UNAUTHENTICATED,
    errors.OverloadedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.NoMemoryError: grpc.StatusCode.RESOURCE_EXHAUSTED,
}


def status_of(error: errors.CtrPsError) -> grpc.StatusCode:
    """Returns the status code of an error's class."""
    return next(_CODES[base] for base in type(error).__mro__ if base in _CODES)


def details_of(error: errors.CtrPsError) -> str:
    """Returns the message of an error, truncated to fit a header."""
    details = str(error)
    if len(details) > MAX_DETAILS_CHARACTERS:
        details = f"{details[:MAX_DETAILS_CHARACTERS]} [cut]"
    return details


def metadata_of(error: errors.CtrPsError) -> tuple[tuple[str, str], ...]:
    """Returns the trailing metadata with an error's class and its further fields."""
    metadata = ((METADATA_KEY, type(error).__name__),)
    if isinstance(error, errors.OverloadedError) and error.retry_after_s is not None:
        return (*metadata, (RETRY_AFTER_KEY, str(math.ceil(1000 * error.retry_after_s))))
    if isinstance(error, errors.RecoveringError):
        return (*metadata, (PROGRESS_KEY, str(error.progress)))
    return metadata


def _tree(base: type[errors.CtrPsError]) -> Iterator[type[errors.CtrPsError]]:
    yield base
    for subclass in base.__subclasses__():
        yield from _tree(subclass)


def _number(metadata: Mapping[str, str | bytes], key: str) -> int | None:
    number = str(metadata.get(key, ""))
    return int(number) if number.isdecimal() else None


def error_of(failure: grpc.RpcError, endpoint: str, call: str) -> errors.CtrPsError:
    """Returns the exception for a failed call: the server's own, else a `TransportError`."""
    metadata = dict(failure.trailing_metadata() or ())
    name = metadata.get(METADATA_KEY)
    details = f"{endpoint}: {failure.details()}"
    if name == errors.OverloadedError.__name__:
        milliseconds = _number(metadata, RETRY_AFTER_KEY)
        retry_after_s = None if milliseconds is None else milliseconds / 1000
        return errors.OverloadedError(details, retry_after_s=retry_after_s)
    if name == errors.RecoveringError.__name__:
        return errors.RecoveringError(details, progress=_number(metadata, PROGRESS_KEY) or 0)
    for error_class in _tree(errors.CtrPsError):
        if error_class.__name__ == name:
            return error_class(details)
    return errors.TransportError(
        f"{call} to server {endpoint} failed: {failure.code().name}: {failure.details()}; "
        f"see the log of that server"
    )
