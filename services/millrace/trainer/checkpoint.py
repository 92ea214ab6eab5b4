"""Checkpoints: checkpoint k is the state that is version k; the next batch is k.

    checkpoints/{step:08d}/e{epoch}-{nonce}/…    shards of parameters, optimizer state and random state
    checkpoints/{step:08d}/manifest.json         written last and create-only: its existence is the commit

The manifest carries the chain hash H(step - 1), so that a resumed trainer proves that the batches it reads next follow
those that the state was trained on, and the conditions (world size, threads, versions) that strict determinism needs.
"""

import contextlib
import hashlib
import json
import platform
import secrets
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import millrace
from millrace.config.shared import CheckpointConfig
from millrace.errors import ConflictError, CorruptObjectError, InvalidStateError
from millrace.runlog.names import Names
from millrace.storage.base import ObjectStore
from millrace.storage.scratch import owned_directory
from millrace.telemetry import faults, logging
from millrace.telemetry.faults import Point
from millrace.trainer.agreement import agreed
from millrace.trainer.distributed import Gang
from millrace.trainer.shards import METADATA_FILE, load_shards, needed_files, save_shards

log = logging.getLogger(__name__)

FORMAT = 1
_MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointObject:
    """One file of a checkpoint: its name in the directory, where it lies, and what its bytes are."""

    name: str
    key: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointManifest:
    """What a checkpoint is: version `step` of lineage `lineage`, after the batches that `chain_hash` (hex) proves.

    `base_digest` is that of the base model where the state is that of adapters on it, else empty.
    """

    format: int
    run_uid: str
    run_hash: str
    step: int
    lineage: int
    chain_hash: str
    epoch: int
    world_size: int
    determinism: str
    conditions: dict[str, str]
    objects: tuple[CheckpointObject, ...]
    created: str
    base_digest: str = ""

    @property
    def size_bytes(self) -> int:
        """Bytes of all objects."""
        return sum(item.size_bytes for item in self.objects)

    def to_bytes(self) -> bytes:
        """Canonical JSON."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes, *, source: str) -> "CheckpointManifest":
        """Parses a manifest; CorruptObjectError naming `source` if it is damaged or too new."""
        try:
            raw: dict[str, Any] = json.loads(data)
            if raw["format"] != FORMAT:
                raise ValueError(f"its format is {raw['format']} and this version reads {FORMAT}")
            manifest = cls(**{**raw, "objects": tuple(CheckpointObject(**item) for item in raw["objects"])})
            if len(bytes.fromhex(manifest.chain_hash)) != 32:
                raise ValueError("its chain hash is not 32 bytes")
            if any("/" in item.name for item in manifest.objects):
                raise ValueError("a file name is not a plain name")
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptObjectError(
                f"checkpoint manifest {source} is not readable: {error}",
                reason="CHECKPOINT_MANIFEST_INVALID",
                remedy="delete this checkpoint; the run then resumes from the one before",
            ) from error
        return manifest


def conditions() -> dict[str, str]:
    """What bit-exactness depends on besides the log: versions, threads, instruction set."""
    return {
        "millrace": millrace.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "num_threads": str(torch.get_num_threads()),
    }


class CheckpointStore:
    """The checkpoints of one run in the object store."""

    def __init__(self, store: ObjectStore, names: Names, *, gang: Gang) -> None:
        self._store = store
        self._names = names
        self._gang = gang

    def newest(self, *, at_most: int | None = None) -> CheckpointManifest | None:
        """The manifest with the highest step (not above `at_most`), or None."""
        for prefix in sorted(self._store.list_prefixes(self._names.checkpoints), reverse=True):
            if at_most is not None and _step_of(prefix) > at_most:
                continue
            if self._store.head(prefix + _MANIFEST) is not None:
                return self._read(prefix + _MANIFEST)
        return None  # prefixes without a manifest are uploads that were never committed

    def steps(self) -> Iterator[int]:
        """Steps with a committed checkpoint, ascending."""
        for prefix in self._store.list_prefixes(self._names.checkpoints):
            if self._store.head(prefix + _MANIFEST) is not None:
                yield _step_of(prefix)

    def uri(self, step: int) -> str:
        """Where the manifest of a step lies."""
        return self._store.uri(self._names.checkpoint(step) + _MANIFEST)

    def save(
        self,
        state: dict[str, torch.Tensor],
        *,
        step: int,
        lineage: int,
        chain_hash: bytes,
        run_hash: str,
        epoch: int,
        determinism: str,
        base_digest: str = "",
    ) -> CheckpointManifest:
        """Writes and commits a checkpoint; one that exists and follows the same batches is returned as it is.

        ConflictError if the one that exists is of another history or config. Collective in a gang.
        Every rank uploads its own files; rank 0 collects their hashes and writes the manifest when all are there.
        """
        key = self._names.checkpoint(step) + _MANIFEST
        exists = self._gang.broadcast(bytes([self._store.head(key) is not None]) if self._gang.is_leader else None)
        if exists[0]:
            return self._existing(key, chain_hash=chain_hash, run_hash=run_hash)
        nonce = self._gang.broadcast(secrets.token_hex(6).encode() if self._gang.is_leader else None).decode()
        objects = self._upload(state, step=step, base=f"{self._names.checkpoint(step)}e{epoch:08d}-{nonce}/")
        manifest = CheckpointManifest(
            format=FORMAT,
            run_uid=self._names.uid,
            run_hash=run_hash,
            step=step,
            lineage=lineage,
            chain_hash=chain_hash.hex(),
            epoch=epoch,
            world_size=self._gang.world_size,
            determinism=determinism,
            conditions=conditions(),
            objects=objects,
            created=datetime.now(UTC).isoformat(timespec="milliseconds"),
            base_digest=base_digest,
        )
        if self._gang.is_leader and not self._store.create(key, manifest.to_bytes()):
            # Another writer committed the same step first; our objects are collected later.
            manifest = self._existing(key, chain_hash=chain_hash, run_hash=run_hash)
        self._gang.barrier()
        return manifest

    def load(self, manifest: CheckpointManifest, state: dict[str, torch.Tensor]) -> None:
        """Fills `state` in place from a checkpoint; all that this rank reads is verified. Collective in a gang."""
        with contextlib.ExitStack() as owned:
            with agreed(self._gang):
                directory = owned.enter_context(owned_directory("checkpoint"))
                self._fetch(manifest, {METADATA_FILE}, directory)
                self._fetch(manifest, needed_files(state, directory), directory)
            load_shards(state, directory, is_alone=self._gang.is_alone)
            self._gang.barrier()

    def prune(self, config: CheckpointConfig) -> list[int]:
        """Deletes checkpoints that the config does not keep; returns their steps. Manifests go first."""
        steps = list(self.steps())
        if config.keep_last is None:
            return []
        kept = set(steps[-config.keep_last :])
        if config.keep_interval:
            kept |= {step for step in steps if step % config.keep_interval == 0}
        dropped = [step for step in steps if step not in kept]
        for step in dropped:
            self._store.delete(self._names.checkpoint(step) + _MANIFEST)
            for item in list(self._store.list(self._names.checkpoint(step))):
                self._store.delete(item.key)
        return dropped

    def _fetch(self, manifest: CheckpointManifest, names: Collection[str], directory: Path) -> None:
        """Downloads the files of these names, and verifies them."""
        for item in manifest.objects:
            if item.name not in names:
                continue
            path = directory / item.name
            self._store.get_file(item.key, path)
            if (found := _file_sha256(path)) != item.sha256:
                raise CorruptObjectError(
                    f"checkpoint object {self._store.uri(item.key)} has sha256 {found}, "
                    f"its manifest says {item.sha256}",
                    reason="CHECKPOINT_HASH_MISMATCH",
                    remedy="it is damaged: delete this checkpoint; the run then resumes from the one before",
                )

    def _upload(self, state: dict[str, torch.Tensor], *, step: int, base: str) -> tuple[CheckpointObject, ...]:
        """Saves to a temporary directory and uploads this rank's files; returns all ranks' objects at rank 0."""
        with contextlib.ExitStack() as owned:
            with agreed(self._gang):
                # Of each rank's own, so that it holds only what this rank wrote, also where ranks share a machine.
                shards = owned.enter_context(owned_directory("checkpoint")) / "shards"
            save_shards(state, shards, is_alone=self._gang.is_alone)
            mine: list[CheckpointObject] = []
            with agreed(self._gang):
                for path in sorted(shards.iterdir()):
                    key = base + path.name.lstrip(".")
                    self._store.put_file(key, path)
                    faults.reach(Point.TRAINER_MID_CHECKPOINT, step=step)
                    sha256, size_bytes = _file_sha256(path), path.stat().st_size
                    mine.append(CheckpointObject(name=path.name, key=key, sha256=sha256, size_bytes=size_bytes))
        gathered = self._gang.gather(json.dumps([asdict(item) for item in mine]).encode())
        return tuple(CheckpointObject(**item) for part in gathered for item in json.loads(part))

    def _existing(self, key: str, *, chain_hash: bytes, run_hash: str) -> CheckpointManifest:
        """The committed manifest, if it is of the history that this trainer was trained on."""
        manifest = self._read(key)
        expected = {"chain_hash": chain_hash.hex(), "run_hash": run_hash}
        wrong = {name: [found, ours] for name, ours in expected.items() if (found := getattr(manifest, name)) != ours}
        if wrong:
            raise ConflictError(
                f"checkpoint {manifest.step} of run {manifest.run_uid} exists with another history (found, expected): "
                f"{json.dumps(wrong)}",
                reason="CHECKPOINT_CONFLICT",
                remedy=f"two trainers disagree: find out which log is the run's, then delete {self._store.uri(key)} "
                "if it is not that one's",
            )
        return manifest

    def _read(self, key: str) -> CheckpointManifest:
        return CheckpointManifest.from_bytes(self._store.get(key), source=self._store.uri(key))


def _step_of(prefix: str) -> int:
    """The step that a checkpoint's prefix names."""
    return int(prefix.rstrip("/").rpartition("/")[2])


