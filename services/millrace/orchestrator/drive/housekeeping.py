"""What a run's driver does besides the loop: policies in, watermarks and log instances out, Redis trimmed, events kept.

Each method is a background task of the driver and ends by cancellation.
"""

import asyncio
import logging

from millrace.backoff import Backoff
from millrace.errors import CapacityError, LogGoneError, MillraceError, UnavailableError
from millrace.orchestrator.drive.assembly import RunParts
from millrace.runlog import reappend_committed
from millrace.runlog.event_archive import EventArchive
from millrace.runlog.records.numbered import latest_epoch
from millrace.runlog.records.run_record import list_checkpoints, load_origin
from millrace.runlog.redis.damage import checked_policy
from millrace.runlog.retention import Retention, RetentionRule, RunNeeds
from millrace.runlog.seal import write_seal
from millrace.telemetry.leftovers import LEFTOVERS

logger = logging.getLogger(__name__)

LOG_LOOK_S = 2.0
"""How often Redis is asked which copy of the log it holds."""
WORKER_POLL_S = 5.0
TRIM_S = 10.0
ARCHIVE_S = 10.0
"""How often new events go to the store: what a wiped Redis may lose of them at most."""
LAST_ARCHIVE_S = 3.0
RETIRE_S = 2.0
"""How often it is looked whether the run has grown so far that something is retired."""
LAST_RETIRE_S = 60.0
"""How long the seal of a run waits for what its retention still removes."""
TELL_DAMAGE = Backoff(1.0, 60.0)
"""Shortest and longest pause between two looks at what was damaged; one event tells of all that was met meanwhile."""


