"""What a step's report says: how fast it was, how full the experts were, and what did not compile."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.config.sections.rl import RLConfig
from millrace.trainer.learning import learner
from millrace.trainer.learning.packing import FlopCount
from millrace.trainer.model.compiled import compile_blocks
from millrace_testing.model_files import write_tokenizer
from millrace_testing.trainer.equality import make_model
from millrace_testing.trainer.torchrun import train_gang

MakeConfig = Callable[..., RLConfig]
Recorder = Any  # conftest.Recorder; tests are not importable from one another

LOAD = ("max_vio/mean", "max_vio/max", "idle_experts/mean")


def steps_of(recorder: Recorder) -> list[Any]:
    return [event.step_completed for event in recorder.events() if event.HasField("step_completed")]


def test_a_report_has_tokens_per_second_and_mfu(recorder: Recorder, make_config: MakeConfig, tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    recorder.record(make_config(peak_tflops=0.5), steps=2)
    recorder.train()
    flops = FlopCount.of(AutoModelForCausalLM.from_pretrained(tiny_model))
    for step in steps_of(recorder):
        samples = recorder.make_samples(step.step)
        rate = sum(each.num_tokens for each in samples) / step.step_seconds
        assert step.metrics["perf/throughput"] == pytest.approx(rate)
        assert step.metrics["perf/throughput_per_gpu"] == pytest.approx(rate)
        needed = flops.of_samples(each.num_tokens for each in samples)
        assert step.metrics["perf/mfu"] == pytest.approx(needed / (0.5e12 * step.step_seconds))


def test_without_a_peak_there_is_no_mfu(recorder: Recorder, make_config: MakeConfig) -> None:
    recorder.record(make_config(), steps=1)
    recorder.train()
    (step,) = steps_of(recorder)
    assert step.metrics["perf/throughput"] > 0 and "perf/mfu" not in step.metrics


def make_uneven_model(directory: Path) -> Path:
    """Return a model with experts whose routers find all of them alike, and take the same two of eight for each
    token.
    """
    from transformers import AutoModelForCausalLM

    path = make_model("moe", directory)
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.zero_()
    model.save_pretrained(path)
    write_tokenizer(path, num_tokens=16)
    return path


def require_uneven(recorder: Recorder) -> None:
    """Two experts of eight have all tokens: four times their share each, and six have none."""
    first, *others = steps_of(recorder)
    assert [first.metrics[name] for name in LOAD] == [3.0, 3.0, 0.75]
    assert others
    for step in others:  # the routers have learned to tell tokens apart
        assert 0 < step.metrics["max_vio/mean"] <= step.metrics["max_vio/max"] <= 3.0
        assert 0 <= step.metrics["idle_experts/mean"] <= 0.75


def test_a_report_has_the_load_of_experts(recorder: Recorder, make_config: MakeConfig, tmp_path: Path) -> None:
    recorder.record(make_config(name=str(make_uneven_model(tmp_path))), steps=2)
    recorder.train()
    require_uneven(recorder)


@pytest.mark.long
def test_ranks_that_share_experts_report_their_load_and_speed(
    recorder: Recorder, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(
        name=str(make_uneven_model(tmp_path)), model={"seq_len": 32, "ep": 2}, micro_batch_tokens=48, peak_tflops=1.0
    )
    recorder.record(config, steps=2)
    train_gang(recorder)
    require_uneven(recorder)
    for step in steps_of(recorder):
        rate = step.num_tokens / step.step_seconds
        assert step.metrics["perf/throughput"] == pytest.approx(rate)
        assert step.metrics["perf/throughput_per_gpu"] == pytest.approx(rate / 2)
        assert 0 < step.metrics["perf/mfu"] < 1


def test_a_block_that_does_not_compile_is_one_warning(
    recorder: Recorder, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(graph: Any, inputs: Any) -> Callable[..., Any]:
        raise RuntimeError("no working C++ compiler found")

    monkeypatch.setattr(learner, "compile_blocks", partial(compile_blocks, backend=broken))
    recorder.record(make_config(model={"seq_len": 32, "compile": {}}), steps=2)
    assert recorder.train() == 2
    events = [event for event in recorder.events() if event.HasField("warning") or event.HasField("step_completed")]
    warnings = [event.warning for event in events if event.HasField("warning")]
    (failed,) = [warning for warning in warnings if warning.reason == "COMPILE_FAILED"]
    assert "Qwen3DecoderLayer" in failed.message and "no working C++ compiler found" in failed.message
    told = next(place for place, event in enumerate(events) if event.warning.reason == "COMPILE_FAILED")
    assert sum(event.HasField("step_completed") for event in events[:told]) == 1, "behind the first step"
