"""The trainer over recorded logs: consumes, publishes, reports, checkpoints, resumes bit for bit."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from millrace.config.sections.rl import RLConfig
from millrace.errors import (
    ConflictError,
    CorruptObjectError,
    FencedError,
    InternalError,
    InvalidStateError,
    NotFoundError,
)
from millrace.internal.v1 import policy_pb2
from millrace.policies.host_copy import download_hf, read_manifest
from millrace.runlog import Lease, Stream
from millrace.storage.base import with_checksum
from millrace.storage.local import LocalStore
from millrace.trainer import job
from millrace_testing.lanes import one_by_default

MakeConfig = Callable[..., RLConfig]
Recorder = Any  # conftest.Recorder; tests are not importable from one another


def test_a_run_from_first_batch_to_closing_header(
    recorder: Recorder, make_config: MakeConfig, tmp_path: Path, tiny_model: Path
) -> None:
    recorder.record(make_config(ckpt={"interval": 2}), steps=3)
    assert recorder.train() == 3

    entries = recorder.call(recorder.log.read(Stream.POLICIES))
    assert [entry.id for entry in entries] == ["0-1", "1-1", "2-1", "3-1"]
    policies = [policy_pb2.PolicyEntry.FromString(entry.d) for entry in entries]
    assert len({policy.digest for policy in policies}) == 4
    assert recorder.checkpoints() == [2, 3]

    events = recorder.events()
    steps = [event.step_completed for event in events if event.HasField("step_completed")]
    assert [step.step for step in steps] == [0, 1, 2]
    assert steps[2].staleness_mean == 1 and steps[2].staleness_max == 1 and steps[0].staleness_max == 0
    assert steps[1].num_tokens == sum(s.num_tokens for s in recorder.make_samples(1))
    assert steps[1].reward_mean == pytest.approx(np.mean([s.reward for s in recorder.make_samples(1)]))
    names = {"loss/mean", "mismatch_kl/mean", "mismatch_kl/a/mean", "entropy/all/mean", "optim/lr", "time/step"}
    assert names <= set(steps[0].metrics)
    assert steps[0].metrics["optim/lr"] == 0.01 and steps[0].metrics["optim/grad_norm"] > 0
    assert steps[0].step_seconds >= steps[0].wait_seconds >= 0
    assert [e.policy_published.version for e in events if e.HasField("policy_published")] == [0, 1, 2, 3]
    assert [e.checkpoint_saved.step for e in events if e.HasField("checkpoint_saved")] == [2, 3]

    # What was published loads with transformers and gives the score that was reported.
    from transformers import AutoModelForCausalLM

    manifest = read_manifest(recorder.store, policies[3].manifest_key, policies[3].manifest_sha256)
    final = AutoModelForCausalLM.from_pretrained(download_hf(recorder.store, manifest, tmp_path / "hf")).eval()
    differences = []
    for sample in recorder.make_samples(3, count=4, version=3):
        with torch.no_grad():
            tokens = torch.tensor(sample.token_ids.astype(np.int64))
            logprobs = torch.log_softmax(final(tokens[None]).logits[0, :-1], -1).gather(-1, tokens[1:, None])[:, 0]
        chosen = sample.loss_mask[1:] == 1
        differences.append(logprobs.numpy()[chosen] - sample.inference_logprobs[1:][chosen])
    d = np.concatenate(differences).astype(np.float64)
    (score,) = [event.score_completed for event in events if event.HasField("score_completed")]
    assert (score.version, score.num_tokens) == (3, len(d))
    assert score.mismatch_kl == pytest.approx(float(np.mean(np.exp(d) - d - 1)), rel=1e-4)
    assert score.max_abs_logprob_diff == pytest.approx(float(np.abs(d).max()), rel=1e-4)

    # Version 0 is the start model, bit for bit, and the probe is what the weights give.
    start = read_manifest(recorder.store, policies[0].manifest_key)
    loaded = AutoModelForCausalLM.from_pretrained(download_hf(recorder.store, start, tmp_path / "v0"))
    original = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), original.parameters(), strict=True))
    assert start.probe is not None
    with torch.no_grad():
        tokens = torch.tensor(start.probe.token_ids)
        expected = torch.log_softmax(loaded(tokens[None]).logits[0, :-1], -1).gather(-1, tokens[1:, None])[:, 0]
    assert np.allclose(expected.numpy(), start.probe.logprobs, atol=1e-5)


def test_two_trainings_of_equal_logs_are_bit_equal(
    new_recorder: Callable[[], Recorder], make_config: MakeConfig
) -> None:
    digests = []
    for _ in range(2):
        recorder = new_recorder()
        recorder.record(make_config(), steps=4)
        recorder.train()
        digests.append(recorder.digests())
    assert digests[0] == digests[1]
    assert len(set(digests[0].values())) == 5


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param({}, id="default"),
        pytest.param(
            {"loss": {"kl": {"coef": 0.1}, "entropy_coef": 0.01}}, id="near the start model", marks=pytest.mark.long
        ),
        pytest.param(
            {"loss": {"kl": {"coef": 0.1, "place": "reward"}}, "model": {"seq_len": 32, "lora": {"rank": 2}}},
            id="near the base of adapters",
            marks=pytest.mark.long,
        ),
    ],
)
def test_stop_and_resume_equals_an_unbroken_run(
    new_recorder: Callable[[], Recorder], make_config: MakeConfig, keys: dict[str, Any]
) -> None:
    config = make_config(ckpt={"interval": 2}, **keys)
    unbroken = new_recorder()
    unbroken.record(config, steps=5)
    unbroken.train()

    broken = new_recorder()
    broken.record(config, steps=5)
    assert broken.train(stop_at=3) == 3
    assert broken.checkpoints() == [2, 3]  # at the interval, and on the way out
    before = broken.digests()
    assert broken.train() == 5
    assert broken.digests() == unbroken.digests()
    assert before.items() <= broken.digests().items()
    assert broken.checkpoints() == [2, 3, 4, 5]
    (told,) = [event.training_resumed for event in broken.events() if event.HasField("training_resumed")]
    assert (told.step, told.start, told.published, told.epoch) == (3, "checkpoint 3", 3, 2)
    assert told.reason == "trainer-test gave the run back: it was asked to"
    kls = [event.step_completed.metrics for event in unbroken.events() if event.HasField("step_completed")]
    if keys:
        assert kls[0]["reference_kl/mean"] == 0 and all(step["reference_kl/mean"] > 0 for step in kls[1:])
    else:
        assert not any("reference_kl/mean" in step for step in kls)


def test_replay_from_an_older_checkpoint_proves_every_version_again(
    recorder: Recorder, make_config: MakeConfig
) -> None:
    recorder.record(make_config(ckpt={"interval": 2}), steps=5)
    recorder.train()
    published = recorder.digests()
    for step in (4, 5):  # as if the trainer had been killed before these were written
        recorder.store.delete(f"{recorder.root}checkpoints/{step:08d}/manifest.json")
    assert recorder.train() == 5
    assert recorder.digests() == published
    versions = [e.policy_published.version for e in recorder.events() if e.HasField("policy_published")]
    assert versions == [0, 1, 2, 3, 4, 5]  # nothing was published twice


def test_a_replay_that_differs_stops_naming_both_digests(recorder: Recorder, make_config: MakeConfig) -> None:
    recorder.record(make_config(ckpt={"interval": 10}), steps=3)
    recorder.train(stop_at=2)
    root = recorder.root
    recorder.store.delete(f"{root}checkpoints/00000002/manifest.json")
    key = f"{root}policies/0000-00000001/manifest.json"
    other = json.loads(recorder.store.get(f"{root}policies/0000-00000002/manifest.json"))
    real = json.loads(recorder.store.get(key))["digest"]
    recorder.store.put(key, json.dumps({**other, "version": 1, "key": key}).encode())
    with pytest.raises(ConflictError) as raised:
        recorder.train()
    assert raised.value.reason == "POLICY_DIGEST_MISMATCH"
    assert real in str(raised.value) and other["digest"] in str(raised.value)


def test_best_effort_replay_begins_a_new_lineage_above_what_is_published(
    recorder: Recorder, make_config: MakeConfig
) -> None:
    recorder.record(make_config(ckpt={"interval": 1}, determinism="best_effort"), steps=4)
    recorder.train(stop_at=3)
    for step in (2, 3):
        recorder.store.delete(f"{recorder.root}checkpoints/{step:08d}/manifest.json")
    recorder.train()
    entries = recorder.call(recorder.log.read(Stream.POLICIES))
    policies = [policy_pb2.PolicyEntry.FromString(entry.d) for entry in entries]
    assert [(p.lineage, p.version) for p in policies] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 4)]
    assert [e.warning.reason for e in recorder.events() if e.HasField("warning")] == ["NEW_LINEAGE"]


@pytest.mark.parametrize("determinism", one_by_default(["strict", "best_effort"]))
def test_a_policy_whose_announcement_was_lost_is_announced_at_once(
    recorder: Recorder, make_config: MakeConfig, determinism: str
) -> None:
    recorder.create(make_config(ckpt={"interval": 1}, determinism=determinism))
    recorder.commit(0, recorder.make_samples(0))
    recorder.train(stop_at=1)
    recorder.call(recorder.log.command("losing", "DEL", recorder.log.names.stream(Stream.POLICIES)))
    recorder.train(stop=lambda: bool(recorder.call(recorder.log.read(Stream.POLICIES))))
    entries = recorder.call(recorder.log.read(Stream.POLICIES))
    assert [entry.id for entry in entries] == ["0-1", "1-1"]


def test_learning_rate_zero_changes_no_bit(recorder: Recorder, make_config: MakeConfig) -> None:
    recorder.record(make_config(optim={"lr": 0.0, "weight_decay": 0.1}), steps=3)
    recorder.train()
    assert len(set(recorder.digests().values())) == 1
    steps = [e.step_completed for e in recorder.events() if e.HasField("step_completed")]
    assert [step.metrics["optim/lr"] for step in steps] == [0.0, 0.0, 0.0]
    assert all(step.metrics["optim/grad_norm"] > 0 for step in steps)


def test_micro_batches_do_not_change_the_step(new_recorder: Callable[[], Recorder], make_config: MakeConfig) -> None:
    metrics = []
    for micro_batch_tokens in (32, 100_000):
        recorder = new_recorder()
        recorder.record(make_config(micro_batch_tokens=micro_batch_tokens), steps=2)
        recorder.train()
        steps = [e.step_completed for e in recorder.events() if e.HasField("step_completed")]
        metrics.append([(s.metrics["loss/mean"], s.metrics["optim/grad_norm"]) for s in steps])
    assert np.allclose(metrics[0], metrics[1], rtol=1e-4, atol=1e-6)


def test_pruning_keeps_the_newest_and_the_multiples(recorder: Recorder, make_config: MakeConfig) -> None:
    recorder.record(make_config(ckpt={"interval": 1, "keep_last": 2, "keep_interval": 3}), steps=5)
    recorder.train()
    assert recorder.checkpoints() == [3, 4, 5]


def test_no_checkpoints_unless_asked_for(recorder: Recorder, make_config: MakeConfig) -> None:
    recorder.record(make_config(), steps=2)
    recorder.train()
    assert recorder.checkpoints() == []


def test_a_missing_model_names_path_and_remedy(recorder: Recorder, make_config: MakeConfig) -> None:
    config = make_config(name="/nowhere/model")
    recorder.record(config, steps=1)
    with pytest.raises(NotFoundError, match=r"/nowhere/model.*model\.name") as raised:
        recorder.train()
    assert raised.value.reason == "MODEL_NOT_FOUND"


def test_a_batch_of_another_history_is_refused(recorder: Recorder, make_config: MakeConfig) -> None:
    recorder.create(make_config())
    recorder.commit(0, recorder.make_samples(0))
    recorder.chain = b"\1" * 32
    recorder.commit(1, recorder.make_samples(1))
    with pytest.raises(CorruptObjectError, match="previous_chain_hash") as raised:
        recorder.train()
    assert raised.value.reason == "BATCH_CHAIN_BROKEN"
    assert set(recorder.digests()) == {0, 1}


def test_strict_resume_refuses_other_conditions(recorder: Recorder, make_config: MakeConfig) -> None:
    recorder.record(make_config(ckpt={"interval": 2}), steps=4, close=False)
    recorder.train(stop_at=2)
    key = f"{recorder.root}checkpoints/00000002/manifest.json"
    manifest = json.loads(recorder.store.get(key))
    manifest["conditions"]["torch"] = "0.1"
    recorder.store.put(key, with_checksum(manifest))
    with pytest.raises(InvalidStateError, match=r"torch was 0\.1, is "):
        recorder.train(stop_at=4)


def test_strict_resume_with_other_ranks_begins_a_lineage_and_says_so(
    recorder: Recorder, make_config: MakeConfig
) -> None:
    recorder.record(make_config(ckpt={"interval": 2}), steps=4, close=False)
    recorder.train(stop_at=2)
    key = f"{recorder.root}checkpoints/00000002/manifest.json"
    recorder.store.put(key, with_checksum(json.loads(recorder.store.get(key)) | {"world_size": 4}))
    recorder.train(stop_at=4)
    warned = [event.warning for event in recorder.events() if event.HasField("warning")]
    assert [warning.reason for warning in warned] == ["NEW_LINEAGE"]
    assert "1 instead of 4, and may not be bit-exact: version 3 begins lineage 1" in warned[0].message


def test_an_older_trainer_is_fenced_out(recorder: Recorder, make_config: MakeConfig) -> None:
    recorder.record(make_config(), steps=3, close=False)
    steals = []

    def steal() -> bool:
        # A second trainer takes the next epoch while the first one is between two steps; which ones is the machine's
        # affair, because versions are published beside the steps. The first one has something to append behind it.
        if recorder.digests() and not steals:
            steals.append(recorder.call(recorder.log.acquire_epoch("trainer", "thief")))
        return False

    with pytest.raises(FencedError):
        recorder.train(stop=steal)
    assert steals and set(recorder.digests()) < {0, 1, 2, 3}


def test_only_tokens_of_the_final_version_are_scored(recorder: Recorder, make_config: MakeConfig) -> None:
    recorder.create(make_config())
    recorder.commit(0, recorder.make_samples(0))
    final, stale = recorder.make_samples(7, count=2, version=1), recorder.make_samples(8, count=2, version=0)
    recorder.commit(1, final + stale, closing=True)
    recorder.train()
    events = recorder.events()
    (score,) = [event.score_completed for event in events if event.HasField("score_completed")]
    assert score.num_tokens == sum(s.num_loss_tokens for s in final)
    assert [e.warning.reason for e in events if e.HasField("warning")] == ["SCORE_OTHER_VERSION"]


def test_a_cancelled_run_ends_at_its_closing_header(recorder: Recorder, make_config: MakeConfig) -> None:
    recorder.create(make_config(ckpt={}))
    recorder.commit(0, recorder.make_samples(0))
    recorder.commit(1, [], closing=True)
    assert recorder.train() == 1
    assert recorder.checkpoints() == [1]
    assert not any(event.HasField("score_completed") for event in recorder.events())


def test_a_checkpoint_is_saved_and_reported_once(recorder: Recorder, make_config: MakeConfig) -> None:
    recorder.record(make_config(ckpt={"interval": 2}), steps=4)
    recorder.train(stop_at=2)  # both at the interval and on the way out
    recorder.train()  # both at the interval and at the closing header
    assert recorder.checkpoints() == [2, 4]
    assert [e.checkpoint_saved.step for e in recorder.events() if e.HasField("checkpoint_saved")] == [2, 4]


class CheckpointsLast(LocalStore):
    """Takes no file of a checkpoint before policy 4 is there, or half a minute is over."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.waited_in_vain: list[bool] = []
        self._is_there = threading.Event()

    def put_file(self, key: str, path: Path) -> None:
        if "/checkpoints/00000002/" in key:
            self.waited_in_vain.append(not self._is_there.wait(30))
        super().put_file(key, path)

    def create(self, key: str, data: bytes) -> bool:
        is_new = super().create(key, data)
        if key.endswith("policies/0000-00000004/manifest.json"):
            self._is_there.set()
        return is_new


