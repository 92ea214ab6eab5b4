"""The checks of `millrace doctor`: API, Redis, object store and GPUs, one after the other."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.cli.connection import environ as with_options
from millrace.cli.connection import explain_unreachable, stack_at
from millrace.errors import InvalidStateError, MillraceError
from millrace.telemetry.logging import redact
from millrace.telemetry.settings import Settings

TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """The result of one check; `is_good` is None if it was skipped."""

    what: str
    is_good: bool | None
    text: str
    remedy: str = ""


async def examine(
    server: str, origin: str, *, directory: Path | None = None, environ: Mapping[str, str] = os.environ
) -> list[CheckResult]:
    """Check API, Redis, object store and GPUs, and return the results in that order.

    `server` is the orchestrator's address, `origin` says where it came from. URLs that the environment does not set are
    taken from the stack that listens at `server`, in `directory` or below `outputs`. Failures are results; only broken
    settings raise (InvalidSpecError).
    """
    settings = Settings.from_env(with_options(environ))
    found = stack_at(server, directory)
    stack = {} if found is None else found.says
    redis_url = settings.redis_url or _redis_of(stack)
    store_url = settings.store_url or stack.get("store")
    results = [await _asked("API", lambda: _api(server, origin, directory))]
    if redis_url:
        results.append(await _asked("Redis", lambda: _redis(redis_url, settings.prefix)))
    else:
        results.append(_skipped("Redis", "MILLRACE_REDIS_URL", directory))
    if store_url:
        results.append(await _asked("object store", lambda: _store(store_url, settings.prefix)))
    else:
        results.append(_skipped("object store", "MILLRACE_STORE_URL", directory))
    results.append(await _asked("GPUs", _gpus))
    return results


async def _gpus() -> str:
    """Describe GPUs, driver and torch wheel of this machine.

    Raises InvalidStateError if driver or wheel cannot use the GPU.
    """
    from millrace.local.gpus import CUDA_13_DRIVER, DEVICE, driver_version, is_too_old, machine_gpus, wheel_version

    found = await asyncio.to_thread(machine_gpus)
    driver, wheel, is_there = driver_version(), wheel_version(), await asyncio.to_thread(DEVICE.exists)
    needs = f"wheels of CUDA 13 need {CUDA_13_DRIVER} or newer"
    if not found and not is_there:
        return "none on this machine: the trainer computes on the CPU"
    if not found:
        raise InvalidStateError(
            f"the kernel shows a GPU (driver {driver or 'unknown'}), and nvidia-smi lists none",
            reason="GPU_UNUSABLE",
            remedy=f"fix the driver; {needs}",
        )
    if is_too_old(driver, wheel) and os.environ.get("MILLRACE_TRAINER_DEVICE") != "cpu":
        raise InvalidStateError(
            f"{len(found)} of NVIDIA, and driver {driver} is older than torch {wheel} needs",
            reason="GPU_UNUSABLE",
            remedy=f"install a newer driver ({needs}), or an older wheel of torch",
        )
    here = f"{len(found)} of NVIDIA, driver {driver or 'unknown'}"
    if wheel.endswith("+cpu"):
        return f"{here}; torch {wheel} is made for CPUs: the trainer computes there"
    return f"{here}{f', torch {wheel}' if wheel else ''} ({needs})"


def _redis_of(stack: Mapping[str, Any]) -> str | None:
    """Return the Redis URL of a stack, read from its file; None if there is no such file.

    `stack.json` has only the path, because the URL contains a password.
    """
    try:
        return Path(str(stack["redis_url_file"])).read_text().strip()
    except (KeyError, OSError):
        return None


def _skipped(what: str, variable: str, directory: Path | None) -> CheckResult:
    """Return the result of a check that is skipped, because `variable` is not set and no stack has the address."""
    where = "below outputs" if directory is None else f"of {directory}"
    text = f"not looked at: {variable} is not set here, and no stack {where} has this address"
    return CheckResult(what=what, is_good=None, text=text)


async def _asked(what: str, ask: Callable[[], Awaitable[str]]) -> CheckResult:
    """Return the result of one check: the text that `ask` returns with its time, or the error that it raises.

    A check may take 30 s.
    """
    began = time.monotonic()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            text = await ask()
    except MillraceError as error:
        return CheckResult(what=what, is_good=False, text=error.message, remedy=error.remedy or "")
    except TimeoutError:
        return CheckResult(what=what, is_good=False, text=f"no answer within {TIMEOUT_S:g} s")
    return CheckResult(what=what, is_good=True, text=f"{text}, {1000 * (time.monotonic() - began):.0f} ms")


async def _api(server: str, origin: str, directory: Path | None) -> str:
    """Ask the orchestrator for a run, and return a text about its answer.

    Raise UnavailableError if it does not answer.
    """
    from millrace.cli.connection import open_client

    with explain_unreachable(origin, server, directory=directory):
        async with open_client(server) as client:
            runs = await client.runs.list(limit=1)
    return f"{server} answers, {'with' if runs else 'without'} runs"


async def _redis(url: str, prefix: str) -> str:
    """Check the Redis at `url`, and return a text about how it keeps its data.

    Raises MillraceError if it is not fit for runs, InvalidStateError if it evicts entries.
    """
    try:
        import redis.asyncio
        import redis.exceptions
    except ImportError:
        return "not looked at: the redis package is not installed here"
    from millrace.local.preflight import check_redis

    await check_redis(url, prefix=prefix)
    client = redis.asyncio.from_url(url, socket_connect_timeout=5, decode_responses=True)
    try:
        memory, persistence = await client.info("memory"), await client.info("persistence")
    except redis.exceptions.RedisError as error:  # one of somebody else's, that does not tell everybody
        return f"{redact(url)} answers, and does not say how it keeps its data: {redact(str(error))}"
    finally:
        await client.aclose()
    policy = memory.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise InvalidStateError(
            f"Redis at {redact(url)} evicts entries when its memory is full (maxmemory-policy {policy})",
            reason="REDIS_EVICTS",
            remedy="set maxmemory-policy noeviction",
        )
    return f"{redact(url)} answers, noeviction, append-only file {'on' if persistence.get('aof_enabled') else 'off'}"


async def _store(url: str, prefix: str) -> str:
    """Test the object store at `url` by writing, reading and deleting a few objects below `prefix`.

    Raise if it is not fit. Return a text for people: that it is fit, or that it was not tested, because boto3 is not
    installed.
    """
    try:
        from millrace.storage import open_store
        from millrace.storage.self_test import self_test
    except ImportError:
        return "not looked at: boto3 is not installed here"
    store = open_store(url)
    answered = await asyncio.to_thread(self_test, store, prefix=prefix)
    await asyncio.wrap_future(answered)
    return f"{store.describe()} keeps its promises"
