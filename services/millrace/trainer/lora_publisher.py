"""A run that trains adapters publishes version 0 in full, and every later one as an adapter on that."""

from dataclasses import asdict

import torch
from torch import nn

from millrace.errors import CorruptObjectError
from millrace.policies.adapter import AdapterSpec
from millrace.policies.fetch import read_manifest
from millrace.policies.manifest import AdapterEntry, FileEntry, PolicyManifest, manifest_key
from millrace.policies.publish import publish_policy
from millrace.runlog.names import Names
from millrace.storage.base import ObjectStore
from millrace.trainer.distributed import Gang
from millrace.trainer.model import policy_tensors


class AdapterBase:
    """What the adapters of a run are on: version 0. Every rank of a gang has one; `base_digest` is that of its weights.

    `epoch` is None at ranks other than 0.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        store: ObjectStore,
        names: Names,
        gang: Gang,
        epoch: int | None,
        files: tuple[FileEntry, ...],
        dtype: torch.dtype,
        adapter: AdapterSpec,
        base_digest: str,
    ) -> None:
        self._model = model
        self._store = store
        self._names = names
        self._gang = gang
        self._epoch = epoch
        self._files = files
        self._dtype = dtype
        self._adapter = adapter
        self._base_digest = base_digest
        self._entry: AdapterEntry | None = None

    def entry(self) -> AdapterEntry:
        """What an adapter's manifest says of it. Collective, and behind version 0, at the first call."""
        if self._entry is None:
            self._entry = self._find()
        return self._entry

    def _find(self) -> AdapterEntry:
        """What adapters say of their base: version 0, or, in a fork, which has none, a copy that is written now."""
        tensors = policy_tensors(self._model, dtype=self._dtype, version=0)  # collective where it is consumed
        key = manifest_key(self._names.prefix, self._names.uid, lineage=0, version=0)
        exists = self._gang.broadcast(bytes([self._store.head(key) is not None]) if self._gang.is_leader else None)
        manifest: PolicyManifest | None = None
        if exists[0]:
            manifest = read_manifest(self._store, key) if self._gang.is_leader else None
        else:
            held = list(tensors)
            if self._epoch is not None:
                uid = f"{self._names.uid}/base"  # a place of its own: what lies under policies/ is announced
                manifest = publish_policy(
                    self._store,
                    prefix=self._names.prefix,
                    uid=uid,
                    lineage=0,
                    version=0,
                    epoch=self._epoch,
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
