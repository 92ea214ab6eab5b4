"""The trainer's log-probs, step by step in the store: of the right weights, the same again, and never waited for."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from millrace.config.sections.rl import RLConfig
from millrace.errors import UnavailableError
from millrace.policies.host_copy import download_hf, read_manifest
from millrace.rollouts.batch_wire import decode_header
from millrace.rollouts.token_log import TokenLog, chosen_rollouts
from millrace.runlog.records.token_logs import find_token_log, load_token_log
from millrace.storage.local import LocalStore
from millrace_testing.trainer.torchrun import train_gang

MakeConfig = Callable[..., RLConfig]
Recorder = Any  # conftest.Recorder; tests are not importable from one another
STEPS = 3


def logs(recorder: Recorder, steps: int = STEPS) -> list[TokenLog | None]:
    keys = [find_token_log(recorder.store, recorder.log.names, step) for step in range(steps)]
    return [None if key is None else load_token_log(recorder.store, key) for key in keys]


def whole_logs(recorder: Recorder, steps: int = STEPS) -> list[TokenLog]:
    found = [log for log in logs(recorder, steps) if log is not None]
    assert len(found) == steps
    return found


def objects(recorder: Recorder) -> dict[str, bytes]:
    keys = [info.key for info in recorder.store.list(f"{recorder.root}token_logs/")]
    return {key.removeprefix(recorder.root): recorder.store.get(key) for key in keys}


def warnings(recorder: Recorder) -> list[tuple[str, str]]:
    return [(e.warning.reason, e.warning.message) for e in recorder.events() if e.HasField("warning")]


def metrics(recorder: Recorder) -> list[dict[str, float]]:
    return [event.step_completed.metrics for event in recorder.events() if event.HasField("step_completed")]


def mismatch_of(recorder: Recorder, log: TokenLog) -> float:
    """Mean k3 of the logged tokens, from the batch's own log-probs."""
    samples = recorder.make_samples(log.step)
    inference = [samples[e.sample].inference_logprobs[: len(e.mask)][e.mask == 1] for e in log.samples]
    d = np.concatenate([each.logprobs for each in log.samples]).astype(np.float64) - np.concatenate(inference)
    return float(np.mean(np.exp(d) - d - 1))


