"""What a run's driver does besides the loop: policies in, watermarks and log instances out, Redis trimmed, events kept.

Each method is a background task of the driver and ends by cancellation.
"""

import asyncio
import logging

from millrace.backoff import Backoff
from millrace.errors import STORAGE_ERRORS, LogGoneError, MillraceError
from millrace.orchestrator.drive.assembly import RunParts
from millrace.runlog import reappend_committed
from millrace.runlog.event_archive import EventArchive
from millrace.runlog.records.numbered import latest_epoch
from millrace.runlog.records.run_record import list_checkpoints, load_origin
from millrace.runlog.redis.damage import checked_policy
from millrace.runlog.retention import Retention, RetentionRule, RunNeeds
from millrace.runlog.seal import write_seal
from millrace.telemetry import faults
from millrace.telemetry.leftovers import LEFTOVERS

logger = logging.getLogger(__name__)

PARALLEL_MANIFESTS = 16
"""Announced policies whose manifests are read from the store at once."""
LOG_LOOK_S = 2.0
"""How often Redis is asked which copy of the log it holds."""
WORKER_POLL_S = 5.0
WORKER_REST_S = 0.1
"""Shortest time between two looks at changed workers: while a fleet joins, each look is for many of them."""
TRIM_S = 10.0
ARCHIVE_S = 10.0
"""How often new events go to the store: what a wiped Redis may lose of them at most."""
LAST_ARCHIVE_S = 3.0
RETIRE_S = 2.0
"""How often it is looked whether the run has grown so far that something is retired."""
LAST_RETIRE_S = 60.0
"""How long the seal of a run waits for what its retention still removes."""
REPORT_DAMAGE = Backoff(1.0, 60.0)
"""Pauses between two reports of damaged entries; one event has all that were met meanwhile."""


