"""The adapters that an engine keeps beside its base: as many as fit, any other loaded when it is asked for.

A request uses an adapter by its policy (run, lineage, version). One that is not in the engine is fetched, put in and
proved, while all other requests go on; the least recently used one that no request uses makes room. So a request for an
adapter that made room for others waits, and is not refused. Works with any engine; no torch.
"""

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Protocol

from millrace.errors import CapacityError, UnavailableError
from millrace.inference.engine import HeldDigest, InflightMode, PolicyIdentity
from millrace.policies.manifest import StagedPolicy
from millrace.telemetry import waits

logger = logging.getLogger(__name__)

LOAD_S = 120.0
"""Seconds in which an adapter is loaded; a request that waits for it longer is refused, to be tried again."""


class AdapterEngine(Protocol):
    """An engine with one base and many adapters on it; to load one pauses no request of the others."""

    async def add_adapter(self, staged: StagedPolicy, *, identity: PolicyIdentity) -> HeldDigest:
        """Put an adapter beside the others, prove it, and return its digest; a failure changes nothing and is raised.

        The bytes of `staged` are not used after the call.
        """
        ...

    async def remove_adapter(self, identity: PolicyIdentity) -> None:
        """Take an adapter away; requests that it generates end with ABORT. One that is not there is ignored."""
        ...

    async def move_adapter(self, old: PolicyIdentity, new: PolicyIdentity, *, inflight_mode: InflightMode) -> None:
        """Have the requests that `old` generates go on with `new`, which the engine has; none is lost.

        Moved are the requests that the engine was given before this call.
        """
        ...


@dataclass(slots=True, eq=False)
class _Held:
    """An adapter that is in the engine, or is being put there by `loading`; `leases` are the requests that use it."""

    identity: PolicyIdentity
    loading: "asyncio.Task[HeldDigest]"
    leases: "set[AdapterUse]" = field(default_factory=set)

    @property
    def is_loaded(self) -> bool:
        """Return whether the engine has it, proved."""
        return self.loading.done() and not self.loading.cancelled() and self.loading.exception() is None


@dataclass(slots=True, eq=False)
class AdapterUse:
    """The use of an adapter by a request, from the time at which the engine has it to the request's end."""

    held: _Held

    @property
    def identity(self) -> PolicyIdentity:
        """Return the policy of the adapter: that which was asked for, or the newer one that it was moved to since.

        A request must be handed to the engine without another await after this is read.
        """
        return self.held.identity

    @property
    def digest(self) -> HeldDigest:
        """Return the digest of the adapter, as it was proved in the engine."""
        return self.held.loading.result()


