"""Notices of newer checkpoints, by a Redis server of our own."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from ctr_ps.protos.errors import UsageError
from ctr_ps.ps_worker.checkpoints.notices import Channel
from tests.support.processes import free_port
from tests.support.streams import redis_server

LIMIT_S = 20.0


def seconds_of(wait: Callable[[], object]) -> float:
    start = time.monotonic()
    wait()
    return time.monotonic() - start


async def told_while(
    channel: Channel, tell: Callable[[], object], limit_s: float = LIMIT_S
) -> float:
    """Returns the seconds until a channel tells of what happens 0.2 s after it has connected."""
    if not channel._listener.subscribed:
        await channel.wait(LIMIT_S)
    start = time.monotonic()
    later = asyncio.get_running_loop().call_later(0.2, tell)
    await channel.wait(limit_s)
    later.cancel()
    await channel._listener.aclose()
    return time.monotonic() - start


def test_message_ends_the_wait_whatever_it_says(redis_port: int) -> None:
    url = f"redis://127.0.0.1:{redis_port}/told"
    client = redis.Redis(port=redis_port)

    for tell in (
        lambda: Channel(url).tell("epoch-1"),
        lambda: client.publish("told", b"\xff\x00" * 1000),
        lambda: client.publish("told", b""),
    ):
        assert 0.19 <= asyncio.run(told_while(Channel(url), tell)) < 5
        assert asyncio.run(told_while(Channel(url), tell, 0)) < 5
    elsewhere = asyncio.run(told_while(Channel(url), lambda: client.publish("other", b""), 0.5))
    assert 0.45 <= elsewhere < 5


def test_flood_ends_no_more_than_ten_waits_a_second(redis_port: int) -> None:
    channel = Channel(f"redis://127.0.0.1:{redis_port}/flood")
    client = redis.Redis(port=redis_port)

    async def waits() -> int:
        await channel.wait(LIMIT_S)
        for _ in range(1000):
            client.publish("flood", b"x")
        found, end = 0, time.monotonic() + 1
        while time.monotonic() < end:
            await channel.wait(LIMIT_S)
            found += 1
        await channel._listener.aclose()
        return found

    assert 1 <= asyncio.run(waits()) <= 12


def test_reader_connects_again_and_then_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ctr_ps.ps_worker.checkpoints.notices._RETRY_S", 0.2)

    async def all_of_it() -> None:
        with redis_server(tmp_path) as port:
            channel = Channel(f"redis://127.0.0.1:{port}/again")
            await channel.wait(LIMIT_S)
        for _ in range(3):  # it is away
            start = time.monotonic()
            await channel.wait(0.5)
            assert time.monotonic() - start < 10
        assert "tells of no newer model" in caplog.text
        (tmp_path / "redis.log").unlink()
        with redis_server(tmp_path, port):
            start = time.monotonic()
            await channel.wait(0)
            assert time.monotonic() - start < 10
            assert (
                await told_while(channel, lambda: redis.Redis(port=port).publish("again", b"")) < 5
            )

    asyncio.run(all_of_it())


def test_reader_looks_after_a_connection_was_lost_for_a_moment(
    redis_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was told in that moment, nobody has heard."""
    monkeypatch.setattr("ctr_ps.ps_worker.checkpoints.notices._RETRY_S", 0.2)
    client = redis.Redis(port=redis_port)

    async def looks() -> float:
        channel = Channel(f"redis://127.0.0.1:{redis_port}/moment")
        await channel.wait(LIMIT_S)
        start = time.monotonic()
        client.client_kill_filter(_type="pubsub")
        for _ in range(2):  # the loss, and the new connection
            await channel.wait(LIMIT_S)
        await channel._listener.aclose()
        return time.monotonic() - start

    assert asyncio.run(looks()) < 5


def test_server_that_is_away_is_a_warning_within_seconds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SECRET", "in-no-log")
    with free_port() as port:
        channel = Channel(f"redis://:$SECRET@127.0.0.1:{port}/told")

        assert seconds_of(lambda: channel.tell("epoch-1")) < 10

    assert (
        f"readers hear nothing of checkpoint=epoch-1 by redis://127.0.0.1:{port}/told"
        in caplog.text
    )
    assert "in-no-log" not in caplog.text


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("kafka://broker:9092/clicks", "is no channel, expected redis://host:6379/channel"),
        ("http://host/clicks", "expected one of kafka"),
        ("redis://:secret@host:6379/clicks", "a password is saved with the job"),
        ("redis://host:port/clicks", "redis://host:port/clicks: Port could not be cast"),
        ("redis://host/clicks?db=one", "redis://host/clicks: .*db"),
        ("redis://:$NO_SUCH_NAME@host:6379/clicks", "the environment has no NO_SUCH_NAME"),
    ],
)
def test_url_that_names_no_channel_is_refused(url: str, fault: str) -> None:
    with pytest.raises(UsageError, match=fault) as error:
        Channel(url)
    assert "secret" not in str(error.value)
