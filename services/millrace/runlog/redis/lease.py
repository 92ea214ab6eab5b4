"""Leases: who *may try* to hold a role of a run. Safety comes from epochs; a lease only spares useless tries.

A value that is no lease is damage, and nobody's: the holder writes its own over it at its next renewal, and where there
is no holder it expires within one ttl.
"""

import json
import logging
import math
import secrets
import time
from typing import NamedTuple, Self

from millrace.decoding import Fields, decode_object
from millrace.errors import CorruptObjectError, FencedError
from millrace.runlog.redis import script
from millrace.runlog.redis.connection import as_text
from millrace.runlog.redis.entry import log_gone
from millrace.runlog.redis.log import RunLog

logger = logging.getLogger(__name__)

_KEEP_END_S = 7 * 24 * 3600.0  # a run that is paused for longer begins again without the words of who paused it
_MAX_WORDS = 2000
_MAX_TAKEOVERS = 3  # each repetition means that the dead holder's value changed meanwhile: somebody else was faster


class LeaseHolder(NamedTuple):
    """What a lease says of its holder."""

    owner: str
    epoch: int
    slot: str
    """The holder's place, such as `host/address`; empty if it has no lasting one."""


class LeaseEnd(NamedTuple):
    """The last words of a holder that gave its lease back."""

    owner: str
    epoch: int
    why: str


class Lease:
    """A held lease. Renew it at a third of its ttl; write only while `may_write`."""

    def __init__(
        self, log: RunLog, *, role: str, owner: str, ttl_s: float, token: str, renewed: float, slot: str = ""
    ) -> None:
        self._log = log
        self._key = log.names.lease(role)
        self._token = token
        self._epoch = 0
        self._renewed = renewed
        self._is_released = False
        self.taken_from = ""
        """The owner in the same slot that had not given it back; empty if it was free."""
        self.role = role
        self.owner = owner
        self.slot = slot
        self.ttl_s = ttl_s

    @classmethod
    async def acquire(cls, log: RunLog, role: str, owner: str, ttl_s: float, *, slot: str = "") -> Self | None:
        """Take the lease if it is free; None if another process holds it. LogGoneError if Redis does not hold the log.

        `slot` is a place that only one process can have at a time (`host/address`): a lease of the same slot is
        a dead predecessor's and is taken over at once. A damaged value is not taken over, but expires within
        `ttl_s`.
        """
        token, expected = secrets.token_hex(8), b""
        value = _value(owner, token, 0, slot)
        keys, taken_from = [log.names.lease(role), log.names.meta], ""
        for _ in range(_MAX_TAKEOVERS):
            began = time.monotonic()
            args = [log.generation, value, _milliseconds(ttl_s), expected]
            reply = await log.call(
                f"acquiring the lease of {role}",
                lambda args=args: script.ACQUIRE_LEASE.run(log.redis, keys, args),
            )
            answer, held = as_text(reply[0]), reply[1]
            if answer == "LOGGONE":
                raise log_gone(f"lease of {role} of run {log.uid}")
            if answer == "OK" or as_text(held) == value:  # equal: our own call, whose answer was lost
                lease = cls(log, role=role, owner=owner, ttl_s=ttl_s, token=token, renewed=began, slot=slot)
                lease.taken_from = taken_from
                return lease
            try:
                holder = _decode(held, role, log.uid)
            except CorruptObjectError as error:
                await _expire(log, role, held, ttl_s, error)  # before then its holder may write over it
                return None
            if not slot or holder.slot != slot:
                return None
            # In the same slot, so its process is dead. The script takes it only while the value is still this one.
            expected, taken_from = held, holder.owner
        return None

    @property
    def may_write(self) -> bool:
        """Return whether the last renewal was sent less than half the ttl ago, on this process's monotonic clock."""
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
        """Extend the lease by its ttl and record the holder's epoch; False if another holds it, or it was released.

        The holder must not write after False. A lease that is not there (Redis was wiped, lost its tail, or it
        ran out and nobody took it) is taken again: epochs, not leases, fence.
        """
        if self._is_released:
            return False
        self._epoch = epoch or self._epoch
        value = _value(self.owner, self._token, self._epoch, self.slot)
        expected = b""
        for _ in range(_MAX_TAKEOVERS):
            began = time.monotonic()
            args = [self._token, value, _milliseconds(self.ttl_s), expected]
            answer, held = await self._log.call(
                f"renewing the lease of {self.role}",
                lambda args=args: script.RENEW_LEASE.run(self._log.redis, [self._key], args),
            )
            if as_text(answer) == "OK":
                self._renewed = began
                return True
            try:
                _decode(held, self.role, self._log.uid)
                break
            except CorruptObjectError as error:
                logger.warning("a lease was damaged and is written anew by its holder", extra=_fields(self._key, error))
                expected = held
        self._renewed = -math.inf
        return False

    async def release(self, why: str = "") -> None:
        """Give the lease back if it is still ours.

        The next holder can read `why` (`last_end`), if there is any text.
        """
        self._is_released = True
        self._renewed = -math.inf
        words = json.dumps({"owner": self.owner, "epoch": self._epoch, "why": why[:_MAX_WORDS]}) if why else ""
        keys = [self._key, self._log.names.lease_end(self.role)]
        args = [self._token, words, _milliseconds(_KEEP_END_S)]
        await self._log.call(
            f"releasing the lease of {self.role}",
            lambda: script.RELEASE_LEASE.run(self._log.redis, keys, args),
        )


