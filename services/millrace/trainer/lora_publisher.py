"""Publishes a run that trains adapters: version 0 in full, every later one as an adapter on it.

An adapter is a few megabytes, so it is gathered, and written before the next step begins.
"""

import time
from dataclasses import asdict
from typing import Any

from millrace.errors import CorruptObjectError
from millrace.policies.adapter import AdapterSpec
from millrace.policies.fetch import read_manifest
from millrace.policies.manifest import AdapterEntry, PolicyManifest, manifest_key
from millrace.policies.publish import publish_policy
from millrace.telemetry import faults
from millrace.telemetry.faults import Point
from millrace.trainer.model import policy_tensors, probe
from millrace.trainer.publisher import Publisher


class AdapterPublisher(Publisher):
    """Every rank of a gang calls it. `base_digest` is that of the frozen weights."""

    def __init__(self, *args: Any, adapter: AdapterSpec, base_digest: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._adapter = adapter
        self._base_digest = base_digest
        self._base: AdapterEntry | None = None

    def publish(self, version: int) -> float:
        """See `Publisher.publish`."""
        if version == 0:
            return super().publish(version)
        if version < self._plan.first_version:
            return 0.0
        began = time.monotonic()
        if self._base is None:  # before the first adapter, once for each start of the trainer
            self._base = self._find_base()
        probed = probe(self._model, vocabulary=self._vocabulary, device=self._gang.device)
        tensors = list(policy_tensors(self._model, dtype=self._dtype, version=version))  # collective
        if self._log_client is None:
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
            adapter=self._base,
        )
        faults.reach(Point.TRAINER_AFTER_MANIFEST, version=version)
        seconds = time.monotonic() - began
        self._announce(self._log_client, published, seconds)
        return seconds

    def _find_base(self) -> AdapterEntry:
        """What adapters say of their base: version 0, or, in a fork, which has none, a copy that is written now."""
        tensors = policy_tensors(self._model, dtype=self._dtype, version=0)  # collective where it is consumed
        key = manifest_key(self._names.prefix, self._names.uid, lineage=0, version=0)
        exists = self._gang.broadcast(bytes([self._store.head(key) is not None]) if self._gang.is_leader else None)
        manifest: PolicyManifest | None = None
        if exists[0]:
            manifest = read_manifest(self._store, key) if self._gang.is_leader else None
        else:
            held = list(tensors)
            if self._log_client is not None:
                uid = f"{self._names.uid}/base"  # a place of its own: what lies under policies/ is announced
                manifest = publish_policy(
                    self._store,
                    prefix=self._names.prefix,
                    uid=uid,
                    lineage=0,
                    version=0,
                    epoch=self._log_client.epoch,
                    tensors=held,
                    files=self._files,
                ).manifest
        if manifest is not None and manifest.digest != self._base_digest:
            raise CorruptObjectError(
                f"the base of run {self._names.uid} has digest {manifest.digest} as published, and this trainer's "
                f"base has {self._base_digest}",
                reason="POLICY_BASE_DIFFERS",
                remedy="give the trainer the model that the run began with, under trainer.model.name",
            )
        return AdapterEntry(
            **asdict(self._adapter),
            base_key="" if manifest is None else manifest.key,
            base_digest=self._base_digest,
            base_bytes=0 if manifest is None else manifest.full_bytes,
        )
