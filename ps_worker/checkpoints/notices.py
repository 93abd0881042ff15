"""Notices on a channel of Redis (extra `redis`): a run says that readers may take another checkpoint."""

import asyncio
import logging
import math
import time
from contextlib import suppress
from typing import Any
from urllib.parse import urlencode

from ctr_ps.protos.errors import UsageError
from ctr_ps.ps_worker.data.streams.source import stream_url

logger = logging.getLogger(__name__)

# Unless the URL says otherwise: checkpoints wait until a notice is sent.
_OPTIONS: dict[str, Any] = {
    "socket_timeout": 2,
    "socket_connect_timeout": 2,
    "health_check_interval": 10,
}
_RETRY_S = 5.0
_LEAST_S = 0.1  # between two looks, as messages are of anybody


class Channel:
    """A channel, which may not answer: that is a warning. Any thread may `tell`, one loop `wait`."""

    def __init__(self, text: str) -> None:
        """Connects to nothing yet; raises UsageError for a URL of no channel, or without redis-py."""
        self._url = url = stream_url(text)
        if url.kind not in ("redis", "rediss"):
            raise UsageError(f"{url} is no channel, expected redis://host:6379/channel")
        server = f"{url.kind}://{url.address}"
        server += f"?{urlencode(url.options)}" if url.options else ""
        try:
            from redis import Redis, backoff, retry  # late: an extra
            from redis import asyncio as aio

            once, again = (each.Retry(backoff.NoBackoff(), 0) for each in (retry, aio.retry))
            self._client = Redis.from_url(server, retry=once, **_OPTIONS)
            # A connection that was lost is seen here: a message may have come meanwhile.
            self._listener: Any = aio.Redis.from_url(server, retry=again, **_OPTIONS).pubsub()
        except ModuleNotFoundError as error:
            raise UsageError(f"{url} needs redis: pip install 'ctr-ps[redis]'") from error
        except ValueError as error:
            raise UsageError(f"{url}: {error}") from error

    def tell(self, name: str) -> None:
        """Tells all who listen now the name of a checkpoint."""
        try:
            self._client.publish(self._url.name, name)
        except Exception as error:  # training goes on, whatever the client raises
            logger.warning(
                "readers hear nothing of checkpoint=%s by %s: %s", name, self._url, error
            )

    async def wait(self, limit_s: float) -> None:
        """Returns after a message, of which nothing is read, or `limit_s`; 0: after a message alone.

        Also when it has connected, as a message may have come before.
        """
        end_s = time.monotonic() + (limit_s or math.inf)
        try:
            if not self._listener.subscribed:
                await self._listener.subscribe(self._url.name)
                return
            while (left_s := end_s - time.monotonic()) > 0:
                if await self._listener.get_message(True, timeout=min(left_s, _RETRY_S)):
                    await asyncio.sleep(_LEAST_S)
                    return
        except Exception as error:  # it is tried again
            logger.warning("%s tells of no newer model: %s", self._url, error)
            with suppress(Exception):
                await self._listener.aclose()
            await asyncio.sleep(min(limit_s or _RETRY_S, _RETRY_S))
