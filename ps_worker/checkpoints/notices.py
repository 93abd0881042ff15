"""Notices on a channel of Redis (extra `redis`): a run says that readers may take another checkpoint."""

import asyncio
import logging
import math
import time
from typing import Any

from ctr_ps.protos.errors import UsageError
from ctr_ps.ps_worker.data.streams.source import stream_url

logger = logging.getLogger(__name__)

_LIMIT_S = 2.0  # of a connection or an answer: checkpoints wait for it
_RETRY_S = 5.0
_LEAST_S = 0.1  # between two looks, as messages are of anybody


class Channel:
    """A channel, which may not answer: that is a warning. `tell` is for any thread, the rest for one loop."""

    def __init__(self, text: str) -> None:
        """Connects to nothing yet; raises UsageError for another URL, or without redis-py."""
        try:
            from ctr_ps.ps_worker.data.streams.redis_streams import options_of  # late: an extra
        except ModuleNotFoundError as error:
            raise UsageError("notices need redis: pip install 'ctr-ps[redis]'") from error
        self._url = url = stream_url(text)
        if url.kind not in ("redis", "rediss"):
            raise UsageError(f"{url} is no channel, expected redis://host:6379/channel")
        limits = {"socket_timeout": _LIMIT_S, "socket_connect_timeout": _LIMIT_S}
        self._options: dict[str, Any] = {**limits, "health_check_interval": 10, **options_of(url)}
        self._server = f"{url.kind}://{url.address}/{self._options.pop('db', 0)}"
        self._subscription: Any = None

    def tell(self, name: str) -> None:
        """Tells all who listen now the name of a checkpoint."""
        import redis

        once = redis.retry.Retry(redis.backoff.NoBackoff(), 0)
        try:
            with redis.Redis.from_url(self._server, retry=once, **self._options) as client:
                client.publish(self._url.name, name)
        except Exception as error:  # training goes on, whatever the client raises
            logger.warning(
                "readers are not told of checkpoint=%s by %s: %s", name, self._url, error
            )

    async def wait(self, limit_s: float) -> None:
        """Returns after a message, of which nothing is read, or `limit_s`; 0: after a message alone.

        Also when it has connected, as a message may have come before.
        """
        from redis import asyncio as redis

        end_s = time.monotonic() + (limit_s or math.inf)
        try:
            if self._subscription is None:
                self._subscription = redis.Redis.from_url(self._server, **self._options).pubsub()
                await self._subscription.subscribe(self._url.name)
                return
            while (left_s := end_s - time.monotonic()) > 0:
                if await self._subscription.get_message(True, timeout=min(left_s, _RETRY_S)):
                    await asyncio.sleep(_LEAST_S)
                    return
        except Exception as error:  # it is tried again
            logger.warning("%s tells of no newer model: %s", self._url, error)
            await self.close()
            await asyncio.sleep(min(limit_s or _RETRY_S, _RETRY_S))

    async def close(self) -> None:
        """Ends the connection, if there is one."""
        if self._subscription is not None:
            await self._subscription.aclose()
            self._subscription = None