def test_a_slow_store_of_checkpoints_delays_no_step(
    recorder: Recorder, make_config: MakeConfig, tmp_path: Path
) -> None:
    store = recorder.store = CheckpointsLast(tmp_path / "store")
    recorder.record(make_config(ckpt={"interval": 2, "keep_last": 2}), steps=4)
    assert recorder.train() == 4
    assert store.waited_in_vain and not any(store.waited_in_vain)
    assert recorder.checkpoints() == [2, 4]


def test_a_defect_of_the_renewal_ends_the_job_with_its_cause(
    recorder: Recorder, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder.create(make_config())  # no batch: the trainer waits

    async def broken(self: Lease, *, epoch: int = 0) -> bool:
        raise KeyError("a defect")

    monkeypatch.setattr(Lease, "renew", broken)
    ends = time.monotonic() + 30
    with pytest.raises(InternalError, match=r"renewing the trainer lease.*KeyError") as raised:
        recorder.train(stop=lambda: time.monotonic() > ends)
    assert raised.value.reason == "LEASE_RENEWAL_FAILED" and isinstance(raised.value.__cause__, KeyError)


def test_an_error_of_closing_does_not_replace_the_error_of_the_job(
    recorder: Recorder, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(self: Lease, why: str) -> None:
        raise InternalError("the lease cannot be given back")

    def fails(*args: Any, **options: Any) -> None:
        raise NotFoundError("no checkpoints here")

    monkeypatch.setattr(Lease, "release", broken)
    monkeypatch.setattr(job, "resume", fails)
    recorder.record(make_config(), steps=1)
    with pytest.raises(NotFoundError, match="no checkpoints here"):
        recorder.train()
    assert any("not closed in order" in record.getMessage() for record in caplog.records)


def test_a_step_without_room_ends_the_run_with_the_keys_that_take_less(
    recorder: Recorder, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder.create(make_config())
    recorder.commit(0, recorder.make_samples(0))
    monkeypatch.setattr("millrace.trainer.losses.total_loss", lambda *_, **__: torch.empty(1 << 50))
    with pytest.raises(InvalidStateError, match=r"not enough memory to train the run: .*`millrace estimate`") as raised:
        recorder.train()
    assert raised.value.reason == "OUT_OF_MEMORY"