class Housekeeper:
    """Keeps the copies of a run's log in step, and its workers informed."""

    def __init__(self, parts: RunParts) -> None:
        """Make the housekeeper of a driven run; nothing of it works before its methods are awaited."""
        self._parts = parts
        self._log = parts.context.log
        self._generation = parts.context.log.generation
        self._archive = EventArchive(
            parts.context.log,
            on_damaged=parts.damage.note,
            # No bound method of `known`: `BatchWriter.restore` replaces that object.
            on_written=lambda key: parts.writer.known.announce(key),
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
        """Append the committed batches that Redis lacks, and pass the workers the id of the copy of the log that
        Redis holds.
        """
        # Before the appends: if Redis restarts during them, `watch_log` sees another instance and appends again.
        self.log_instance = await self._log.read_instance()
        self._parts.context.registry.set_log_instance(self._log.uid, self.log_instance)
        await reappend_committed(self._log, self._parts.context.epoch)

    async def watch_log(self) -> None:
        """Look every `LOG_LOOK_S` whether Redis restarted, and append again what it then lacks; until cancelled.

        A restart may have lost the newest entries. Raises LogGoneError when the log is gone, or was rebuilt as another
        generation: the next driver of the run begins on that one.
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
        """Bring the copy `instance` of the log, which Redis holds now, up to date, and read its streams again.

        Batches are appended from the store; env-servers and the trainer append what it lacks of theirs. Writes an
        event.
        """
        self._parts.context.registry.set_log_instance(self._log.uid, instance)
        count = await reappend_committed(self._log, self._parts.context.epoch)
        # Env-servers append what this copy of the stream lacks, and it is read again.
        if self._parts.intake.has_begun:
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
        """Make each version of the policy stream the one to serve, if its manifest in the store confirms it.

        It ends by cancellation. The next header of the run names the manifest, and has at least the lineage of the
        version.
        """
        while True:
            rewinds = self._policy_rewinds
            cursor = self._policy_cursor
            entries = await self._log.read("policies", after=cursor, count=PARALLEL_MANIFESTS, block_s=5.0)
            # At once: after a takeover there may be a thousand, and the store may be far away.
            policies = await asyncio.gather(*(checked_policy(self._log, entry) for entry in entries))
            # Another copy of the stream came while this was read, and is read from its beginning.
            if rewinds != self._policy_rewinds or not entries:
                continue
            self._policy_cursor = entries[-1].id
            for policy in filter(None, policies):
                self._parts.policies.publish(policy)
                self._parts.writer.known.announce(policy.manifest_key.removeprefix(self._log.names.root))
                self._parts.writer.lineage = max(policy.lineage, self._parts.writer.lineage)

    async def remove_damaged(self) -> None:
        """Report damaged entries and remove them from Redis, until cancelled.

        Env-servers append again what the log then lacks.

        Pauses between two reports grow while damage keeps coming.
        """
        num_removed = num_met = 0
        # unregistered wait: a periodic look; what it awaits is registered where it is awaited
        while True:
            # The event log is for people: damage that keeps coming is reported less and less often.
            await asyncio.sleep(REPORT_DAMAGE.after(1 + num_met))
            num_met = num_met + 1 if await self._parts.damage.report() else 0
            if self._parts.damage.num_rollouts != num_removed:
                num_removed = self._parts.damage.num_rollouts
                # As if it were another copy of the log.
                await self._parts.envs.playing(f"{self.log_instance}~{num_removed}")

    async def watch_workers(self) -> None:
        """Pass workers the watermark, open environments on env-servers that joined, and wake the loop, until cancelled.

        It is done at every change of workers, and every `WORKER_POLL_S`.
        """
        parts = self._parts
        # unregistered wait: a periodic look; what it awaits is registered where it is awaited
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
            # After the first change, and before the next one is looked at.
            await asyncio.sleep(WORKER_REST_S)

    async def trim_consumed(self) -> None:
        """Remove from Redis, every `TRIM_S` until cancelled, the batches and announcements that the newest policy has
        used.

        The store keeps them.
        """
        trimmed = 0
        # unregistered wait: a periodic look; what it awaits is registered where it is awaited
        while True:
            await asyncio.sleep(TRIM_S)
            newest = self._parts.policies.desired
            if newest is not None and newest.version > trimmed:
                await self._log.trim_consumed(newest.version)
                faults.reach(faults.Point.ORCHESTRATOR_BATCHES_TRIMMED, step=newest.version)
                trimmed = newest.version

    async def retire(self) -> None:
        """Remove what the run's retention rule no longer keeps, each time the run has grown by the rule's stride, until
        cancelled.

        What cannot be removed is tried again in the next pass. If cancelled, the pass in progress is stopped, too.
        """
        seen = -1
        # unregistered wait: a periodic look; what it awaits is registered where it is awaited
        while True:
            await asyncio.sleep(RETIRE_S)
            if self.rule and self._parts.book.step >= seen + self.rule.stride:
                seen = self._parts.book.step
                # Shielded: removals run in a thread that a cancellation would not stop, and `stopping` is what ends it.
                self._pass = asyncio.create_task(self._retire())
                try:
                    await asyncio.shield(self._pass)
                except asyncio.CancelledError:
                    if self._retention is not None:
                        self._retention.stopping.set()
                    raise

    async def retire_last(self) -> None:
        """Wait for the pass of retention in progress, then do the run's last one, both within `LAST_RETIRE_S`.

        A pass that takes longer is stopped, and what it leaves is recorded as a leftover.
        """
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
        """Do one pass of retention in a thread; a failure is recorded as a leftover and raises nothing."""
        store, names, policies = self._log.store, self._log.names, self._parts.policies
        newest, oldest, step = policies.desired, policies.oldest_in_use(), self._parts.book.step
        epoch, lease = self._parts.context.epoch, self._parts.context.lease
        if self._retention is not None:
            self._retention.stopping.clear()

        def may_write() -> bool:
            """Return whether this driver still holds the run's lease and epoch."""
            # The store is asked too: the lease is in Redis, and a paused process may hold an old answer.
            return lease.may_write and latest_epoch(store, names, epoch.role) == epoch.number

        def work() -> None:
            """Remove what the retention rule does not keep, seen from the run's step and policies at the call
            (blocking).
            """
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
        """Return the step of the newest checkpoint in the store; 0 if there is none."""
        return await asyncio.to_thread(self._newest_checkpoint)

    async def archive_events(self) -> None:
        """Copy new events to the store every `ARCHIVE_S`; of those, Redis keeps the newest (`KEPT_EVENTS`).

        It ends by cancellation. An outage of the store is logged and tried again. Raises LogGoneError if Redis lost the
        log.
        """
        # unregistered wait: a periodic look; what it awaits is registered where it is awaited
        while True:
            await asyncio.sleep(ARCHIVE_S)
            try:
                await self._archive.archive()
                await self._archive.trim()
            except LogGoneError:
                raise
            except STORAGE_ERRORS as error:
                logger.warning("events not archived, trying again", extra={"error": str(error)})

    async def archive_now(self) -> None:
        """Copy every event that was written so far to the store; of these, Redis keeps the newest (`KEPT_EVENTS`).

        Damaged entries among them are reported and removed.
        """
        await self._parts.context.events.flush()
        await self._archive.archive()
        # Damage among these is reported by events, which have to be copied as well.
        if await self._parts.damage.report():
            await self._parts.context.events.flush()
            await self._archive.archive()
        await self._archive.trim()

    async def seal(self, state: str) -> None:
        """Do the last pass of retention, then write the seal of the run, which has ended in `state` (such as
        `SUCCEEDED`).

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
        """Return the step of the newest checkpoint with a manifest in the store (blocking); 0 if there is none."""
        prefix = self._log.names.checkpoints
        manifests = (info.key for info in self._log.store.list(prefix) if info.key.endswith("/manifest.json"))
        steps = (key.removeprefix(prefix).partition("/")[0] for key in manifests)
        return max((int(step) for step in steps if step.isdecimal()), default=0)
