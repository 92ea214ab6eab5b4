"""A run that is sealed and attested, to be tampered with: what it consists of, and how every hash of it is redone."""

import asyncio
import functools
import hashlib
import json
import os
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path

from millrace.internal.v1 import batch_pb2
from millrace.policies.fetch import prove_policies
from millrace.readers.audit import AuditRanges, Depth, audit_run
from millrace.rollouts.batch_wire import decode_header
from millrace.runlog import RunLog, chain_hash, open_redis
from millrace.runlog.attest import Attestation, SigningKey, load_key, unsigned, write_attestation
from millrace.runlog.catalogue import ObjectKind, kind_at
from millrace.runlog.names import Deployment, Names, new_uid
from millrace.runlog.records.known import describe
from millrace.runlog.records.numbered import create_epoch
from millrace.runlog.records.run_record import load_origin
from millrace.runlog.retention import RetentionRule
from millrace.storage import ObjectStore
from millrace.storage.base import with_checksum
from millrace.storage.local import LocalStore
from millrace.trainer.checkpoint.index import differences
from millrace.v1 import audit_pb2
from millrace_testing.runlog.recorded_log import record

STEPS = 12
RANGE_STEPS = 3  # so that the twelve steps have borders
CHECKPOINTS = (5, 10, STEPS)
RULES = {9: RetentionRule(batches=2), 10: RetentionRule(batches=2, policies=2)}
PREFIX = "tampered"


class UndoStore(LocalStore):
    """A store that takes back what was written to it."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._before: dict[str, bytes | None] = {}

    def create(self, key: str, data: bytes) -> bool:
        self._note(key)
        return super().create(key, data)

    def put(self, key: str, data: bytes) -> None:
        self._note(key)
        super().put(key, data)

    def delete(self, key: str) -> None:
        self._note(key)
        super().delete(key)

    def undo(self) -> None:
        for key, data in self._before.items():
            if data is None:
                super().delete(key)
            else:
                super().put(key, data)
        self._before.clear()

    def _note(self, key: str) -> None:
        if key not in self._before:
            self._before[key] = self.get(key) if self.head(key) is not None else None


def findings(report: audit_pb2.AuditReport) -> audit_pb2.AuditReport:
    """Return a copy of a report whose findings are in an order of their own."""
    copy = audit_pb2.AuditReport()
    copy.CopyFrom(report)
    for found in (copy.violations, copy.notes, copy.not_seen):
        found.sort(key=lambda each: (each.check, each.message))
    return copy


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A recorded run in a store of its own, another run beside it, and what is kept elsewhere."""

    directory: Path
    names: Names
    other: Names
    key: SigningKey
    kept: Attestation

    @functools.cached_property
    def store(self) -> UndoStore:
        return UndoStore(self.directory)

    def copy(self, directory: Path) -> "Scene":
        """Return a copy to tamper with. The files are shared: a store replaces files, and writes into none."""
        shutil.copytree(self.directory, directory, copy_function=os.link)
        return replace(self, directory=directory)

    def files(self) -> dict[Path, bytes]:
        """Return the bytes of every object, read directly from the files."""
        paths = (path for path in self.directory.rglob("*") if path.is_file())
        return {path.relative_to(self.directory): path.read_bytes() for path in paths}

    def audit(self, how: str) -> audit_pb2.AuditReport:
        depth = {
            "fast": Depth(),
            "deep": Depth(is_deep=True, prove=prove_policies, compare=differences),
            "attested": Depth(key=self.key, attestations=(self.kept,)),
        }[how]
        now = time.time() + 7200

        def audited(ranges: AuditRanges | None) -> audit_pb2.AuditReport:
            work = audit_run(
                None, self.store, prefix=PREFIX, uid=self.names.uid, depth=depth, clock=lambda: now, ranges=ranges
            )
            return asyncio.run(work)

        report = audited(None)
        if how == "fast":
            ranged = audited(AuditRanges(store_url=self.directory.as_uri(), range_steps=RANGE_STEPS))
            assert findings(ranged) == findings(report), "who reads ranges of steps finds the same"
        return report


