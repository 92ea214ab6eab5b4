"""What vLLM gets of a GPU that the trainer uses, too."""

import json
from pathlib import Path

import pytest

from millrace.config import RLConfig
from millrace.config.load import load
from millrace.errors import InvalidStateError
from millrace.local.gpus import SHARED_UTILIZATION, engine_share, flags_on_shared_gpu, memory_gib

pytestmark = pytest.mark.computes

SHARED = {"inference": (0,), "trainer": (0,)}
SLEEPS = ("--inference.sleep-while-training", "true", "--async-level", "0")
SHAPE = {
    "model_type": "qwen3",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32_000,
}


@pytest.fixture
def shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes a driver that shows GPUs with so many MiB."""

    def show(*mib: int) -> None:
        rows = "\n".join(f"echo {index}, {size}" for index, size in enumerate(mib))
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{rows}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return show


@pytest.fixture
def config(tmp_path: Path, request: pytest.FixtureRequest) -> RLConfig:
    """Return a run whose step takes 1.7 GiB on a GPU; a parameter is more of its flags."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SHAPE))
    flags = ["--model.name", str(model), "--orchestrator.env", '[{"id": "reverse-text"}]', "--max-steps", "1"]
    flags += ["--orchestrator.rollouts-per-example", "8", "--orchestrator.batch-size", "64"]
    return load(RLConfig, [*flags, *getattr(request, "param", ())]).config


def test_the_driver_says_how_large_the_smallest_of_them_is(shows):
    shows(81_559, 40_960)
    assert memory_gib([0]) == pytest.approx(79.65, abs=0.01) and memory_gib([0, 1]) == 40
    assert memory_gib([2]) is None and memory_gib([]) is None


@pytest.mark.long
async def test_a_small_gpu_gives_vllm_what_the_step_leaves_and_one_that_is_too_small_is_refused(shows, config):
    shows(8 * 1024)
    share = await engine_share(config, SHARED)
    assert 0.25 < share < 0.3, "a step takes 1.7 GiB, the runtime 4"
    shows(7 * 1024)
    with pytest.raises(InvalidStateError, match=r"do not fit onto one GPU of 7 GiB: a step takes 1\.7 GiB") as refused:
        await engine_share(config, SHARED)
    assert refused.value.reason == "GPU_TOO_SMALL"
    remedy = str(refused.value.remedy)
    assert "--gpus" not in remedy and "inference.gpu_memory_utilization" in remedy


@pytest.mark.long
async def test_keys_that_make_room_are_named_and_a_large_gpu_leaves_vllm_its_share(shows, config):
    notes: list[str] = []
    shows(80 * 1024)
    assert await engine_share(config, SHARED, note=notes.append) == SHARED_UTILIZATION
    assert notes == ["computing what the trainer leaves of the GPU to vLLM"]
    shows(7578)  # 0.4 GiB more would do
    with pytest.raises(InvalidStateError) as refused:
        await engine_share(config, SHARED)
    assert str(refused.value.remedy).startswith("set trainer.")


@pytest.mark.long
@pytest.mark.parametrize("config", [SLEEPS], indirect=True)
async def test_a_vllm_that_sleeps_gets_what_is_left_between_two_steps(shows, config):
    shows(8 * 1024)
    share = await engine_share(config, SHARED)
    assert 0.35 < share < 0.5, "the runtime takes 4 of 8 GiB, weights and moments 0.4"
    shows(7 * 1024)  # less the 4 and 2 of vLLM leaves 1 GiB to a step of 1.7
    with pytest.raises(InvalidStateError, match=r"a step takes 1\.7 GiB beside 2 GiB of a sleeping vLLM") as refused:
        await engine_share(config, SHARED)
    assert refused.value.reason == "GPU_TOO_SMALL" and "let vLLM sleep" not in str(refused.value.remedy)


@pytest.mark.long
async def test_without_an_answer_vllm_gets_its_share_and_the_reason_is_told(shows, config, tmp_path):
    notes: list[str] = []
    shows(8 * 1024)
    (tmp_path / "model" / "config.json").unlink()
    assert await engine_share(config, SHARED, note=notes.append) == SHARED_UTILIZATION
    assert "what the trainer takes is not known" in notes[-1] and "config.json" in notes[-1]


@pytest.mark.parametrize(
    "said", ["gpu-memory-utilization", "gpu_memory_utilization", "inference.gpu_memory_utilization"]
)
def test_a_stack_that_stands_takes_the_share_unless_another_one_is_said(said):
    assert json.loads(flags_on_shared_gpu("")) == {"inference.gpu_memory_utilization": SHARED_UTILIZATION}
    assert json.loads(flags_on_shared_gpu('{"seed": 1}'))["seed"] == 1
    flags = json.dumps({said: 0.7})
    assert flags_on_shared_gpu(flags) == flags
    assert flags_on_shared_gpu("[") == "["
