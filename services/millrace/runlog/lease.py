"""Leases: who *may try* to hold a role of a run. Safety comes from epochs; a lease only spares useless tries."""

import json
import math
import secrets
import time
from typing import Self

from millrace.errors import FencedError
from millrace.runlog import script
from millrace.runlog.connection import as_text
from millrace.runlog.log import AppendResult, RunLog


class Lease:
    """A held lease. Renew it at a third of its ttl; write only while `may_write`."""

    def __init__(self, log: RunLog, *, role: str, owner: str, ttl_s: float, value: str, renewed: float) -> None:
        self._log = log
        self._key = log.names.lease(role)
        self._value = value
        self._renewed = renewed
        self.role = role
        self.owner = owner
        self.ttl_s = ttl_s

    @classmethod
    async def acquire(cls, log: RunLog, role: str, owner: str, ttl_s: float) -> Self | None:
        """Take the lease if it is free; None if somebody holds it."""
        value = _value(owner, secrets.token_hex(8), 0)
        began = time.monotonic()
        keys, args = [log.names.lease(role), log.names.meta], [log.generation, value, _milliseconds(ttl_s)]
        reply = await log.call(
            f"acquiring the lease of {role}", lambda: script.ACQUIRE_LEASE.run(log.redis, keys, args)
        )
        answer, held = (as_text(part) for part in reply)
        if answer == "LOGGONE":
            AppendResult.LOGGONE.require(f"lease of {role} of run {log.uid}")
        if answer != "OK" and held != value:  # equal: our own call, whose answer was lost
            return None
        return cls(log, role=role, owner=owner, ttl_s=ttl_s, value=value, renewed=began)

    @property
    def may_write(self) -> bool:
        """Whether less than half the ttl has passed, on our own monotonic clock, since the last renewal was sent."""
        return time.monotonic() - self._renewed < self.ttl_s / 2

    def require(self) -> None:
        """Raise `FencedError` unless `may_write`."""
        if not self.may_write:
            raise FencedError(
                f"the lease of {self.role} of run {self._log.uid} was not renewed for half its {self.ttl_s:g} s",
                reason="LEASE_STALE",
                remedy="stop writing and acquire the lease again",
            )

    async def renew(self, *, epoch: int = 0) -> bool:
        """Extend the lease by its ttl and note the holder's epoch; False if it was lost (then stop writing)."""
        old = json.loads(self._value)
        value = _value(self.owner, old["token"], epoch or old["epoch"])
        began = time.monotonic()
        args = [self._value, value, _milliseconds(self.ttl_s)]
        reply = await self._log.call(
            f"renewing the lease of {self.role}",
            lambda: script.RENEW_LEASE.run(self._log.redis, [self._key], args),
        )
        answer, held = (as_text(part) for part in reply)
        if answer != "OK" and held != value:
            self._renewed = -math.inf
            return False
        self._value, self._renewed = value, began
        return True

    async def release(self) -> None:
        """Give the lease back if we still hold it."""
        self._renewed = -math.inf
        await self._log.call(
            f"releasing the lease of {self.role}",
            lambda: script.RELEASE_LEASE.run(self._log.redis, [self._key], [self._value]),
        )


async def lease_holder(log: RunLog, role: str) -> tuple[str, int] | None:
    """Owner and epoch of the lease of a role; None if nobody holds it."""
    held = await log.command(f"reading the lease of {role}", "GET", log.names.lease(role))
    if held is None:
        return None
    body = json.loads(held)
    return body["owner"], body["epoch"]


def _value(owner: str, token: str, epoch: int) -> str:
    return json.dumps({"owner": owner, "token": token, "epoch": epoch}, sort_keys=True)


def _milliseconds(ttl_s: float) -> int:
    if ttl_s <= 0:
        raise ValueError(f"a lease needs a positive ttl, not {ttl_s}")
    return math.ceil(ttl_s * 1000)