async def record_run(store: LocalStore, redis_url: str, name: str, uid: str, *, seed: int = 0) -> Names:
    redis = open_redis(redis_url)
    config = {"trainer": {"ckpt": {"interval": 5, "keep_last": None}}}
    text = json.dumps(config, sort_keys=True, separators=(",", ":"))
    run_json = {
        "uid": uid,
        "name": name,
        "config": config,
        "run_hash": hashlib.sha256(text.encode()).hexdigest(),
        "request_id": f"request-{name}",
        "kind": "RL",
        "create_time": "2026-01-01T00:00:00Z",
        "code_version": "0.1.0",
        "labels": {"a": "b"},
    }
    names = Names(PREFIX, uid)
    await redis.delete(*names.all_keys)
    log = await RunLog.create(redis, store, PREFIX, uid, json.dumps(run_json, sort_keys=True).encode())
    await create_epoch(store, names, "log", "rebuilder")
    store.create(names.generation(2), b"")
    store.create(Deployment(PREFIX).request_object(f"request-{name}"), uid.encode())
    await record(
        log, redis, store, steps=STEPS, checkpoints=CHECKPOINTS, seed=seed, scored=True, name=name, rules=RULES
    )
    await redis.delete(*names.all_keys)
    await redis.aclose()
    return names


def record_scene(directory: Path, redis_url: str) -> Scene:
    """Record the run that most tests tamper with, and another one, both sealed and attested.

    The store is below `directory`.
    """
    store = LocalStore(directory / "store")
    names = asyncio.run(record_run(store, redis_url, "demo", new_uid()))
    other = asyncio.run(record_run(store, redis_url, "other", new_uid(), seed=1))
    (directory / "key").write_bytes(b"k" * 32)
    key = load_key(directory / "key")
    for each in (other, names):
        last = decode_header(store.get(each.batch_header(STEPS)))
        chain = chain_hash(last.previous_chain_hash, store.get(each.batch_header(STEPS)))
        draft = unsigned(
            each, run="demo", step=STEPS, chain=chain, seal_sha256=hashlib.sha256(store.get(each.seal(0))).hexdigest()
        )
        kept = write_attestation(store, each, draft, key)
    return Scene(directory=directory / "store", names=names, other=other, key=key, kept=kept)


# What there is to tamper with.


def objects(store: ObjectStore, names: Names) -> dict[ObjectKind, list[str]]:
    """Return the keys of all objects of a run, by their kind."""
    found: dict[ObjectKind, list[str]] = {}
    for info in store.list(names.root):
        kind = kind_at(info.key.removeprefix(names.root))
        assert kind is not None, info.key
        found.setdefault(kind, []).append(info.key)
    return found


def first(store: LocalStore, prefix: str, ending: str = "") -> str:
    return next(info.key for info in store.list(prefix) if info.key.endswith(ending))


def last(store: LocalStore, prefix: str, ending: str = "") -> str:
    return [info.key for info in store.list(prefix) if info.key.endswith(ending)][-1]


def read_header(store: LocalStore, names: Names, step: int) -> batch_pb2.BatchHeader:
    return decode_header(store.get(names.batch_header(step)))


def rehash(scene: Scene) -> None:
    """Recompute every hash in manifests, headers and checkpoints; events, seal and attestation stay."""
    store, names = scene.store, scene.names

    def is_kept(key: str) -> bool:
        return bool(key) and store.head(key) is not None

    def hashes(key: str) -> None:
        manifest = json.loads(store.get(key))
        named = [item for each in manifest.get("encodings", ()) for item in each["objects"]]
        for item in (*named, *manifest.get("files", ()), *manifest.get("objects", ())):
            if is_kept(item["key"]):
                item["sha256"] = hashlib.sha256(store.get(item["key"])).hexdigest()
        store.put(key, canonical(manifest))

    for info in list(store.list(names.policies)):
        if info.key.endswith("manifest.json"):
            hashes(info.key)
    chain = load_origin(store, names).chain_hash
    chains: dict[int, bytes] = {}
    for step in range(STEPS + 1):
        header = read_header(store, names, step)
        for chunk in header.chunks if is_kept(header.rollouts_key) else ():
            chunk.sha256 = hashlib.sha256(store.get(chunk.key)).digest()
        if is_kept(header.rollouts_key):
            header.rollouts_sha256 = hashlib.sha256(store.get(header.rollouts_key)).digest()
        for item in header.objects:
            item.CopyFrom(describe(names, item.key, store.get(names.root + item.key)))
        header.previous_chain_hash = chain
        data = header.SerializeToString(deterministic=True)
        store.put(names.batch_header(step), data)
        chain = chains[step] = chain_hash(chain, data)
    for step in CHECKPOINTS:
        hashes(names.checkpoint_manifest(step))
        manifest = json.loads(store.get(names.checkpoint_manifest(step)))
        manifest["chain_hash"] = chains[step - 1].hex()
        store.put(names.checkpoint_manifest(step), canonical(manifest))


def canonical(manifest: dict) -> bytes:
    """Return a manifest as bytes; its checksum is computed again, if it has one."""
    if "checksum" in manifest:
        return with_checksum(manifest)
    return json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
