"""The estimate against the peak that torch's allocator measures over the trainer's real steps on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    GPT2Config,
    MixtralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from millrace.config.sections.rl import RLConfig
from millrace.trainer.estimate_step import simulate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "decoder_sparse_step": 1}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "dense": (Qwen3Config(vocab_size=2048, tie_word_embeddings=False, **SHAPE), {}),
    "recomputed, large tied vocabulary": (
        Qwen3Config(vocab_size=50000, tie_word_embeddings=True, **SHAPE),
        {"ac": {"mode": "full"}},
    ),
    "adapters": (Qwen3Config(vocab_size=2048, tie_word_embeddings=False, **SHAPE), {"lora": {"rank": 16}}),
    "experts, recomputed selectively": (
        Qwen3MoeConfig(vocab_size=2048, tie_word_embeddings=False, **SHAPE, **MOE),
        {"ac": {"mode": "selective"}},
    ),
    "Gemma 2, capped scores and windows": (Gemma2Config(vocab_size=2048, **SHAPE), {}),
    "GPT-2, positions that are learned": (
        GPT2Config(vocab_size=2048, n_embd=256, n_layer=8, n_head=4, n_positions=512, bos_token_id=1, eos_token_id=1),
        {},
    ),
    "Mixtral": (MixtralConfig(vocab_size=2048, num_local_experts=4, num_experts_per_tok=2, **SHAPE), {}),
    "DeepSeek V3": (
        DeepseekV3Config(
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=2048,
            moe_intermediate_size=256,
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            q_lora_rank=64,
            kv_lora_rank=64,
            qk_nope_head_dim=32,
            qk_rope_head_dim=16,
            v_head_dim=32,
        ),
        {},
    ),
}


def measured(config: RLConfig, directory: Path) -> int:
    """Return the peak in a process of its own."""
    asked = json.dumps({"config": config.model_dump(mode="json"), "directory": str(directory)})
    command = [sys.executable, "-m", "millrace_testing.trainer.measured_step"]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=600, env=environ)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])["peak"]


@pytest.mark.parametrize("case", CASES)
def test_within_a_tenth_of_what_is_measured(case: str, tmp_path: Path):
    model_config, keys = CASES[case]
    AutoModelForCausalLM.from_config(model_config).save_pretrained(tmp_path)
    config = RLConfig.model_validate(
        {
            "model": {"name": str(tmp_path)},
            "trainer": {"model": {"name": str(tmp_path), "seq_len": 512, **keys}, "micro_batch_tokens": 2048},
            "orchestrator": {
                "env": [{"id": "reverse-text"}],
                "model": {"name": str(tmp_path)},
                "seq_len": 512,
                "batch_size": 4,
                "rollouts_per_example": 2,
            },
        }
    )
    estimated = simulate(config.trainer, AutoConfig.from_pretrained(tmp_path), num_gpus=0).peak
    peak = measured(config, tmp_path)
    print(
        f"{case}: estimated {estimated / 2**20:.1f} MiB, measured {peak / 2**20:.1f} MiB, {estimated / peak - 1:+.1%}"
    )
    assert abs(estimated / peak - 1) < 0.1
