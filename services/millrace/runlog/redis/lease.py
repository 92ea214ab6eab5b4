"""Leases: who *may try* to hold a role of a run. Safety comes from epochs; a lease only spares useless tries.

A value that is no lease is damage, and nobody's: the holder writes its own over it at its next renewal, and where there
is no holder it expires within one ttl.
"""

import contextlib
import json
import logging
import math
import secrets
import time
from collections.abc import Sequence
from typing import NamedTuple, Self

import redis.asyncio as redis_asyncio

from millrace.decoding import Fields, decode_object
from millrace.errors import CorruptObjectError, FencedError
from millrace.runlog.names import Names
from millrace.runlog.redis import connection, script
from millrace.runlog.redis.connection import as_text
from millrace.runlog.redis.entry import log_gone
from millrace.runlog.redis.log import RunLog

logger = logging.getLogger(__name__)

# A run that is paused for longer begins again without the words of who paused it.
_KEEP_END_S = 7 * 24 * 3600.0
_MAX_WORDS = 2000
# Each repetition means that the dead holder's value changed meanwhile: somebody else was faster.
_MAX_TAKEOVERS = 3


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
        """Take what `acquire` has got: a lease that is held. `renewed` is when that was sent, on the monotonic clock.

        `token` is in the lease's value, and tells this holder from all others.
        """
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
        """Take the lease of a role for `ttl_s` seconds if it is free, and return it; None if another process holds it.

        `slot` is a place that only one process can have at a time (`host/address`): a lease of the same slot is a dead
        predecessor's and is taken over at once. A damaged value is not taken over, but expires within `ttl_s`.
        LogGoneError if Redis does not hold the log.
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
            # An equal value is that of our own call before, whose answer was lost: the token is random.
            if answer == "OK" or as_text(held) == value:
                lease = cls(log, role=role, owner=owner, ttl_s=ttl_s, token=token, renewed=began, slot=slot)
                lease.taken_from = taken_from
                return lease
            try:
                holder = _decode(held, role, log.uid)
            except CorruptObjectError as error:
                # Not taken over now: a living holder writes its own value over it at its next renewal.
                await _expire(log, role, held, ttl_s, error)
                return None
            if not slot or holder.slot != slot:
                return None
            # In the same slot, so its process is dead. The script takes it only while the value is still this one.
            expected, taken_from = held, holder.owner
        return None

    @property
    def may_write(self) -> bool:
        """Return whether the last renewal was sent less than half the ttl ago, on this process's monotonic clock.

        False once the lease is lost or released.
        """
        return time.monotonic() - self._renewed < self.ttl_s / 2

    def require(self) -> None:
        """Raise `FencedError` unless the last renewal is less than half the ttl ago (`may_write`)."""
        if not self.may_write:
            raise FencedError(
                f"the lease of {self.role} of run {self._log.uid} was not renewed for half its {self.ttl_s:g} s",
                reason="LEASE_STALE",
                remedy="stop writing and acquire the lease again",
            )

    async def renew(self, *, epoch: int = 0) -> bool:
        """Extend the lease by its ttl and write the holder's epoch into it (0: as before).

        Return False if another process holds it, or it was released: the holder must not write any more. A lease that
        is not there (Redis was wiped, lost its tail, or it ran out and nobody took it) is taken again: epochs, not
        leases, fence.
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
                # When it was sent, not when the answer came: the lease lasts at least as long as this process believes.
                self._renewed = began
                return True
            try:
                _decode(held, self.role, self._log.uid)
                break
            except CorruptObjectError as error:
                logger.warning("a lease was damaged and is written anew by its holder", extra=_fields(self._key, error))
                # The script writes over exactly this value: by then another process may have written a lease.
                expected = held
        self._renewed = -math.inf
        return False

    async def release(self, why: str = "") -> None:
        """Give the lease back if it is still ours.

        `why` is kept for the next holder (`last_end`) for a week, if there is any text.
        """
        # Before the call, so that no renewal takes the lease again meanwhile.
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
    """Return what the last holder of a role wrote when it gave the role back; None if nothing, or nothing readable.

    It has the holder, its epoch and its reason.
    """
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


async def read_owner(redis: redis_asyncio.Redis, names: Names, role: str) -> str | None:
    """Return who holds the lease of a role of a run; None if nobody does, and empty where the lease is damaged."""
    held = await connection.call(redis, f"reading the lease of {role}", lambda: redis.get(names.lease(role)))
    if held is None:
        return None
    try:
        return _decode(held if isinstance(held, bytes) else held.encode(), role, names.uid).owner
    except CorruptObjectError:
        return ""


async def read_held(redis: redis_asyncio.Redis, names: Sequence[Names], role: str, *, slot: str = "") -> frozenset[str]:
    """Return the uids of those runs whose lease of a role somebody holds, from one request to Redis.

    `names` has the keys of each run. A lease of the own `slot` (empty for none) is a dead predecessor's and, as one
    that is damaged, does not count: `Lease.acquire` deals with both.
    """
    if not names:
        return frozenset()
    keys = [each.lease(role) for each in names]
    values = await connection.call(redis, f"reading the leases of {role}", lambda: redis.mget(keys))
    held = set[str]()
    for each, value in zip(names, values, strict=True):
        if value is None:
            continue
        with contextlib.suppress(CorruptObjectError):
            holder = _decode(value if isinstance(value, bytes) else value.encode(), role, each.uid)
            if not slot or holder.slot != slot:
                held.add(each.uid)
    return frozenset(held)


async def _expire(run_log: RunLog, role: str, held: bytes, ttl_s: float, error: CorruptObjectError) -> None:
    """Set a value `held` that is no lease to expire within `ttl_s` seconds, so that it does not block the role for
    ever.

    `error` says what is wrong with the value, for the log. A key that holds another value by now is left as it is.
    """
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
    """Return the fields of a log line about a damaged lease."""
    return {"key": key, "error": str(error)}


def _value(owner: str, token: str, epoch: int, slot: str) -> str:
    """Return the JSON that a lease's key holds.

    `token` is a random text by which its holder knows the lease as its own. `epoch` is the holder's, 0 before it has
    one. `slot` is the place that only one process can have at a time, or empty.
    """
    return json.dumps({"owner": owner, "token": token, "epoch": epoch, "slot": slot}, sort_keys=True)


def _decode(value: bytes, role: str, uid: str) -> LeaseHolder:
    """Return who holds a lease, read from the `value` of its key; `role` and `uid` name the lease in the message.

    CorruptObjectError if the value is no lease.
    """
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
    """Return seconds as whole milliseconds, rounded up; ValueError unless they are positive."""
    if ttl_s <= 0:
        raise ValueError(f"a lease needs a positive ttl, not {ttl_s}")
    return math.ceil(ttl_s * 1000)
