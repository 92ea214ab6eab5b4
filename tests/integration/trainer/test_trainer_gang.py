"""Two processes train one model (torchrun, gloo, FSDP2) and agree with one process."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from millrace.policies.host_copy import pull_tensors, read_manifest
from millrace_testing.trainer.torchrun import train_gang

Recorder = Any  # conftest.Recorder; tests are not importable from one another


def _weights(recorder: Recorder, version: int) -> np.ndarray:
    manifest = read_manifest(recorder.store, f"{recorder.root}policies/0000-{version:08d}/manifest.json")
    tensors = pull_tensors(recorder.store, manifest)
    return np.concatenate([tensors[name].numpy().ravel() for name in sorted(tensors)])


def _steps(recorder: Recorder) -> list[Any]:
    return [event.step_completed for event in recorder.events() if event.HasField("step_completed")]


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"loss": {"kl": {"coef": 0.1}, "entropy_coef": 0.01}},
        {"loss": {"kl": {"coef": 0.1, "place": "reward"}}, "model": {"seq_len": 32, "lora": {"rank": 2}}},
        {"minibatches": 2, "loss": {"type": "ppo", "correction": [{"type": "token_tis"}]}},
        {"pack": {"mode": "always"}, "loss": {"type": "gspo"}},
        {"model": {"seq_len": 32, "dtype": "bfloat16", "publish_dtype": "float32"}},
    ],
    ids=["default", "near the start model", "near the base of adapters", "minibatches", "packed rows", "bfloat16"],
)
def test_two_ranks_equal_one_and_resume_bit_for_bit(
    new_recorder: Callable[[], Recorder], make_config: Any, keys: dict[str, Any]
) -> None:
    config = make_config(ckpt={"interval": 2}, optim={"lr": 1e-3}, micro_batch_tokens=48, **keys)
    alone, gang, broken = new_recorder(), new_recorder(), new_recorder()
    for recorder in (alone, gang, broken):
        recorder.record(config, steps=4)
    alone.train()
    train_gang(gang)
    # The ranks have other micro-batches than one process, which bfloat16 rounds otherwise, 2^16 times as coarsely.
    times = 20 if keys.get("model", {}).get("dtype") == "bfloat16" else 1
    for one, two in zip(_steps(alone), _steps(gang), strict=True):
        assert two.metrics["loss/mean"] == pytest.approx(one.metrics["loss/mean"], abs=times * 1e-5)
        assert two.metrics["optim/grad_norm"] == pytest.approx(one.metrics["optim/grad_norm"], rel=times * 1e-4)
        assert two.metrics["mismatch_kl/mean"] == pytest.approx(one.metrics["mismatch_kl/mean"], abs=times * 1e-5)
        assert set(one.metrics) == set(two.metrics)
    assert gang.digests()[0] == alone.digests()[0]
    assert np.allclose(_weights(gang, 4), _weights(alone, 4), atol=1e-3)  # Adam's first steps amplify rounding
    scores = [next(e.score_completed for e in r.events() if e.HasField("score_completed")) for r in (alone, gang)]
    assert scores[0].num_tokens == scores[1].num_tokens
    assert scores[1].mismatch_kl == pytest.approx(scores[0].mismatch_kl, rel=1e-2)

    train_gang(broken, stop_at="3")
    assert broken.checkpoints() == [2, 3]
    train_gang(broken)
    assert broken.digests() == gang.digests()


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("determinism", ["strict", "best_effort"])
def test_a_run_of_one_goes_on_with_two(recorder: Recorder, make_config: Any, determinism: str) -> None:
    """A strict run in a lineage of its own; a best-effort one as it was, from a checkpoint of what is published."""
    recorder.record(make_config(ckpt={"interval": 1}, determinism=determinism, optim={"lr": 1e-3}), steps=4)
    assert recorder.train(stop_at=2) == 2
    train_gang(recorder)
    warnings = [event.warning for event in recorder.events() if event.HasField("warning")]
    if determinism == "strict":
        (told,) = [each.message for each in warnings if each.reason == "NEW_LINEAGE"]
        assert "2 instead of 1" in told and "version 3 begins lineage 1" in told
        assert _published(recorder) == [(0, 0), (0, 1), (0, 2), (1, 3), (1, 4)]
    else:
        assert not warnings
        assert _published(recorder) == [(0, version) for version in range(5)]
    assert [step.step for step in _steps(recorder)] == [0, 1, 2, 3]
    assert recorder.checkpoints()[-1] == 4


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_a_best_effort_run_replays_with_two_what_one_published(recorder: Recorder, make_config: Any) -> None:
    """What came out otherwise is not published: the first version above it begins a lineage."""
    recorder.record(make_config(ckpt={"interval": 2}, determinism="best_effort", optim={"lr": 1e-3}), steps=4)
    assert recorder.train(stop_at=3) == 3
    recorder.store.delete(f"{recorder.root}checkpoints/{3:08d}/manifest.json")
    train_gang(recorder)
    (told,) = [event.warning for event in recorder.events() if event.HasField("warning")]
    assert told.reason == "NEW_LINEAGE" and "begins lineage 1" in told.message
    assert _published(recorder) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 4)]


def _published(recorder: Recorder) -> list[tuple[int, int]]:
    """Return lineage and version of each policy."""
    keys = [info.key for info in recorder.store.list(f"{recorder.root}policies/")]
    names = {key.split("/")[-2] for key in keys if key.endswith("manifest.json")}
    return sorted((int(name[:4]), int(name[5:])) for name in names)
