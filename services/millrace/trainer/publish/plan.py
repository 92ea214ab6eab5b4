"""The lineage under which a trainer publishes, the first version, where to publish, and republishing of damage."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from millrace.config.sections.trainer import PolicyConfig
from millrace.decoding import decode_message
from millrace.internal.v1.policy_pb2 import PolicyEntry
from millrace.policies.digest import decode_threads
from millrace.policies.share import LocalShareWriter, ShareWriter
from millrace.runlog.names import Names
from millrace.runlog.records.run_record import list_policies
from millrace.storage.base import ObjectStore
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.publish.executor import Executor
from millrace.trainer.publish.share_process import ShareWriterProcess
from millrace.v1 import event_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishPlan:
    """The lineage under which to publish, and the first version to publish: earlier ones are not published again.

    Strict replays publish every version again, to have the digests compared. Best-effort replays skip published
    versions and begin a new lineage after them, because their weights may differ. `is_continued`: training starts with
    the version before the first, in the same lineage, so that the first can be a delta against it.
    """

    lineage: int
    first_version: int
    is_continued: bool = False


def plan_publishing(
    *,
    start_step: int,
    start_lineage: int,
    published: tuple[int, int] | None,
    is_strict: bool,
    is_relaid: bool = False,
    lineage_begins: int = 0,
) -> PublishPlan:
    """Return what a trainer publishes that starts with the weights of version `start_step` in `start_lineage`.

    `published` is the newest published (lineage, version), None without any. `is_strict` says whether equal steps give
    equal bits; `is_relaid` that a strict run goes on with another number of ranks, so that its bits differ from here
    on. The start lineage has no version below `lineage_begins`, though it may have checkpoints there.
    """
    if published is None or (is_strict and not is_relaid):
        # A resumed state may be older than its lineage. The versions up to there are another lineage's, and the log
        # refuses them of this one.
        return PublishPlan(lineage=start_lineage, first_version=max(start_step, lineage_begins))
    lineage, head = published
    if is_strict:
        return PublishPlan(lineage=max(lineage, start_lineage) + 1, first_version=max(head + 1, start_step))
    if head < start_step:
        return PublishPlan(lineage=max(lineage, start_lineage), first_version=start_step)
    if head == start_step and lineage == start_lineage:  # the start state is that version itself, not a replay of it
        return PublishPlan(lineage=lineage, first_version=head + 1, is_continued=True)
    return PublishPlan(lineage=max(lineage + 1, start_lineage), first_version=head + 1)


def newest_published(store: ObjectStore, names: Names) -> tuple[int, int] | None:
    """Return (lineage, version) of the newest committed policy: highest version, then highest lineage.

    None without any.
    """
    for version, lineage in reversed(list_policies(store, names)):
        if store.head(names.policy_manifest(lineage, version)) is not None:
            return lineage, version
    return None


def first_of_lineage(store: ObjectStore, names: Names, lineage: int) -> int:
    """Return the first version that a lineage may have: the one after all versions of earlier lineages.

    0 if there are none.
    """
    for version, other in reversed(list_policies(store, names)):
        if other < lineage and store.head(names.policy_manifest(other, version)) is not None:
            return version + 1
    return 0


# A policy that replicas found damaged is published again by the trainer, which has its weights.
#
#     replica: UPDATE_FAILED, is_damaged ──▶ orchestrator ──heartbeat──▶ trainer, between two steps or while it waits
#     for a batch: is it damaged? ──▶ in full, under fresh names, `manifest.r1.json` ──▶ replicas, at their next attempt
#
# Replicas are asked to load the newest version; the trainer that waits for the next batch has its weights.

logger = logging.getLogger(__name__)

DamageReport = tuple[PolicyEntry, int]
"""A policy that replicas could not read, and the number of reports so far."""


class Republisher:
    """Has a policy that replicas reported damaged published again: rank 0 reads the reports, every rank publishes."""

    def __init__(
        self,
        republish: Callable[[PolicyEntry], None],
        reported: Callable[[], DamageReport | None],
        raise_failure: Callable[[], None],
    ) -> None:
        """Publish damaged policies again with `republish`, which starts it in the background.

        `reported` returns the last report of damage, and `raise_failure` raises what publishing raised.
        """
        self._republish = republish
        self._reported = reported
        self._raise_failure = raise_failure
        self._num_heard = 0

    def policy_to_republish(self, version: int) -> bytes | None:
        """Return the encoded policy of a new report of damage if it is of `version`, whose weights are live; else None.

        Each report is returned once. Raises what publishing raised in the background: without the policy the awaited
        batch may never come.
        """
        self._raise_failure()
        report = self._reported()
        if report is None or report[1] == self._num_heard or report[0].version != version:
            return None
        self._num_heard = report[1]
        return report[0].SerializeToString()

    def republish(self, policy: bytes) -> None:
        """Start to publish the encoded policy again, in the background. Collective in a gang."""
        entry = decode_message(PolicyEntry, policy, what="a report of damage", reason="GANG_MESSAGE_INVALID")
        self._republish(entry)


def published_anew(name: str, *, damage: str, uri: str) -> event_pb2.Event:
    """Log a warning, and return its event, that a damaged version is published again.

    `name` is its lineage and version ("0-7"), `damage` says what was damaged, and `uri` is that of the new manifest.
    """
    message = f"policy {name} was damaged ({damage}) and is published anew, in full, as {uri}"
    logger.warning(message)
    return event_pb2.Event(warning=event_pb2.Warning(reason="POLICY_PUBLISHED_ANEW", message=message))


# Where a rank publishes a run's policies, and under which epoch.


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishTarget:
    """The run's place in the store, this rank's place in the gang, and the epoch that fences what it writes."""

    store: ObjectStore
    names: Names
    gang: Gang
    epoch: int | None
    """None at ranks other than 0, which commit nothing."""
    lineage: int = 0
    """The lineage whose versions are committed."""
    store_url: str = ""
    """URL of the store, for a publishing process; empty: a thread publishes, because a process could not open it."""
    executor: Executor = Executor.AUTO
    """Whether a thread or a process publishes."""

    def is_process(self, *, share_bytes: int) -> bool:
        """Return whether a separate process publishes a share of `share_bytes`, as executor and store URL allow."""
        return self.executor.is_process(share_bytes=share_bytes, store_url=self.store_url)

    def share_writer(self, config: PolicyConfig, *, is_process: bool) -> ShareWriter:
        """Make the object that compares, encodes and uploads this rank's share of versions.

        It works on the calling thread, or with `is_process` in a separate process that it starts.
        """
        skip_deltas = tuple(config.skip_deltas) if config.delta else ()
        threads = max(1, decode_threads() // self.gang.world_size)
        if not is_process:
            return LocalShareWriter(self.store, skip_deltas=skip_deltas, threads=threads)
        rank = None if self.gang.is_alone else self.gang.rank
        return ShareWriterProcess(
            self.store_url, skip_deltas=skip_deltas, threads=threads, run=self.names.uid, rank=rank
        )