def _file_sha256(path: Path) -> str:
    """sha256 of a file, hex, without holding it in memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_same_conditions(manifest: CheckpointManifest, *, world_size: int, run_hash: str) -> None:
    """InvalidStateError if a strict resume would not be bit-exact, naming every condition that differs."""
    now = {**conditions(), "world_size": str(world_size), "run_hash": run_hash}
    then = {**manifest.conditions, "world_size": str(manifest.world_size), "run_hash": manifest.run_hash}
    differing = [f"{name} was {then.get(name)}, is {value}" for name, value in now.items() if then.get(name) != value]
    if differing:
        raise InvalidStateError(
            f"checkpoint {manifest.step} of run {manifest.run_uid} cannot be continued bit for bit: "
            + "; ".join(differing),
            reason="CHECKPOINT_CONDITIONS_DIFFER",
            remedy='resume under the same conditions, or set trainer.determinism = "best_effort" in a new run',
        )


def require_same_base(manifest: CheckpointManifest, *, base_digest: str) -> None:
    """InvalidStateError if the checkpoint's adapters are on another base model, or it is not of the same kind."""
    if manifest.base_digest == base_digest:
        return
    then, now = (
        f"adapters on a base of digest {d}" if d else "all weights" for d in (manifest.base_digest, base_digest)
    )
    raise InvalidStateError(
        f"checkpoint {manifest.step} of run {manifest.run_uid} holds {then}, and this trainer trains {now}",
        reason="CHECKPOINT_BASE_DIFFERS",
        remedy="give the trainer the model that the run began with, under trainer.model.name and in the same formats",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """What was saved, where, and how long it took."""

    uri: str
    size_bytes: int
    seconds: float
    manifest_sha256: str


class Checkpointer:
    """Saves at the interval, at the end and on request, and prunes."""

    def __init__(
        self,
        checkpoints: CheckpointStore,
        config: CheckpointConfig | None,
        *,
        gang: Gang,
        run_hash: str,
        epoch: int,
        determinism: str,
        base_digest: str = "",
    ) -> None:
        self._checkpoints = checkpoints
        self._config = config
        self._gang = gang
        self._facts = {"run_hash": run_hash, "epoch": epoch, "determinism": determinism, "base_digest": base_digest}

    @property
    def is_enabled(self) -> bool:
        """Whether the run has checkpoints at all."""
        return self._config is not None

    def is_due(self, step: int) -> bool:
        """Whether the interval asks for a checkpoint of version `step`."""
        return self._config is not None and self._config.interval is not None and step % self._config.interval == 0

    def save(self, state: dict[str, torch.Tensor], *, step: int, lineage: int, chain_hash: bytes) -> SavedCheckpoint:
        """Saves version `step` and prunes. Collective in a gang."""
        began = time.monotonic()
        manifest = self._checkpoints.save(state, step=step, lineage=lineage, chain_hash=chain_hash, **self._facts)
        if self._gang.is_leader and self._config is not None:
            for dropped in self._checkpoints.prune(self._config):
                log.info("checkpoint deleted", extra={"step": dropped})
        saved = SavedCheckpoint(
            uri=self._checkpoints.uri(step),
            size_bytes=manifest.size_bytes,
            seconds=time.monotonic() - began,
            manifest_sha256=hashlib.sha256(manifest.to_bytes()).hexdigest(),  # canonical: the stored bytes
        )
        log.info("checkpoint saved", extra={"step": step, "seconds": round(saved.seconds, 3), "uri": saved.uri})
        return saved