class ServedAdapters:
    """The adapters of one engine, at most `most` at a time. Must be used from one event loop."""

    def __init__(
        self,
        engine: AdapterEngine,
        stage: Callable[[PolicyIdentity], StagedPolicy],
        *,
        most: int,
        load_s: float = LOAD_S,
    ) -> None:
        """Take an engine without adapters.

        `stage` fetches an adapter into host memory, verified; it is called in a thread, one call at a time, and what it
        returned is not used any more when it is called again. `most` is how many adapters the engine keeps. A request
        waits at most `load_s` seconds for its adapter.
        """
        self._engine = engine
        self._stage = stage
        self._most = most
        self.load_s = load_s
        """The most seconds that a request waits for its adapter."""
        self._held: OrderedDict[PolicyIdentity, _Held] = OrderedDict()
        """The least recently used first."""
        self._loading = asyncio.Lock()
        self._change = asyncio.Event()
        self.num_loaded = 0
        """Adapters that were put into the engine so far, the same one again included."""

    @property
    def held(self) -> dict[PolicyIdentity, HeldDigest]:
        """Return the adapters that the engine has and their digests, the least recently used first."""
        return {identity: held.loading.result() for identity, held in self._held.items() if held.is_loaded}

    @contextlib.asynccontextmanager
    async def using(self, identity: PolicyIdentity) -> AsyncIterator[AdapterUse]:
        """Have the engine keep an adapter during the block, and load it first if the engine does not have it.

        Raises what fetching and proving raise, UnavailableError (ADAPTER_LOADING) if that takes longer than the limit,
        and CapacityError (ADAPTERS_IN_USE) if requests use all that the engine can keep. The next request tries again.
        """
        held = self._held.get(identity)
        if held is None:
            loading = asyncio.create_task(self._load(identity), name=f"adapter {identity}")
            loading.add_done_callback(_note_failure)
            held = self._held[identity] = _Held(identity, loading)
        lease = AdapterUse(held)
        held.leases.add(lease)
        try:
            if not held.is_loaded:
                await self._loaded(held)
            self._touch(lease.held)
            yield lease
        finally:
            lease.held.leases.discard(lease)
            self._notify()

    async def move(self, old: PolicyIdentity, new: PolicyIdentity, *, inflight_mode: InflightMode) -> HeldDigest:
        """Load an adapter's newer version, have the requests of the old one go on with it, and return its digest.

        Raises as `using` does; the requests then go on with the old version.
        """
        async with self.using(new) as lease:
            before = self._held.get(old)
            if before is None or not before.is_loaded or old == new:
                return lease.digest
            # In one go with the call, which moves the requests that the engine has by now: one that is given to the
            # engine later reads its lease later.
            moved, before.leases = before.leases, set()
            _hand_over(moved, lease.held)
            self._held.move_to_end(old, last=False)  # only requests that pin this version ask for it from here on
            try:
                await self._engine.move_adapter(old, new, inflight_mode=inflight_mode)
            except BaseException:  # undoes it, then raises
                _hand_over({each for each in moved if each in lease.held.leases}, before)
                lease.held.leases -= moved
                raise
            return lease.digest

    async def drop(self, run_uid: str) -> None:
        """Take all adapters of a run away; their requests end with ABORT."""
        for identity, held in list(self._held.items()):
            if identity.run_uid == run_uid and held.is_loaded:
                del self._held[identity]
                await self._engine.remove_adapter(identity)
        self._notify()

    def forget(self) -> None:
        """Forget all adapters, because the engine does not have them any more: its base was replaced or it failed."""
        for identity, held in list(self._held.items()):
            if held.is_loaded:
                del self._held[identity]
        self._notify()

    async def close(self) -> None:
        """Cancel what is being loaded, and wait for it."""
        tasks = [held.loading for held in self._held.values() if not held.loading.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _loaded(self, held: _Held) -> None:
        """Wait until an adapter is loaded; raise the error of its loading, or UnavailableError after the limit."""
        reason = f"adapter {held.identity} ({waits.COUNT} requests)"
        with waits.shared(reason, waits_on="object store", deadline_s=self.load_s, quiet_s=1.0):
            try:
                async with asyncio.timeout(self.load_s):
                    await asyncio.shield(held.loading)  # others wait for it as well
            except TimeoutError:
                raise UnavailableError(
                    f"adapter {held.identity} was not loaded within {self.load_s:.0f} s",
                    reason="ADAPTER_LOADING",
                    remedy="retry",
                ) from None

    async def _load(self, identity: PolicyIdentity) -> HeldDigest:
        """Put an adapter into the engine and return its digest; after a failure the next request tries again."""
        try:
            async with self._loading:
                await self._make_room(identity)
                with waits.of_run(identity.run_uid):
                    staged = await asyncio.to_thread(self._stage, identity)
                    digest = await self._engine.add_adapter(staged, identity=identity)
        except BaseException:  # forgets it, then raises
            self._held.pop(identity, None)
            self._notify()
            raise
        self.num_loaded += 1
        logger.info("adapter loaded", extra={"run": identity.run_uid, "version": identity.version})
        return digest

    async def _make_room(self, identity: PolicyIdentity) -> None:
        """Take adapters away that no request uses, the least recently used first, until one more may be loaded.

        Waits for the end of requests if they use all; raises CapacityError after the limit.
        """
        while True:
            change = self._change
            loaded = [held for held in self._held.values() if held.is_loaded]
            if len(loaded) < self._most:
                return
            if (unused := next((held for held in loaded if not held.leases), None)) is not None:
                del self._held[unused.identity]
                await self._engine.remove_adapter(unused.identity)
                continue
            reason = f"room for adapter {identity}: requests use all {self._most}"
            with waits.waiting(reason, waits_on="inference", deadline_s=self.load_s):
                try:
                    async with asyncio.timeout(self.load_s):
                        await change.wait()
                except TimeoutError:
                    raise CapacityError(
                        f"requests use all {self._most} adapters that this engine keeps",
                        reason="ADAPTERS_IN_USE",
                        remedy="retry later",
                    ) from None

    def _touch(self, held: _Held) -> None:
        """Record that an adapter is used now."""
        if self._held.get(held.identity) is held:
            self._held.move_to_end(held.identity)

    def _notify(self) -> None:
        """Wake what waits for room."""
        change, self._change = self._change, asyncio.Event()
        change.set()


def _hand_over(leases: set[AdapterUse], held: _Held) -> None:
    """Have the leases be of another adapter."""
    for lease in leases:
        lease.held = held
    held.leases |= leases


def _note_failure(loading: "asyncio.Task[HeldDigest]") -> None:
    """Log why an adapter was not loaded, also if no request waits for it any more."""
    if not loading.cancelled() and (error := loading.exception()) is not None:
        logger.warning("an adapter was not loaded", extra={"adapter": loading.get_name(), "error": str(error)})
