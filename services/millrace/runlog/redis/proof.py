"""Which copies of logs this process has compared with the store and found not to be behind it."""

import asyncio
import weakref
from dataclasses import dataclass, field

import redis.asyncio as redis_asyncio

from millrace.runlog.redis.log import RunLog


@dataclass(slots=True)
class Proof:
    """What is known of one run's log at one Redis."""

    instance: str = ""
    """The log instance that was compared last; "" if none was, or it was found behind."""
    rebuilt: list[float] = field(default_factory=list)
    """When this process rebuilt it because of damage, on the monotonic clock; the newest ones, oldest first."""
    damage: str = ""
    """What was found damaged and is not rebuilt yet; "" if nothing is."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the log is compared or rebuilt, so that one process does it once."""


_PROOFS: weakref.WeakKeyDictionary[redis_asyncio.Redis, dict[str, Proof]] = weakref.WeakKeyDictionary()
"""By client and run. A copy gets behind the store only by becoming another instance."""


def proof_of(log: RunLog) -> Proof:
    """The proof of a run at the log's Redis."""
    return _PROOFS.setdefault(log.redis, {}).setdefault(log.names.root, Proof())


def is_nameable(instance: str) -> bool:
    """Whether an instance names its server; where INFO is denied it does not, and proves nothing for later."""
    return not instance.endswith(".")
