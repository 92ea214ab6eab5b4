"""A small run that is recorded as the services record one: three steps, a closing header, policies, events."""

import hashlib
import json
from dataclasses import dataclass, field

import numpy as np
import redis.asyncio as redis_asyncio

from millrace.internal.v1 import batch_pb2, policy_pb2
from millrace.rollouts.batch_wire import pack_batch
from millrace.rollouts.types import (
    PolicySpan,
    Purpose,
    Rollout,
    RolloutError,
    RolloutStatus,
    Sample,
    TrainSample,
)
from millrace.rollouts.wire import decode_archive, encode_archive, encode_rollout
from millrace.runlog import EventWriter, Frontier, RunLog, Stream, chain_hash, commit_batch
from millrace.runlog.audit import audit_run
from millrace.runlog.event_archive import EventArchive
from millrace.runlog.origin import load_origin
from millrace.storage import ObjectStore
from millrace.storage.commit_points import with_checksum
from millrace.v1 import event_pb2

STEPS = 3
MEMBERS = 2
RUN_HASH = "ab" * 32


@dataclass
class Recorded:
    """The run, and what tests damage of it."""

    log: RunLog
    redis: redis_asyncio.Redis
    store: ObjectStore
    chain: bytes = bytes(32)
    chains: list[bytes] = field(default_factory=list)
    headers: list[batch_pb2.BatchHeader] = field(default_factory=list)

    @property
    def names(self):
        return self.log.names

    def header(self, step: int) -> batch_pb2.BatchHeader:
        return batch_pb2.BatchHeader.FromString(self.store.get(self.names.batch_header(step)))


def rollout(uid: str, *, ordinal: int, member: int, attempt: int = 0, **fields) -> Rollout:
    """An OK rollout of five tokens."""
    status = fields.pop("status", RolloutStatus.OK)
    is_ok = status is RolloutStatus.OK
    sample = Sample(
        token_ids=np.arange(5, dtype=np.int32),
        loss_mask=np.array([0, 0, 1, 1, 1], np.uint8),
        inference_logprobs=np.array([0, 0, -1, -1, -1], np.float32),
        policy_spans=(PolicySpan(lineage=0, version=0, start=2, end=5),),
    )
    return Rollout(
        run_uid=uid,
        purpose=Purpose.TRAIN,
        ordinal=ordinal,
        member=member,
        attempt=attempt,
        group_size=MEMBERS,
        env="e",
        task_index=ordinal,
        task_id=f"t/{ordinal}",
        status=status,
        error=None if is_ok else RolloutError(type="E", message="m"),
        samples=(sample,) if is_ok else (),
        reward=float(member),
        **fields,
    )


def _train_sample(played: Rollout) -> TrainSample:
    sample = played.samples[0]
    return TrainSample(
        token_ids=sample.token_ids,
        loss_mask=sample.loss_mask,
        inference_logprobs=sample.inference_logprobs,
        advantages=np.ones(5, np.float32),
        ordinal=played.ordinal,
        member=played.member,
        attempt=played.attempt,
        env=played.env,
        reward=played.reward,
        temperature=1.0,
        min_version=0,
        max_version=0,
        lineage=0,
    )


def _resolution(ordinal: int, reason: str = "") -> batch_pb2.Resolution:
    outcome = batch_pb2.ORDINAL_OUTCOME_DROPPED if reason else batch_pb2.ORDINAL_OUTCOME_TRAINED
    return batch_pb2.Resolution(ordinal=ordinal, env="e", task_id=f"t/{ordinal}", outcome=outcome, reason=reason)


async def append_rollout(run: Recorded, played: Rollout) -> str:
    """Append a rollout to the stream; returns the id of its entry."""
    (await run.log.append_rollout(encode_rollout(played))).require("rollout")
    return await run.log.last_id(Stream.ROLLOUTS) or ""


def publish(run: Recorded, version: int, *, lineage: int = 0) -> policy_pb2.PolicyEntry:
    """A policy's object and manifest, as `publish_policy` names them."""
    names, digest = run.names, f"{version:032x}"
    key = f"{names.policy(lineage, version)}e1-abcd/model-00001.safetensors"
    run.store.put(key, b"weights")
    manifest = {
        "format": 2,
        "run_uid": names.uid,
        "lineage": lineage,
        "version": version,
        "digest": digest,
        "encodings": [
            {"objects": [{"key": key, "sha256": hashlib.sha256(b"weights").hexdigest(), "size_bytes": 7}]},
        ],
        "files": [],
    }
    data = json.dumps(manifest).encode()
    assert run.store.create(names.policy_manifest(lineage, version), data)
    return policy_pb2.PolicyEntry(
        lineage=lineage,
        version=version,
        manifest_key=names.policy_manifest(lineage, version),
        manifest_sha256=hashlib.sha256(data).digest(),
        digest=digest,
    )


def checkpoint(run: Recorded, step: int) -> None:
    """A checkpoint's object and manifest, as the trainer's CheckpointStore names them."""
    names, data = run.names, f"state {step}".encode()
    key = f"{names.checkpoint(step)}e00000001-abcd/shard.distcp"
    run.store.put(key, data)
    manifest = {
        "format": 2,
        "run_uid": names.uid,
        "run_hash": run.log.run_hash,
        "step": step,
        "lineage": 0,
        "chain_hash": (run.chains[step - 1] if step else bytes(32)).hex(),
        "objects": [
            {"name": "shard.distcp", "key": key, "sha256": hashlib.sha256(data).hexdigest(), "size_bytes": len(data)}
        ],
    }
    assert run.store.create(f"{names.checkpoint(step)}manifest.json", with_checksum(manifest))