class Housekeeper:
    """Keeps the copies of a run's log in step, and its workers informed."""

    def __init__(self, parts: RunParts) -> None:
        self._parts = parts
        self._log = parts.context.log
        self._generation = parts.context.log.generation
        self._archive = EventArchive(
            parts.context.log,
            on_damaged=parts.damage.note,
            on_written=lambda key: parts.writer.known.announce(key),  # not bound: a takeover replaces what is known
        )
        self._policy_cursor = "0"
        self._policy_rewinds = 0
        self._retention: Retention | None = None
        self._pass: asyncio.Task[None] | None = None
        self.rule = RetentionRule.of(parts.context.record.settings)
        """What the run promises to keep."""
        self.log_instance = ""
        """Which copy of the log Redis held at the last look."""

    async def start(self) -> None:
        """Append the committed batches that Redis lacks, and pass workers which copy of the log Redis holds."""
        self.log_instance = await self._log.read_instance()
        self._parts.context.registry.set_log_instance(self._log.uid, self.log_instance)
        await reappend_committed(self._log, self._parts.context.epoch)

    async def watch_log(self) -> None:
        """Append again what Redis lacks after each of its restarts, which may have lost the newest entries.

        Raises LogGoneError when the log is gone, or was rebuilt as another generation: who claims the run next
        begins on that one.
        """
        # unregistered wait: a periodic look; what it awaits is registered where it is awaited
        while True:
            await asyncio.sleep(LOG_LOOK_S)
            instance = await self._log.read_instance()
            if self._log.generation != self._generation:
                raise LogGoneError(
                    f"the log of run {self._log.uid} is now of generation {self._log.generation}, not "
                    f"{self._generation}",
                    reason="LOG_REBUILT",
                    remedy="claim the run again",
                )
            if instance != self.log_instance:
                logger.warning("Redis restarted, bringing the log up to date", extra={"instance": instance})
                await self._resync(instance)

    async def _resync(self, instance: str) -> None:
        self._parts.context.registry.set_log_instance(self._log.uid, instance)
        count = await reappend_committed(self._log, self._parts.context.epoch)
        if self._parts.intake.has_begun:  # env-servers append what this copy of the stream lacks, and it is read again
            self._parts.stream.rewind()
            # Each env-server answers only when it has appended what the log lacks of its rollouts.
            await self._parts.envs.playing(instance)
            await self._parts.stream.catch_up()
        self._policy_cursor = "0"
        self._policy_rewinds += 1
        self.log_instance = instance
        self._parts.book.changed.set()
        await self._parts.context.events.warning(
            "REDIS_RESTARTED",
            f"Redis restarted and may have lost the entries of its last second; {count} committed batches were "
            "appended again, env-servers and the trainer append what it lacks of theirs",
        )

    async def follow_policies(self) -> None:
        """Make each version of the policy stream the one to serve, if its manifest in the store confirms it."""
        while True:
            rewinds = self._policy_rewinds
            for entry in await self._log.read("policies", after=self._policy_cursor, block_s=5.0):
                if rewinds != self._policy_rewinds:
                    break
                self._policy_cursor = entry.id
                policy = await checked_policy(self._log, entry)
                if rewinds != self._policy_rewinds:
                    break
                if policy is not None:
                    self._parts.policies.publish(policy)
                    self._parts.writer.known.announce(policy.manifest_key.removeprefix(self._log.names.root))
                    self._parts.writer.lineage = max(policy.lineage, self._parts.writer.lineage)

    async def remove_damaged(self) -> None:
        """Report damaged entries and remove them from Redis; env-servers then append again what the log lacks.

        Pauses between two reports grow while damage keeps coming.
        """
        num_removed = num_met = 0
        # unregistered wait: a periodic look; what it awaits is registered where it is awaited
        while True:
            # The event log is for people: damage that keeps coming is reported less and less often.
            await asyncio.sleep(TELL_DAMAGE.after(1 + num_met))
            num_met = num_met + 1 if await self._parts.damage.tell() else 0
            if self._parts.damage.num_rollouts != num_removed:
                num_removed = self._parts.damage.num_rollouts
                # As if it were another copy of the log.
                await self._parts.envs.playing(f"{self.log_instance}~{num_removed}")

    async def watch_workers(self) -> None:
        """Do what a change of workers asks for: pass them the watermark, open environments, and wake the loop.

        Environments are opened on env-servers that joined. It is also done every `WORKER_POLL_S`.
        """
        parts = self._parts
        while True:
            changed = parts.context.registry.changed
            parts.context.registry.set_watermark(parts.context.record.uid, parts.book.frontier.resolved_below)
            if parts.envs.envs and not parts.envs.is_complete(parts.specs):
                await parts.envs.refresh(parts.specs)
            try:
                async with asyncio.timeout(WORKER_POLL_S):
                    await changed.wait()
            except TimeoutError:
                pass
            parts.book.changed.set()

    async def trim_consumed(self) -> None:
        """Remove from Redis, every `TRIM_S`, the batches and announcements that the newest policy makes superfluous.

        The store keeps them.
        """
        trimmed = 0
        # unregistered wait: a periodic look; what it awaits is registered where it is awaited
        while True:
            await asyncio.sleep(TRIM_S)
            newest = self._parts.policies.desired
            if newest is not None and newest.version > trimmed:
                await self._log.trim_consumed(newest.version)
                trimmed = newest.version

    async def retire(self) -> None:
        """Do a pass of retention each time the run has grown by the rule's stride, until cancelled.

        What cannot be removed is tried again in the next pass. If cancelled, the pass in progress is stopped,
        too.
        """
        seen = -1
        # unregistered wait: a periodic look; what it awaits is registered where it is awaited
        while True:
            await asyncio.sleep(RETIRE_S)
            if self.rule and self._parts.book.step >= seen + self.rule.stride:
                seen = self._parts.book.step
                self._pass = asyncio.create_task(self._retire())
                try:
                    await asyncio.shield(self._pass)
                except asyncio.CancelledError:
                    if self._retention is not None:
                        self._retention.stopping.set()
                    raise

    async def retire_last(self) -> None:
        """Wait for the pass that is in progress, then do the last one of the run, both within `LAST_RETIRE_S`."""
        try:
            async with asyncio.timeout(LAST_RETIRE_S):
                if self._pass is not None:
                    await self._pass
                if self.rule:
                    await self._retire()
        except TimeoutError:
            if self._retention is not None:
                self._retention.stopping.set()
            LEFTOVERS.failed("objects", self._log.names.root, f"their removal takes longer than {LAST_RETIRE_S:g} s")

    async def _retire(self) -> None:
        store, names, policies = self._log.store, self._log.names, self._parts.policies
        newest, oldest, step = policies.desired, policies.oldest_in_use(), self._parts.book.step
        epoch, lease = self._parts.context.epoch, self._parts.context.lease
        if self._retention is not None:
            self._retention.stopping.clear()

        def may_write() -> bool:
            return lease.may_write and latest_epoch(store, names, epoch.role) == epoch.number

        def work() -> None:
            if self._retention is None:
                first, by = load_origin(store, names).base_step, f"{epoch.role}, epoch {epoch.number}"
                self._retention = Retention(store, names, first=first, by=by, may_write=may_write)
            view = RunNeeds(
                next_step=step,
                checkpoints=list(list_checkpoints(store, names)),
                newest_policy=None if newest is None else (newest.lineage, newest.version),
                oldest_in_use=oldest,
            )
            self._retention.run(self.rule, view)

        try:
            await asyncio.to_thread(work)
        except MillraceError as error:  # the store is fuller for it, which ends no run
            LEFTOVERS.failed("objects", names.root, str(error))

    async def newest_checkpoint(self) -> int:
        """Return the step of the newest durable checkpoint; 0 if there is none."""
        return await asyncio.to_thread(self._newest_checkpoint)

    async def archive_events(self) -> None:
        """Copy new events to the store every `ARCHIVE_S`; while the store is away, try again. Raise LogGoneError."""
        # unregistered wait: a periodic look; what it awaits is registered where it is awaited
        while True:
            await asyncio.sleep(ARCHIVE_S)
            try:
                await self._archive.archive()
            except LogGoneError:
                raise
            except (UnavailableError, CapacityError) as error:
                logger.warning("events not archived, trying again", extra={"error": str(error)})

    async def archive_now(self) -> None:
        """Copy every event that was written so far to the store.

        Damaged entries among them are reported and removed.
        """
        await self._parts.context.events.flush()
        await self._archive.archive()
        if await self._parts.damage.tell():  # damage among these is reported by events, which have to be copied as well
            await self._parts.context.events.flush()
            await self._archive.archive()

    async def seal(self, state: str) -> None:
        """Do the last pass of retention, then write the seal of the run, which has ended in `state`.

        All events have to be archived before. A failure is logged: a later look seals the run (`Sealer`).
        """
        await self.retire_last()
        store, names, writer = self._log.store, self._log.names, self._parts.writer
        by = f"{self._parts.context.epoch.role}, epoch {self._parts.context.epoch.number}"
        try:
            key = names.seal(writer.num_reopened)
            await asyncio.to_thread(write_seal, store, names, key, writer.known, chain=writer.chain, state=state, by=by)
        except MillraceError as error:
            logger.warning("run not sealed, trying again later", extra={"uid": names.uid, "error": str(error)})

    async def archive_last(self) -> None:
        """Copy the last events to the store within `LAST_ARCHIVE_S`, as this process stops.

        The successor copies the rest.
        """
        try:
            async with asyncio.timeout(LAST_ARCHIVE_S):
                await self.archive_now()
        except (MillraceError, TimeoutError) as error:
            logger.warning("last events not archived", extra={"error": str(error)})

    def _newest_checkpoint(self) -> int:
        prefix = self._log.names.checkpoints
        manifests = (info.key for info in self._log.store.list(prefix) if info.key.endswith("/manifest.json"))
        steps = (key.removeprefix(prefix).partition("/")[0] for key in manifests)
        return max((int(step) for step in steps if step.isdecimal()), default=0)