def test_they_are_those_of_the_version_that_the_step_began_with(
    recorder: Recorder, make_config: MakeConfig, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    recorder.record(make_config(token_log={"share": 1.0}), steps=STEPS)
    recorder.train()
    told = metrics(recorder)
    for log in whole_logs(recorder):
        manifest = read_manifest(recorder.store, f"{recorder.root}policies/0000-{log.step:08d}/manifest.json")
        directory = download_hf(recorder.store, manifest, tmp_path / str(log.step))
        model = AutoModelForCausalLM.from_pretrained(directory).eval()
        samples = recorder.make_samples(log.step)
        assert [each.sample for each in log.samples] == list(range(len(samples)))
        for sample, each in zip(samples, log.samples, strict=True):
            assert each.mask[0] == 0 and np.array_equal(each.mask[1:], sample.loss_mask[1:])
            with torch.no_grad():
                tokens = torch.tensor(sample.token_ids.astype(np.int64))
                all_LV = torch.log_softmax(model(tokens[None]).logits[0, :-1], -1)
            chosen = sample.loss_mask[1:] == 1
            expected = all_LV.gather(-1, tokens[1:, None])[:, 0].numpy()[chosen]
            entropies = -(all_LV.exp() * all_LV).sum(-1).numpy()[chosen]
            assert np.allclose(each.logprobs, expected, atol=1e-5)
            assert np.allclose(each.entropies, entropies, rtol=1e-3)  # float16
        assert mismatch_of(recorder, log) == pytest.approx(told[log.step]["mismatch_kl/mean"], rel=1e-5)
    assert warnings(recorder) == []


def test_with_minibatches_each_sample_has_those_of_its_own(recorder: Recorder, make_config: MakeConfig) -> None:
    """What the loss saw: the reported mismatch is over just these values."""
    recorder.record(make_config(token_log={"share": 1.0}, minibatches=2, optim={"lr": 0.05}), steps=STEPS)
    recorder.train()
    told = metrics(recorder)
    for log in whole_logs(recorder):
        ordinals = sorted({each.ordinal for each in log.samples})
        assert [each.minibatch for each in log.samples] == [ordinals.index(e.ordinal) % 2 for e in log.samples]
        assert mismatch_of(recorder, log) == pytest.approx(told[log.step]["mismatch_kl/mean"], rel=1e-5)


@pytest.mark.parametrize("share", [None, 0.25, 0.0])
def test_a_share_is_chosen_by_the_header_and_a_repeated_step_writes_the_same(
    recorder: Recorder, make_config: MakeConfig, share: float | None
) -> None:
    keys = {} if share is None else {"token_log": {"share": share}}
    recorder.record(make_config(ckpt={"interval": 1}, determinism="strict", **keys), steps=STEPS)
    recorder.train()
    first = objects(recorder)
    if share == 0:
        assert first == {}
        return
    assert list(first) == [f"token_logs/{step:08d}/0000.bin" for step in range(STEPS)]
    for log in whole_logs(recorder):
        header = decode_header(recorder.store.get(recorder.log.names.batch_header(log.step)))
        members = [(entry.ordinal, entry.member, entry.attempt) for entry in header.samples]
        assert {each.key for each in log.samples} == chosen_rollouts(members, share or 0.1)
        assert (log.num_rollouts, len(log.samples)) == (12, 3 if share else 2)
    # As after a kill between the step and its object: the next trainer goes on from the checkpoint before.
    for step in (2, 3):
        recorder.store.delete(f"{recorder.root}checkpoints/{step:08d}/manifest.json")
    recorder.store.delete(f"{recorder.root}token_logs/00000002/0000.bin")
    recorder.train()
    assert objects(recorder) == first and warnings(recorder) == []


def test_what_a_kill_left_out_stays_out_where_the_step_is_not_repeated(
    recorder: Recorder, make_config: MakeConfig
) -> None:
    recorder.record(make_config(ckpt={"interval": 1}, determinism="strict"), steps=STEPS)
    assert recorder.train(stop_at=2) == 2
    recorder.store.delete(f"{recorder.root}token_logs/00000001/0000.bin")
    recorder.train()
    assert [log is None for log in logs(recorder)] == [False, True, False]


class WatchedStore(LocalStore):
    """Notes on which threads token logs are asked for, and may refuse to create them."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.threads: set[threading.Thread] = set()
        self.refuses: Callable[[str], bool] = lambda key: False

    def create(self, key: str, data: bytes) -> bool:
        if "/token_logs/" in key:
            self.threads.add(threading.current_thread())
            if self.refuses(key):
                raise UnavailableError("the bucket takes nothing there")
        return super().create(key, data)

    def put(self, key: str, data: bytes) -> None:
        assert "/token_logs/" not in key, "objects are created, never overwritten"
        super().put(key, data)


@pytest.fixture
def watched(recorder: Recorder, tmp_path: Path) -> WatchedStore:
    recorder.store = WatchedStore(tmp_path / "watched")
    return recorder.store


def test_the_thread_that_trains_asks_the_store_for_nothing(
    watched: WatchedStore, recorder: Recorder, make_config: MakeConfig
) -> None:
    recorder.record(make_config(token_log={"share": 1.0}), steps=STEPS)
    recorder.train()
    whole_logs(recorder)
    assert watched.threads and threading.current_thread() not in watched.threads


def test_a_store_that_takes_none_is_a_warning_and_the_run_goes_on(
    watched: WatchedStore, recorder: Recorder, make_config: MakeConfig
) -> None:
    watched.refuses = lambda key: "/00000002/" not in key
    recorder.record(make_config(), steps=STEPS)
    assert recorder.train() == STEPS and sorted(recorder.digests()) == list(range(STEPS + 1))
    assert [log is None for log in logs(recorder)] == [True, True, False]
    ((reason, message),) = warnings(recorder)
    assert reason == "TOKEN_LOG_NOT_STORED"
    assert message.startswith("the trainer's log-probs of step 1 were not stored: the bucket takes nothing there")


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("tp", [1, 2], ids=["ranks with samples of their own", "ranks that share samples"])
def test_a_gang_of_two_stores_what_one_process_does(
    new_recorder: Callable[[], Recorder], make_config: MakeConfig, tp: int
) -> None:
    alone, gang = new_recorder(), new_recorder()
    for recorder, ranks in ((alone, 1), (gang, tp)):
        model = {"seq_len": 32, "tp": ranks}
        recorder.record(
            make_config(
                token_log={"share": 0.5}, minibatches=2, model=model, micro_batch_tokens=48, optim={"lr": 1e-3}
            ),
            steps=STEPS,
        )
    alone.train()
    train_gang(gang)
    for one, two in zip(whole_logs(alone), whole_logs(gang), strict=True):
        assert len(one.samples) == 6
        assert [(e.sample, e.key, e.minibatch, e.mask.tolist()) for e in one.samples] == [
            (e.sample, e.key, e.minibatch, e.mask.tolist()) for e in two.samples
        ]
        for mine, theirs in zip(one.samples, two.samples, strict=True):
            assert np.allclose(mine.logprobs, theirs.logprobs, atol=5e-3)  # Adam's first steps amplify rounding
    first_one, first_two = whole_logs(alone)[0].samples, whole_logs(gang)[0].samples
    for mine, theirs in zip(first_one, first_two, strict=True):
        if mine.minibatch == 0:
            assert np.allclose(mine.logprobs, theirs.logprobs, atol=1e-5)
    assert warnings(gang) == []