async def record(log: RunLog, redis: redis_asyncio.Redis, store: ObjectStore, *, closes: bool = True) -> Recorded:
    """Two groups of two members a step (ordinals 3 n and 3 n + 1), and one that is dropped (3 n + 2)."""
    run = Recorded(log=log, redis=redis, store=store, chain=load_origin(store, log.names).chain_hash)
    orchestrator = await log.acquire_epoch("orchestrator", "o")
    trainer = await log.acquire_epoch("trainer", "t")
    events, reports = EventWriter(log, "orchestrator-1"), EventWriter(log, "trainer-1")
    frontier = Frontier()

    async def announce(version: int) -> None:
        entry = publish(run, version)
        (await log.append_policy(trainer, entry.SerializeToString(), version)).require("policy")

    async def commit(header: batch_pb2.BatchHeader, samples: list[TrainSample], played: list[Rollout]) -> None:
        header.run_uid, header.run_hash, header.previous_chain_hash = log.uid, log.run_hash, run.chain
        frontier.resolve(()).fill(header)
        header.orchestrator_state = json.dumps({"num_duplicates": header.step}).encode()
        chunks = pack_batch(header, samples, target_chunk_bytes=100)
        stored = await commit_batch(log, orchestrator, header, chunks, encode_archive(played))
        run.chain = chain_hash(run.chain, stored)
        run.chains.append(run.chain)
        run.headers.append(batch_pb2.BatchHeader.FromString(stored))

    await announce(0)
    for step in range(STEPS):
        played = []
        for ordinal in (3 * step, 3 * step + 1):
            for member in range(MEMBERS):
                one = rollout(log.uid, ordinal=ordinal, member=member, dispatched_after="0-0")
                entry_id = await append_rollout(run, one)
                played.append(
                    rollout(log.uid, ordinal=ordinal, member=member, dispatched_after="0-0", entry_id=entry_id)
                )
        ordinals = [3 * step, 3 * step + 1, 3 * step + 2]
        frontier = frontier.resolve(ordinals)
        header = batch_pb2.BatchHeader(kind=batch_pb2.BATCH_KIND_TRAIN, step=step)
        header.resolutions.extend([*map(_resolution, ordinals[:2]), _resolution(ordinals[2], "zero_advantage")])
        await commit(header, [_train_sample(one) for one in played], played)
        await events.write(event_pb2.Event(batch_committed=event_pb2.BatchCommitted(step=step, num_trained=2)))
        await announce(step + 1)
        await reports.write(event_pb2.Event(step_completed=event_pb2.StepCompleted(step=step)))
    for step in (1, 3):
        checkpoint(run, step)
    if closes:
        frontier = frontier.resolve([3 * STEPS])
        header = batch_pb2.BatchHeader(kind=batch_pb2.BATCH_KIND_CLOSE, step=STEPS, final_version=STEPS)
        header.outcome = batch_pb2.RUN_OUTCOME_SUCCEEDED
        header.resolutions.append(_resolution(3 * STEPS, "run_ended"))
        await commit(header, [], [])
    await events.close()
    await reports.close()
    await EventArchive(log).archive()
    return run


# Auditing and damaging it.


async def audit(run, *, offline: bool = False):
    redis = None if offline else run.redis
    return await audit_run(redis, run.store, prefix=run.names.prefix, uid=run.names.uid)


async def violations(run, *, offline: bool = False) -> set[str]:
    return {finding.check for finding in (await audit(run, offline=offline)).violations}


def flip(run, key: str) -> None:
    data = bytearray(run.store.get(key))
    data[len(data) // 2] ^= 1
    run.store.put(key, bytes(data))


def rewrite(run, step: int, change) -> None:
    """Change a header and everything that follows from its bytes, as a faulty orchestrator would write it."""
    for number in range(step, STEPS + 1):
        header = run.header(number)
        if number == step:
            change(header)
        else:
            header.previous_chain_hash = run.chains[number - 1]
        data = header.SerializeToString(deterministic=True)
        run.store.put(run.names.batch_header(number), data)
        run.chains[number] = chain_hash(header.previous_chain_hash, data)
    for prefix in run.store.list_prefixes(run.names.checkpoints):
        manifest = json.loads(run.store.get(f"{prefix}manifest.json"))
        manifest["chain_hash"] = run.chains[manifest["step"] - 1].hex()
        run.store.put(f"{prefix}manifest.json", json.dumps(manifest).encode())


def rearchive(run, step: int, change) -> None:
    """Replace a step's archive by a changed one that its header names."""
    played = change(decode_archive(run.store.get(run.header(step).rollouts_key)))
    data = encode_archive(played)
    run.store.put(run.header(step).rollouts_key, data)

    def name(header: batch_pb2.BatchHeader) -> None:
        header.rollouts_sha256 = hashlib.sha256(data).digest()

    rewrite(run, step, name)
