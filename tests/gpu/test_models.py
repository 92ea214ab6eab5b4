"""Models on a GPU: what is read, what a sample is computed from, and what leaves the device."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from millrace.config.sections.rl import TrainerBench
from millrace.custom_code import CustomCode
from millrace.models.context_length import fix_context_length
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.learning.batch import build_micro_batch, fake_sample
from millrace.trainer.learning.forward import token_logprobs
from millrace.trainer.learning.learner import Learner
from millrace.trainer.learning.packing import Apart
from millrace.trainer.model.context_parallel import use_varlen_kernel
from millrace.trainer.model.mesh import RankLayout
from millrace.trainer.model.pretrained import load_model
from millrace.trainer.model.published import Snapshots
from millrace_testing import scaled_positions
from millrace_testing.model_files import make_qwen3, rewrite
from millrace_testing.quantized_files import in_fp8, say_quantized, write_mxfp4
from millrace_testing.scaled_positions import BORDER
from millrace_testing.trainer.families import OTHERS, make_other

pytestmark = pytest.mark.gpu
LONGEST = 2 * BORDER


def _whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _learned(directory: Path, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the weights from which a trainer on that device begins."""
    keys = {
        "trainer": {"model": {"name": str(directory), "seq_len": 32, "dtype": "float32"}},
        "data": {"batch_size": 4, "seq_len": 32},
    }
    gang = Gang(device=device)
    try:
        bench = TrainerBench.model_validate(keys | {"steps": 1})
        at = {"directory": directory, "start_directory": directory}
        learner = Learner.of_start_model(bench, gang=gang, code=CustomCode(), **at)
        return {name: _whole(tensor).cpu() for name, tensor in learner.model.state_dict().items()}
    finally:
        torch.use_deterministic_algorithms(False)
        gang.leave()


def _fp8(directory: Path) -> Path:
    rewrite(make_qwen3(directory, is_tied=False), in_fp8((8, 8)))
    return say_quantized(directory, {"quant_method": "fp8", "weight_block_size": [8, 8]})


def _mxfp4(directory: Path) -> Path:
    write_mxfp4(directory)
    return directory


@pytest.mark.parametrize("write", [_fp8, _mxfp4])
def test_quantized_files_begin_with_the_same_numbers_as_on_a_cpu(gpu: torch.device, tmp_path: Path, write: Any) -> None:
    directory = write(tmp_path)
    expected, found = load_model(directory).state_dict(), _learned(directory, gpu)
    assert expected.keys() == found.keys()
    assert all(torch.equal(tensor, found[name].to(tensor.dtype)) for name, tensor in expected.items())


@pytest.mark.parametrize("name", [each for each in OTHERS if "experts" in each or "moe" in each or "oss" in each])
def test_what_is_kept_in_float32_leaves_the_gpu_in_float32(gpu: torch.device, tmp_path: Path, name: str) -> None:
    directory = make_other(name, tmp_path)
    published = []
    for device in (torch.device("cpu"), gpu):
        snapshots = Snapshots(
            load_model(directory).to(device), dtype=torch.bfloat16, rank=0, device=device, layout=RankLayout()
        )
        published.append({each.name: (each.dtype, each.bits.tobytes()) for each in snapshots.take(1)})
        snapshots.close()
    assert published[0] == published[1]


def _logprobs(model: Any, lengths: list[int], device: torch.device) -> list[torch.Tensor]:
    """Those of made-up samples, each in a row of its own of one micro-batch."""
    samples = []
    for length in lengths:
        sample = fake_sample(length, vocabulary=272)
        sample.token_ids[:] = np.random.default_rng(length).integers(0, 256, length)
        samples.append(sample)
    rows = [[index] for index in range(len(lengths))]
    micro_batch = build_micro_batch(samples, rows=rows, seq_len=max(lengths), device=device)
    with torch.no_grad():
        logprobs_BT, _ = token_logprobs(model, micro_batch)
    return [row[1:length].double().cpu() for row, length in zip(logprobs_BT, lengths, strict=True)]


@pytest.mark.parametrize("kind", scaled_positions.KINDS)
def test_samples_on_both_sides_of_a_border_are_their_own(gpu: torch.device, kind: str) -> None:
    """As a run computes them: apart and together, and as a CPU does."""
    models = []
    for device in (torch.device("cpu"), gpu):
        model = scaled_positions.model_of(kind).to(device)
        fix_context_length(model, LONGEST)
        models.append(model)
    found = Apart.of(models[1], longest=LONGEST, tolerance=1e-4, device=gpu)
    assert (found.in_row, found.in_micro_batch, found.in_turn) == (True, True, True)
    lengths = [BORDER - 4, BORDER, BORDER + 1, LONGEST]
    together = _logprobs(models[1], lengths, gpu)
    for length, one, other in zip(lengths, together, _logprobs(models[0], lengths, torch.device("cpu")), strict=True):
        [alone] = _logprobs(models[1], [length], gpu)
        assert float((one - alone).abs().max()) <= 1e-4
        assert float((one - other).abs().max()) <= 1e-3


def test_a_border_is_kept_by_the_kernel_for_varying_lengths(gpu: torch.device) -> None:
    """Packed rows of bfloat16, in which short samples are behind long ones."""
    torch.manual_seed(0)
    config = scaled_positions.config_of("longrope")
    model = AutoModelForCausalLM.from_config(config).eval().to(gpu).bfloat16()
    fix_context_length(model, LONGEST)
    assert use_varlen_kernel(model, compute_dtype=torch.bfloat16, device=gpu)
    found = Apart.of(model, longest=LONGEST, tolerance=2e-2, device=gpu)
    assert (found.in_row, found.in_micro_batch, found.in_turn) == (True, True, True)