async def last_end(run_log: RunLog, role: str) -> LeaseEnd | None:
    """Return what the last holder of a role wrote when it gave the role back; None if nothing, or nothing readable."""
    key = run_log.names.lease_end(role)
    found = await run_log.call(f"reading the end of the lease of {role}", lambda: run_log.redis.get(key))
    if found is None:
        return None
    try:
        fields = Fields(decode_object(found, what="it", reason="LEASE_CORRUPT", max_bytes=64 << 10))
        return LeaseEnd(fields.text("owner"), fields.integer("epoch"), fields.text("why"))
    except (CorruptObjectError, ValueError) as error:  # it is for people: what it says decides nothing
        logger.warning("the last words of a lease's holder cannot be read", extra=_fields(key, error))
        return None


async def _expire(run_log: RunLog, role: str, held: bytes, ttl_s: float, error: CorruptObjectError) -> None:
    """Have a value that is no lease expire within a ttl, so that it does not keep everybody out for ever."""
    key = run_log.names.lease(role)
    is_bounded = await run_log.call(
        f"bounding the lease of {role}",
        lambda: script.EXPIRE_LEASE.run(run_log.redis, [key], [held, _milliseconds(ttl_s)]),
    )
    if is_bounded:
        fields = _fields(key, error)
        logger.warning(
            "a lease is damaged and is free when its holder does not renew it", extra=fields | {"in_s": ttl_s}
        )


def _fields(key: str, error: Exception) -> dict[str, object]:
    return {"key": key, "error": str(error)}


def _value(owner: str, token: str, epoch: int, slot: str) -> str:
    return json.dumps({"owner": owner, "token": token, "epoch": epoch, "slot": slot}, sort_keys=True)


def _decode(value: bytes, role: str, uid: str) -> LeaseHolder:
    try:
        fields = Fields(decode_object(value, what="it", reason="LEASE_CORRUPT", max_bytes=64 << 10))
        return LeaseHolder(fields.text("owner"), fields.integer("epoch"), fields.text("slot"))
    except (CorruptObjectError, ValueError) as error:
        raise CorruptObjectError(
            f"the lease of {role} of run {uid} holds {as_text(value)[:100]!r}",
            reason="LEASE_CORRUPT",
            remedy="find out who else writes to that key; its holder writes over it, or it expires",
        ) from error


def _milliseconds(ttl_s: float) -> int:
    if ttl_s <= 0:
        raise ValueError(f"a lease needs a positive ttl, not {ttl_s}")
    return math.ceil(ttl_s * 1000)
