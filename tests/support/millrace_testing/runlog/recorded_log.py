"""A small run that is recorded as the services record one: three steps, a closing header, policies, events."""

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from unittest import mock

import numpy as np
import redis.asyncio as redis_asyncio

from millrace.internal.v1 import batch_pb2, policy_pb2
from millrace.readers.audit import audit_run
from millrace.rollouts.batch_wire import pack_batch
from millrace.rollouts.token_log import LoggedSample, TokenLog
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
from millrace.runlog import Epoch, EventWriter, Frontier, RunLog, Stream, chain_hash, commit_batch
from millrace.runlog import event_archive as event_archive
from millrace.runlog.event_archive import EventArchive
from millrace.runlog.names import Deployment
from millrace.runlog.records import frontier as frontier_module
from millrace.runlog.records.known import KnownObjects
from millrace.runlog.records.run_record import load_origin
from millrace.runlog.records.token_logs import load_scores, name_scores, store_scores, store_token_log
from millrace.runlog.retention import Retention, RetentionRule, RunNeeds
from millrace.runlog.seal import write_seal
from millrace.storage import ObjectStore
from millrace.storage.base import revision_key, with_checksum
from millrace.trainer.checkpoint.index import ShardPiece, ShardTensor, encode_index
from millrace.v1 import event_pb2, run_pb2
from millrace_testing.runlog.committed import known_by
from millrace_testing.runlog.recorded_policies import Publisher, manifest_sha256, sha256

STEPS = 3
MEMBERS = 2
POINT_STEPS = 4
"""After so many training steps there is a chain point."""
RUN_HASH = "ab" * 32
NUM_REPORTS = 1 + 2 * STEPS + 2
"""Events of the trainer: its versions, its steps, two checkpoints."""
NUM_EVENTS = NUM_REPORTS + STEPS + 1
"""With those of the orchestrator: its batches, and the end."""
ENDED_AT = 1_700_000_000
"""When the recorded runs ended: long ago (seconds since the epoch)."""


@dataclass
class Recorded:
    """The run, and what tests damage of it."""

    log: RunLog
    redis: redis_asyncio.Redis
    store: ObjectStore
    chain: bytes = bytes(32)
    chains: list[bytes] = field(default_factory=list)
    headers: list[batch_pb2.BatchHeader] = field(default_factory=list)
    publishers: dict[int, Publisher] = field(default_factory=dict)
    seed: int = 0

    @property
    def names(self):
        return self.log.names

    def header(self, step: int) -> batch_pb2.BatchHeader:
        return batch_pb2.BatchHeader.FromString(self.store.get(self.names.batch_header(step)))


