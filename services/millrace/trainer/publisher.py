"""Publishes the model's weights as policy versions and announces them in the log."""

import time
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from millrace.internal.v1 import policy_pb2
from millrace.policies.manifest import FileEntry
from millrace.policies.publish import PublishedPolicy, publish_policy
from millrace.runlog.names import Names
from millrace.storage.base import ObjectStore
from millrace.telemetry import faults, logging
from millrace.telemetry.faults import Point
from millrace.trainer.distributed import Gang
from millrace.trainer.model import policy_tensors, probe
from millrace.v1 import event_pb2

log = logging.getLogger(__name__)


class PolicyLog(Protocol):
    """Where versions are announced: the run's log, at rank 0."""

    @property
    def epoch(self) -> int:
        """The fencing epoch that this trainer holds."""
        ...

    def append_policy(self, entry: policy_pb2.PolicyEntry, *, is_replay: bool) -> None:
        """Appends to the policy stream."""
        ...

    def write_event(self, event: event_pb2.Event) -> None:
        """Appends to the event stream."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishPlan:
    """Under which lineage to publish, and from which version on: those before it stand as they were published.

    Strict replays publish every version again, to have the digests compared. Best-effort replays skip what is published
    and begin a new lineage behind it, because their weights may differ.
    """

    lineage: int
    first_version: int


def plan_publishing(
    *, start_step: int, start_lineage: int, published: tuple[int, int] | None, is_strict: bool
) -> PublishPlan:
    """The plan for a trainer that starts at version `start_step`; `published` is the newest (lineage, version)."""
    if is_strict or published is None:
        return PublishPlan(lineage=start_lineage, first_version=start_step)
    lineage, head = published
    if head < start_step:
        return PublishPlan(lineage=max(lineage, start_lineage), first_version=start_step)
    if head == start_step and lineage == start_lineage:  # the start state is that version itself, not a replay of it
        return PublishPlan(lineage=lineage, first_version=head + 1)
    return PublishPlan(lineage=max(lineage + 1, start_lineage), first_version=head + 1)


def newest_published(store: ObjectStore, names: Names) -> tuple[int, int] | None:
    """(lineage, version) of the newest committed policy: highest version, then highest lineage."""
    found: list[tuple[int, int]] = []
    for prefix in store.list_prefixes(names.policies):
        lineage, _, version = prefix.removeprefix(names.policies).rstrip("/").partition("-")
        found.append((int(version), int(lineage)))
    for version, lineage in sorted(found, reverse=True):
        if store.head(names.policy_manifest(lineage, version)) is not None:
            return lineage, version
    return None


class Publisher:
    """Turns the live model into version n; every rank of a gang calls it."""

    def __init__(
        self,
        model: nn.Module,
        *,
        store: ObjectStore,
        names: Names,
        gang: Gang,
        log_client: PolicyLog | None,
        files: tuple[FileEntry, ...],
        dtype: torch.dtype,
        vocabulary: int,
        plan: PublishPlan,
    ) -> None:
        self._model = model
        self._store = store
        self._names = names
        self._gang = gang
        self._log_client = log_client
        self._files = files
        self._dtype = dtype
        self._vocabulary = vocabulary
        self._plan = plan

    @property
    def lineage(self) -> int:
        """Lineage of what is published."""
        return self._plan.lineage

    def publish(self, version: int) -> float:
        """Publishes and announces the model's weights as `version`; returns the seconds it took."""
        if version < self._plan.first_version:
            return 0.0
        began = time.monotonic()
        probed = probe(self._model, vocabulary=self._vocabulary, device=self._gang.device)
        tensors = policy_tensors(self._model, dtype=self._dtype)
        if self._log_client is None:
            for _ in tensors:  # gathering is collective: the other ranks take part and drop the result
                pass
            return time.monotonic() - began
        published = publish_policy(
            self._store,
            prefix=self._names.prefix,
            uid=self._names.uid,
            lineage=self._plan.lineage,
            version=version,
            epoch=self._log_client.epoch,
            tensors=tensors,
            files=self._files,
            probe=probed,
        )
        faults.reach(Point.TRAINER_AFTER_MANIFEST, version=version)
        seconds = time.monotonic() - began
        self._announce(self._log_client, published, seconds)
        return seconds

    def _announce(self, log_client: PolicyLog, published: PublishedPolicy, seconds: float) -> None:
        manifest = published.manifest
        entry = policy_pb2.PolicyEntry(
            lineage=manifest.lineage,
            version=manifest.version,
            manifest_key=published.manifest_key,
            manifest_sha256=published.manifest_sha256,
            digest=manifest.digest,
        )
        log_client.append_policy(entry, is_replay=published.already_existed)
        if published.already_existed:
            log.info("policy proven equal to the published one", extra={"version": manifest.version})
            return
        body = event_pb2.PolicyPublished(
            lineage=manifest.lineage,
            version=manifest.version,
            size_bytes=published.size_bytes,
            seconds=seconds,
            uri=self._store.uri(published.manifest_key),
        )
        log_client.write_event(event_pb2.Event(policy_published=body))
        log.info(
            "policy published",
            extra={"lineage": manifest.lineage, "version": manifest.version, "seconds": round(seconds, 3)},
        )
