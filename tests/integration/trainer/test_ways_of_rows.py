"""How rows are made follows from the record and the device, is in every checkpoint, and is compared at a resume."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from millrace.config.sections.rl import RLConfig
from millrace.config.sections.trainer import PackConfig
from millrace.errors import InvalidStateError
from millrace.trainer import job
from millrace.trainer.learning import learner
from millrace.trainer.learning.plan import Packing

MakeConfig = Callable[..., RLConfig]
Recorder = Any  # conftest.Recorder; tests are not importable from one another


@pytest.mark.parametrize("other", ["a kernel for varying lengths", "one sample each"])
def test_a_device_that_makes_rows_otherwise_is_refused_under_strict_only(
    recorder: Recorder, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    settle = learner.packing_of

    def settle_otherwise(*args: Any, **keys: Any) -> Packing | None:
        found = settle(*args, **keys)
        assert found is not None
        return replace(found, is_varlen=True) if other.startswith("a kernel") else None

    recorder.record(make_config(ckpt={"interval": 2}), steps=4, close=False)
    recorder.train(stop_at=2)
    monkeypatch.setattr(learner, "packing_of", settle_otherwise)
    now = "one sample each" if other == "one sample each" else r".*is_varlen True"
    with pytest.raises(InvalidStateError, match=rf"rows was packed by cost: .*is_varlen False.*, is {now}") as raised:
        recorder.train(stop_at=4)
    assert raised.value.reason == "CHECKPOINT_CONDITIONS_DIFFER"
    monkeypatch.setattr(learner, "packing_of", settle)
    recorder.train(stop_at=4)


def test_best_effort_goes_on_with_other_rows_and_the_next_checkpoint_says_which(
    recorder: Recorder, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder.record(make_config(ckpt={"interval": 2}, determinism="best_effort"), steps=4, close=False)
    recorder.train(stop_at=2)
    monkeypatch.setattr(learner, "packing_of", lambda *args, **keys: None)
    recorder.train(stop_at=4)
    assert _rows(recorder, 2).startswith("packed by cost: ") and _rows(recorder, 4) == "one sample each"


def test_rows_are_made_by_the_costs_in_the_record(recorder: Recorder, make_config: MakeConfig) -> None:
    """Not by the defaults of the release that reads it."""
    recorder.record(make_config(ckpt={"interval": 2}, pack={"masked_cost": 7.25}), steps=2, close=False)
    recorder.train(stop_at=2)
    record = json.loads(recorder.store.get(f"{recorder.root}run.json"))
    costs = record["config"]["trainer"]["pack"]
    assert costs["masked_cost"] == 7.25 and costs["causal_cost"] == PackConfig().causal_cost
    words = _rows(recorder, 2)
    assert f"causal_cost {costs['causal_cost']}, masked_cost 7.25, is_always False, is_varlen False" in words


def test_a_checkpoint_that_says_nothing_of_rows_is_gone_on_from(
    recorder: Recorder, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of releases before the fact was kept."""
    recorder.record(make_config(ckpt={"interval": 2}), steps=4, close=False)
    with monkeypatch.context() as older:
        older.setattr(job, "how_rows_are_made", lambda packing: "")
        recorder.train(stop_at=2)
    recorder.train(stop_at=4)
    assert _rows(recorder, 4).startswith("packed by cost: ")


def _rows(recorder: Recorder, step: int) -> str:
    """Return how the trainer of a checkpoint made its rows."""
    manifest = json.loads(recorder.store.get(f"{recorder.root}checkpoints/{step:08d}/manifest.json"))
    return manifest["conditions"]["rows"]
