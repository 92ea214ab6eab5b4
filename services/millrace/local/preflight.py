"""Checks of the user's own Redis and object store, which the stack does not start."""

import asyncio
from concurrent.futures import Future
from urllib.parse import parse_qsl, urlsplit

from millrace.errors import UnavailableError
from millrace.runlog.redis.connection import DEADLINE_S, open_redis, redis_self_test
from millrace.storage import open_store
from millrace.storage.self_test import require_tested
from millrace.telemetry import waits
from millrace.telemetry.logging import redact

STORE_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 5.0
_OWN_REMEDY = ("BUCKET_MISSING", "CLOCK_SKEWED", "STORE_FAILING")
"""Reasons of errors of a store that answers, which have a remedy of their own."""


async def check_redis(url: str, *, prefix: str) -> None:
    """Test whether runs can work with the Redis at a URL, with keys below `prefix`.

    Raises UnavailableError if it does not answer, InvalidStateError if it cannot hold runs, InvalidSpecError if the URL
    is malformed. No error has the password in it.
    """
    with waits.waiting("redis to answer", waits_on="redis", deadline_s=DEADLINE_S):
        client = open_redis(url)  # as the services do; a malformed URL is not repeated
        try:
            await redis_self_test(client, prefix=prefix)
        except UnavailableError as error:
            if error.reason != "REDIS_UNREACHABLE":
                raise
            raise UnavailableError(
                f"Redis at {redact(url)} (MILLRACE_REDIS_URL) does not answer: {error.message}",
                reason=error.reason,
                remedy="start it, or correct MILLRACE_REDIS_URL, or unset it for the embedded Redis",
            ) from error
        finally:
            await client.aclose()


async def check_store(url: str, *, prefix: str) -> Future[None]:
    """Test the object store at a URL with objects below `prefix`; return a future of the answers that are still to
    come.

    The future ends without an error if they are right, too. Raises UnavailableError if the store does not answer, and
    InvalidStateError if runs cannot work with it; the future may raise these later.
    """
    with waits.waiting("the object store to answer", waits_on="store", deadline_s=STORE_TIMEOUT_S):
        try:
            await _connect(url)
            async with asyncio.timeout(STORE_TIMEOUT_S):
                return await asyncio.to_thread(_test, url, prefix)
        except TimeoutError:
            raise UnavailableError(
                f"the object store {redact(url)} (MILLRACE_STORE_URL) does not answer within {STORE_TIMEOUT_S:g} s",
                reason="STORE_UNREACHABLE",
                remedy="start it, or correct MILLRACE_STORE_URL, or unset it for the filesystem store",
            ) from None
        except UnavailableError as error:
            if error.reason in _OWN_REMEDY:
                raise
            raise UnavailableError(
                f"the object store {redact(url)} (MILLRACE_STORE_URL) does not answer: {error.message}",
                reason="STORE_UNREACHABLE",
                remedy="start it, or correct MILLRACE_STORE_URL, or unset it for the filesystem store",
            ) from error


async def _connect(url: str) -> None:
    """Raise UnavailableError if the `endpoint` in a store's URL does not accept a connection soon.

    A URL without an endpoint is not checked. The store itself would retry for long.
    """
    endpoint = urlsplit(dict(parse_qsl(urlsplit(url).query)).get("endpoint", ""))
    if not endpoint.hostname:
        return
    port = endpoint.port or (443 if endpoint.scheme == "https" else 80)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, writer = await asyncio.open_connection(endpoint.hostname, port)
    except (OSError, TimeoutError) as error:
        raise UnavailableError(f"{endpoint.hostname}:{port}: {error or 'timeout'}") from error
    writer.close()


def _test(url: str, prefix: str) -> Future[None]:
    """Test the object store at a URL with objects below `prefix`, and return the future of its last answers; blocks."""
    return require_tested(open_store(url), prefix=prefix)
