"""A run of three steps as its object store holds it."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from millrace.internal.v1 import batch_pb2
from millrace.rollouts.batch_wire import pack_batch
from millrace.rollouts.types import PolicySpan, Purpose, Rollout, RolloutStatus, Sample, TrainSample
from millrace.rollouts.wire import encode_archive
from millrace.runlog import event_archive
from millrace.runlog.names import Deployment, Names
from millrace.runlog.redis.entry import Entry
from millrace.storage.local import LocalStore
from millrace.v1 import event_pb2

UID = "01a205f04e00c6b2d345401dca64"
NAMES = Names("millrace", UID)
KEY = "mrt_0123456789abcdef0123"
"""A secret in a completion."""
STEPS = 3


class StoredRun:
    """What tests add to the store."""

    def __init__(self, store: LocalStore) -> None:
        self.store = store
        self._told = 0

    def archive(self, *events: event_pb2.Event, generation: int = 1, first: int | None = None) -> None:
        """Archive events as one object, after those before unless `first` says where."""
        entries = []
        at = self._told if first is None else first
        for number, event in enumerate(events, start=at):
            event.writer = event.writer or "trainer-0"
            event.writer_sequence = event.writer_sequence or number + 1
            event.time.FromSeconds(1_700_000_000 + number)
            data = event.SerializeToString()
            id_ = f"{generation}-{number}"
            entries.append(Entry(id=id_, v=1, h=hashlib.sha256(data).hexdigest(), d=data, tp=""))
        self._told = at + len(events)
        self.store.create(NAMES.archived_events(entries[0].id, entries[-1].id), event_archive.encode_archive(entries))

    def step(self, step: int) -> list[event_pb2.Event]:
        """Return the events of a step."""
        metrics = {"loss/mean": 0.5 / (step + 1), "optim/lr": 1e-5, "time/step": 2.0}
        return [
            event_pb2.Event(batch_committed=event_pb2.BatchCommitted(step=step, num_trained=1, dropped={"stale": 2})),
            event_pb2.Event(
                step_completed=event_pb2.StepCompleted(
                    step=step, reward_mean=0.25 * step, num_tokens=12, num_rollouts=2, step_seconds=2.0, metrics=metrics
                )
            ),
        ]

    def commit(self, step: int) -> None:
        """The header, data and archive of a step: two rollouts of one group, rewards 0 and 1."""
        rollouts = [self._rollout(step, member) for member in (0, 1)]
        samples = [self._train_sample(step, member) for member in (0, 1)]
        header = batch_pb2.BatchHeader(run_uid=UID, kind=batch_pb2.BATCH_KIND_TRAIN, step=step, num_rollouts=2)
        for index, chunk in enumerate(pack_batch(header, samples)):
            header.chunks[index].key = f"{NAMES.batch_data(step, 1, 'n')}chunk-{index:05d}.pb"
            self.store.put(header.chunks[index].key, chunk)
        header.rollouts_key = f"{NAMES.rollout_data(step, 1, 'n')}rollouts.pb.zst"
        archive = encode_archive(rollouts)
        self.store.put(header.rollouts_key, archive)
        header.rollouts_sha256 = hashlib.sha256(archive).digest()
        self.store.create(NAMES.batch_header(step), header.SerializeToString())

    def _rollout(self, step: int, member: int) -> Rollout:
        said = [{"role": "user", "content": f"task {step}"}, {"role": "assistant", "content": f"<b>{member}</b> {KEY}"}]
        column = np.array([0, 0, 1, 1], np.uint8)
        sample = Sample(
            token_ids=np.arange(4, dtype=np.int32),
            loss_mask=column,
            inference_logprobs=-column.astype(np.float32),
            policy_spans=(PolicySpan(lineage=0, version=step, start=2, end=4),),
        )
        return Rollout(
            run_uid=UID, purpose=Purpose.TRAIN, ordinal=step, member=member, attempt=0, group_size=2, env="letters",
            task_index=step, task_id=f"id-{step}", status=RolloutStatus.OK, samples=(sample,), reward=float(member),
            messages_json=json.dumps(said), metrics={"share": 0.5}, num_turns=1,
            task_json=json.dumps({"answer": f"task {step}, reversed", "info": {"level": step, "key": KEY}}),
        )  # fmt: skip

    def _train_sample(self, step: int, member: int) -> TrainSample:
        mask = np.array([0, 0, 1, 1], np.uint8)
        return TrainSample(
            token_ids=np.arange(4, dtype=np.int32), loss_mask=mask, inference_logprobs=-mask.astype(np.float32),
            advantages=(mask * (member - 0.5)).astype(np.float32), ordinal=step, member=member, attempt=0,
            env="letters", reward=float(member), temperature=1.0, min_version=step, max_version=step, lineage=0,
        )  # fmt: skip


@pytest.fixture
def stored_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StoredRun:
    """`outputs/letters-1` with the store of a run of three steps."""
    monkeypatch.chdir(tmp_path)
    for name in ("MILLRACE_STORE_URL", "MILLRACE_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    run = StoredRun(LocalStore(tmp_path / "outputs" / "letters-1" / "store"))
    run.store.create(Deployment("millrace").name_object("letters-1"), UID.encode())
    config = {
        "max_steps": STEPS,
        "orchestrator": {"env": [{"args": {"api_key": "sk-abcdefgh12345", "db_token": "two words"}}]},
    }
    config["wandb"] = {"project": "letters", "tags": ["a"], "log_extras": {"samples": True, "interval": 2}}
    run.store.create(NAMES.run_json, json.dumps({"uid": UID, "name": "letters-1", "config": config}).encode())
    for step in range(STEPS):
        run.commit(step)
        run.archive(*run.step(step))
    return run