def rollout(uid: str, *, ordinal: int, member: int, attempt: int = 0, **fields) -> Rollout:
    """Return an OK rollout of five tokens."""
    status = fields.pop("status", RolloutStatus.OK)
    is_ok = status is RolloutStatus.OK
    sample = Sample(
        token_ids=np.arange(5, dtype=np.int32) + fields.pop("first_token", 0),
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
        reward=float(fields.pop("reward", member)),
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
    (await run.log.append_rollouts([encode_rollout(played)])).require("rollout")
    return await run.log.last_id(Stream.ROLLOUTS) or ""


def publish(run: Recorded, version: int, *, lineage: int = 0) -> policy_pb2.PolicyEntry:
    """Publish a policy's objects and manifest, as trainers do; return its entry."""
    if lineage not in run.publishers:
        run.publishers[lineage] = Publisher(store=run.store, names=run.names, lineage=lineage, seed=run.seed)
    return run.publishers[lineage].publish(version)


def publish_anew(run: Recorded, version: int) -> str:
    """Publish a damaged version again, as a trainer does: new objects and a successor manifest.

    Return the successor's key.
    """
    key = run.names.policy_manifest(0, version)
    manifest, successor = json.loads(run.store.get(key)), revision_key(key, 1)
    for item in [item for encoding in manifest["encodings"] for item in encoding["objects"]]:
        data, item["key"] = run.store.get(item["key"]), item["key"] + ".again"
        run.store.create(item["key"], data)
    run.store.create(successor, json.dumps({**manifest, "key": successor}).encode())
    seal_anew(run)
    return successor


def seal_anew(run: Recorded) -> None:
    """Write the seal anew, as if later objects had been written before it."""
    key = run.names.seal(0)
    if run.store.head(key) is not None:
        run.store.delete(key)
        known = known_by(run.headers)
        assert write_seal(run.store, run.names, key, known, chain=run.chain, state="SUCCEEDED", by="test")


def checkpoint(run: Recorded, step: int) -> event_pb2.Event:
    """Write a checkpoint of a step's weights, as the trainer does; return its event.

    One tensor is in float32, as master weights are. The pieces of the other are in the files of two ranks.
    """
    names, base = run.names, f"{run.names.checkpoint(step)}e00000001-abcd/"
    first, second = run.publishers[0].parts(step)
    wide = (first.bits.astype("<u4") << 16).tobytes()
    half = len(second.bits) // 2
    files = {"rank-00000.bin": wide + second.bits[:half].tobytes(), "rank-00001.bin": second.bits[half:].tobytes()}
    pieces = (
        ShardPiece("rank-00000.bin", len(wide), 0, half),
        ShardPiece("rank-00001.bin", 0, half, len(second.bits) - half),
    )
    tensors = [
        ShardTensor(
            name=f"model.{first.name}", dtype="float32", shape=first.shape,
            pieces=(ShardPiece("rank-00000.bin", 0, 0, len(first.bits)),),
        ),
        ShardTensor(name=f"model.{second.name}", dtype="bfloat16", shape=second.shape, pieces=pieces),
    ]  # fmt: skip
    files["index.json"] = encode_index(tensors)
    for name, data in files.items():
        run.store.put(base + name, data)
    manifest = {
        "format": 2,
        "run_uid": names.uid,
        "run_hash": run.log.run_hash,
        "step": step,
        "lineage": 0,
        "chain_hash": (run.chains[step - 1] if step else bytes(32)).hex(),
        "epoch": 1,
        "world_size": 2,
        "determinism": "strict",
        "conditions": {},
        "created": "",
        "base_digest": "",
        "objects": [
            {"name": name, "key": base + name, "sha256": sha256(data), "size_bytes": len(data)}
            for name, data in files.items()
        ],
    }
    stored = with_checksum(manifest)
    assert run.store.create(names.checkpoint_manifest(step), stored)
    return event_pb2.Event(checkpoint_saved=event_pb2.CheckpointSaved(step=step, manifest_sha256=sha256(stored)))


def token_log(run: Recorded, step: int) -> event_pb2.Event:
    """Write the trainer's log-probs of a step; return their event."""
    logged = LoggedSample(
        sample=0, ordinal=3 * step, member=0, attempt=0, minibatch=0, mask=np.array([0, 0, 1, 1, 1], np.uint8),
        logprobs=np.array([-1, -2, -run.seed], np.float32), entropies=np.zeros(3, np.float16),
    )  # fmt: skip
    chain = run.chains[step]
    log = TokenLog(
        run_uid=run.names.uid, step=step, lineage=0, chain_hash=chain, num_rollouts=4, share=0.25, samples=(logged,)
    )
    stored = store_token_log(run.store, run.names, log)
    body = event_pb2.TokenLogStored(step=step, key=stored.key, sha256=stored.sha256, size_bytes=stored.size_bytes)
    return event_pb2.Event(token_log_stored=body)


class _Services:
    """What orchestrator and trainer hold while they record a run, and what each of them writes."""

    def __init__(self, run: Recorded, *, orchestrator: Epoch, trainer: Epoch) -> None:
        """Make the writers of `run` under the epochs of the two services."""
        self.run = run
        self.orchestrator, self.trainer = orchestrator, trainer
        self.events, self.reports = EventWriter(run.log, "orchestrator-1"), EventWriter(run.log, "trainer-1")
        self.frontier = Frontier()
        self.retention = Retention(run.store, run.names, first=0, by="orchestrator-1")
        self.known = KnownObjects()
        self.archive = EventArchive(run.log, on_written=self.known.announce)

    async def announce(self, version: int) -> None:
        """Publish a version and announce it in the log and in an event."""
        run = self.run
        entry = publish(run, version)
        (await run.log.append_policy(self.trainer, entry.SerializeToString(), version)).require("policy")
        self.known.announce(entry.manifest_key.removeprefix(run.names.root))
        published = event_pb2.PolicyPublished(
            version=version, digest=entry.digest, manifest_sha256=manifest_sha256(entry)
        )
        await self.reports.write(event_pb2.Event(policy_published=published))

    async def play(self, ordinal: int, member: int, *, first_token: int, scored: bool) -> Rollout:
        """Append a rollout to the log and return it as it is archived; if `scored`, with a teacher's log-probs."""
        run = self.run
        fields = {"ordinal": ordinal, "member": member, "dispatched_after": "0-0", "reward": member}
        fields["first_token"] = first_token
        entry_id = await append_rollout(run, rollout(run.log.uid, **fields))
        one = rollout(run.log.uid, **fields, entry_id=entry_id)
        if scored:
            scores = [np.array([0, 0, -1, -2 - run.seed, ordinal], np.float32)]
            store_scores(run.store, run.names, one, scores)
            one = load_scores(run.store, run.names, one)
        return one

    async def commit(self, header: batch_pb2.BatchHeader, played: list[Rollout]) -> None:
        """Commit `header` as the next of the chain, with the rollouts that it resolves and trains on."""
        run = self.run
        header.run_uid, header.run_hash, header.previous_chain_hash = run.log.uid, run.log.run_hash, run.chain
        self.frontier.resolve(()).fill(header)
        header.orchestrator_state = json.dumps({"num_duplicates": header.step}).encode()
        chunks = pack_batch(header, [_train_sample(one) for one in played], target_chunk_bytes=100)
        header.objects.extend(name_scores(run.names, played))
        archive = encode_archive(played)
        with mock.patch.object(frontier_module, "POINT_STEPS", POINT_STEPS):
            stored = await commit_batch(run.log, self.orchestrator, header, chunks, archive, known=self.known)
        run.chain = chain_hash(run.chain, stored)
        run.chains.append(run.chain)
        run.headers.append(batch_pb2.BatchHeader.FromString(stored))

    async def commit_step(self, step: int, *, scored: bool) -> None:
        """Commit the batch of a step: two groups are played and trained on, the third ordinal is dropped."""
        ordinals = [3 * step, 3 * step + 1, 3 * step + 2]
        first_token = self.run.seed + (step if scored else 0)
        played = [
            await self.play(ordinal, member, first_token=first_token, scored=scored)
            for ordinal in ordinals[:2]
            for member in range(MEMBERS)
        ]
        self.frontier = self.frontier.resolve(ordinals)
        header = batch_pb2.BatchHeader(kind=batch_pb2.BATCH_KIND_TRAIN, step=step)
        header.resolutions.extend([*map(_resolution, ordinals[:2]), _resolution(ordinals[2], "zero_advantage")])
        await self.commit(header, played)
        chain = self.run.chain.hex()
        committed = event_pb2.BatchCommitted(step=step, num_trained=2, dropped={"zero_advantage": 1}, chain_hash=chain)
        await self.events.write(event_pb2.Event(batch_committed=committed))

    async def train_step(self, step: int, *, saves: bool, logs_tokens: bool) -> None:
        """Write what the trainer makes of a step: a version, events, a checkpoint and a token log if asked for."""
        run = self.run
        await self.announce(step + 1)
        if saves:
            await self.reports.write(checkpoint(run, step + 1))
        completed = event_pb2.StepCompleted(step=step, chain_hash=run.chain.hex())
        await self.reports.write(event_pb2.Event(step_completed=completed))
        if logs_tokens:
            await self.reports.write(token_log(run, step))

    async def archive_events(self, step: int) -> None:
        """Write an intent, and move the events so far into an archive, as happens from time to time."""
        await self.run.log.write_intent("pause", {"step": step})
        await self.events.flush()
        await self.reports.flush()
        await self.archive.archive()

    async def close(self, steps: int, *, ends: str) -> None:
        """Commit the closing header of a run of `steps` steps that ends in the state `ends`, and write its event."""
        self.frontier = self.frontier.resolve([3 * steps])
        header = batch_pb2.BatchHeader(kind=batch_pb2.BATCH_KIND_CLOSE, step=steps, final_version=steps)
        header.outcome = batch_pb2.RunOutcome.Value(f"RUN_OUTCOME_{ends}")
        header.resolutions.append(_resolution(3 * steps, "run_ended"))
        await self.commit(header, [])
        end = event_pb2.Event()
        end.time.FromSeconds(ENDED_AT)
        end.state_changed.new_state = run_pb2.RunState.Value(f"RUN_STATE_{ends}")
        end.state_changed.chain_hash = self.run.chain.hex()
        await self.reports.flush()
        await self.events.write(end)


async def record(
    log: RunLog,
    redis: redis_asyncio.Redis,
    store: ObjectStore,
    *,
    closes: bool = True,
    steps: int = STEPS,
    checkpoints: tuple[int, ...] = (1, 3),
    seed: int = 0,
    scored: bool = False,
    name: str = "demo",
    ends: str = "SUCCEEDED",
    rules: Mapping[int, RetentionRule] = MappingProxyType({}),
) -> Recorded:
    """Record a run of two groups of two members a step (ordinals 3 n and 3 n + 1), and one that is dropped (3 n + 2).

    `checkpoints` are the versions of which there is one. `seed` changes weights and rewards. `scored`: a teacher has
    scored the rollouts, log-probs of the trainer are stored, and each step has tokens of its own. `ends` is the state
    in which the run ends, if it `closes`. `rules` are rules of retention by the step after which something is retired
    by them.
    """
    run = Recorded(log=log, redis=redis, store=store, chain=load_origin(store, log.names).chain_hash, seed=seed)
    store.create(Deployment(log.names.prefix).name_object(name), log.uid.encode())
    orchestrator = await log.acquire_epoch("orchestrator", "o")
    services = _Services(run, orchestrator=orchestrator, trainer=await log.acquire_epoch("trainer", "t"))
    await services.announce(0)
    for step in range(steps):
        await services.commit_step(step, scored=scored)
        await services.train_step(step, saves=step + 1 in checkpoints, logs_tokens=scored)
        if step in rules:
            done = [each for each in checkpoints if each <= step + 1]
            view = RunNeeds(next_step=step + 1, checkpoints=done, newest_policy=(0, step + 1))
            assert services.retention.run(rules[step], view) == []
        if step % 5 == 4:
            await services.archive_events(step)
    if closes:
        await services.close(steps, ends=ends)
    await services.events.close()
    await services.reports.close()
    await services.archive.archive()
    if closes:
        key = log.names.seal(0)
        assert write_seal(store, log.names, key, services.known, chain=run.chain, state=ends, by="test")
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
    for number in range(step, len(run.chains)):
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
        run.store.put(f"{prefix}manifest.json", with_checksum(manifest))
    restate(run)


def restate(run) -> None:
    """Rewrite the archived events and the seal so that they match the current headers and manifests."""
    names, store = run.names, run.store
    for info in list(store.list(names.event_archive)):
        entries = []
        for entry in event_archive.decode_archive(store.get(info.key), info.key):
            event = event_pb2.Event.FromString(entry.d)
            match event.WhichOneof("body"):
                case "batch_committed" | "step_completed" as kind:
                    getattr(event, kind).chain_hash = run.chains[getattr(event, kind).step].hex()
                case "state_changed":
                    event.state_changed.chain_hash = run.chains[-1].hex()
                case "checkpoint_saved":
                    manifest = store.get(names.checkpoint_manifest(event.checkpoint_saved.step))
                    event.checkpoint_saved.manifest_sha256 = sha256(manifest)
                case _:
                    pass
            if event.HasField("batch_committed"):
                items = run.header(event.batch_committed.step).resolutions
                dropped = Counter(i.reason for i in items if i.outcome == batch_pb2.ORDINAL_OUTCOME_DROPPED)
                trained = len(items) - dropped.total()
                event.batch_committed.dropped.clear()
                event.batch_committed.dropped.update(dropped)
                event.batch_committed.num_trained = trained
            data = event.SerializeToString(deterministic=True)
            entries.append(dataclasses.replace(entry, d=data, h=sha256(data)))
        store.put(info.key, event_archive.encode_archive(entries))
    reseal(run)


def reseal(run) -> None:
    """Recompute the seal's contents."""
    key = run.names.seal(0)
    if run.store.head(key) is None:
        return
    seal = json.loads(run.store.get(key))
    seal["chain_hash"] = run.chains[-1].hex()
    seal["objects"] = {k: sha256(run.store.get(run.names.root + k)) for k in seal["objects"]}
    run.store.put(key, json.dumps(seal).encode())


def rearchive(run, step: int, change) -> None:
    """Replace a step's archive by a changed one, which its header then refers to."""
    played = change(decode_archive(run.store.get(run.header(step).rollouts_key)))
    data = encode_archive(played)
    run.store.put(run.header(step).rollouts_key, data)

    def name(header: batch_pb2.BatchHeader) -> None:
        header.rollouts_sha256 = hashlib.sha256(data).digest()

    rewrite(run, step, name)
