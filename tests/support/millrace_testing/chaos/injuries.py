"""What the torture does to a stack, each chosen and aimed by the dice alone: the same seed makes the same choices.

None of them touches the truth in the store. An injury that lasts is ended by the callable that it returns, after the
seconds that it returns with it.
"""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from millrace_testing.chaos.clocks import EVERYBODY, Clocks
from millrace_testing.chaos.fault_proxy import Effect, Fault, FaultProxy
from millrace_testing.chaos.stack import PREFIX, SERVICES, ChaosStack

HOUR = 3600
FREEZE_S = (1.0, 12.0)
FULL_S = (2.0, 12.0)
JUMPED_S = (5.0, 20.0)

Undo = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Injury:
    """An injury that was done: its kind, its target and, if it lasts, the function that ends it."""

    kind: str
    target: str
    at: float = field(default_factory=time.time)
    lasts_s: float = 0.0
    undo: Undo | None = None


@dataclass(kw_only=True)
class Torturer:
    """Injures one stack."""

    stack: ChaosStack
    dice: random.Random
    proxy: FaultProxy
    clocks: Clocks | None
    """None without libfaketime: then no clock jumps."""

    def kinds(self) -> dict[str, Callable[[], Injury | None]]:
        """Return all kinds of injuries that are possible here. A kind returns None if it found nothing to injure."""
        found: dict[str, Callable[[], Injury | None]] = {
            "kill": self.kill,
            "freeze": self.freeze,
            "full store": self.fill,
            "flip in the spool": self.flip_spool,
            "flip in scratch": self.flip_scratch,
            "flip in Redis": self.flip_redis,
        }
        if self.clocks is not None:
            found["clock"] = self.jump
        return found

    def kill(self) -> Injury | None:
        """Send SIGKILL to a service, to Redis or to the fork server."""
        target = self.dice.choice([*SERVICES, "redis", "fork_server"])
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid(target), signal.SIGKILL)
            return Injury(kind="kill", target=target)
        return None

    def freeze(self) -> Injury | None:
        """Send SIGSTOP to a service or to Redis, and SIGCONT before the supervisor would kill it."""
        target, lasts_s = self.dice.choice([*SERVICES, "redis"]), self.dice.uniform(*FREEZE_S)
        with contextlib.suppress(ProcessLookupError):
            pid = self._pid(target)
            os.kill(pid, signal.SIGSTOP)
            return Injury(kind="freeze", target=target, lasts_s=lasts_s, undo=lambda: self.stack.thaw(pid))
        return None

    def fill(self) -> Injury:
        """Make the object store refuse writes for a while, as a full disk does."""
        full = self.proxy.add(Fault(effect=Effect.ANSWER, method="PUT", status=507, code="InsufficientStorage"))
        lasts_s = self.dice.uniform(*FULL_S)
        return Injury(kind="full store", target="store", lasts_s=lasts_s, undo=lambda: self.proxy.remove(full))

    def jump(self) -> Injury:
        """Set the clocks of all services, or that of Redis, wrong by up to five hours for a while."""
        assert self.clocks is not None
        clocks, names = self.clocks, self.dice.choice([SERVICES, ("redis",), EVERYBODY])
        offset_s, lasts_s = self.dice.randint(-5 * HOUR, 5 * HOUR), self.dice.uniform(*JUMPED_S)
        clocks.set(names, offset_s)
        target = f"{'everybody' if len(names) > len(SERVICES) else 'services' if len(names) > 1 else names[0]}"
        return Injury(kind="clock", target=target, lasts_s=lasts_s, undo=lambda: clocks.set(names, 0))

    def flip_spool(self) -> Injury | None:
        """Flip one bit of a finished rollout in the env-server's spool."""
        return self._flip_file("flip in the spool", sorted((self.stack.directory / "spool").glob("*/*.rollouts")))

    def flip_scratch(self) -> Injury | None:
        """Flip one bit of a temporary file: a checkpoint that is being written or read, or a copy of a policy."""
        files = sorted(path for path in (self.stack.directory / "scratch").glob("*/**/*") if path.name != "owner.lock")
        return self._flip_file("flip in scratch", files)

    def flip_redis(self) -> Injury | None:
        """Flip one bit of a value in Redis: a string, a field of a hash, or a damaged copy appended to a stream."""
        try:
            with contextlib.closing(self.stack.redis()) as client:
                keys = sorted(client.scan_iter(f"{PREFIX}*", count=1000))
                if not keys:
                    return None
                key = self.dice.choice(keys)
                done = self._flip_key(client, key)
        except redis.RedisError:
            return None  # it is dead or frozen at the moment
        return Injury(kind="flip in Redis", target=f"{done} {key.decode()}") if done else None

    def _flip_key(self, client: redis.Redis, key: bytes) -> str:
        """Flip one bit of a key's value, and return a description of it; empty if nothing was flipped."""
        flip = self._flip
        match client.type(key):
            case b"string":
                ttl_ms: Any = client.pttl(key)
                value: Any = client.get(key)
                if not value:
                    return ""
                client.set(key, flip(value), px=ttl_ms if ttl_ms > 0 else None)
                return "string"
            case b"hash":
                fields: Any = sorted(client.hgetall(key).items())  # pyright: ignore[reportAttributeAccessIssue]
                name, value = self.dice.choice(fields)
                client.hset(key, name, flip(value))
                return f"field {name.decode(errors='replace')} of"
            case b"stream":
                entries: Any = client.xrevrange(key, count=20)
                if not entries:
                    return ""
                _, body = self.dice.choice(entries)
                name = self.dice.choice(sorted(body))
                client.xadd(key, {**body, name: flip(body[name])})
                return f"a copy of an entry, field {name.decode(errors='replace')}, of"
        return ""

    def _flip_file(self, kind: str, files: Sequence[Path]) -> Injury | None:
        if not files:
            return None
        path = self.dice.choice(files)
        try:
            with path.open("r+b") as file:
                if not (size := os.fstat(file.fileno()).st_size):
                    return None
                place = self.dice.randrange(size)
                file.seek(place)
                byte = file.read(1)
                file.seek(place)
                file.write(self._flip(byte))
        except OSError:
            return None  # a directory, or gone meanwhile
        return Injury(kind=kind, target=path.name)

    def _flip(self, data: bytes) -> bytes:
        if not data:
            return b"\x01"
        place = self.dice.randrange(len(data))
        return data[:place] + bytes([data[place] ^ (1 << self.dice.randrange(8))]) + data[place + 1 :]

    def _pid(self, target: str) -> int:
        """Return the process id of a target. Raise ProcessLookupError if it does not exist."""
        found = self.stack.where.get("fork_server") if target == "fork_server" else self.stack.pid(target)
        if not found:
            raise ProcessLookupError(target)
        return found
