"""How far an engine in bfloat16 and a trainer in float32 disagree on a mixture, without and with replayed experts."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.engine import GenerateRequest, Generation, PolicyIdentity, SamplingParams
from millrace.models.routing import RoutingShape, replay_routing
from millrace.rollouts.types import TrainSample
from millrace.trainer.learning.batch import build_micro_batch
from millrace.trainer.learning.forward import token_logprobs

pytestmark = pytest.mark.computes

_SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_experts_per_tok": 4,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "max_position_embeddings": 256,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 16, "num_key_value_heads": 2, "head_dim": 16, "norm_topk_prob": True},
    "deepseek_v3": {
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
    },
}
SAMPLES, PROMPT, SAMPLED = 24, 16, 48
STEP_SIZE = 1e-5


def _saved(kind: str, directory: Path) -> Path:
    """Write a mixture in bfloat16, as a policy for vLLM has it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **_SIZES, **SHAPES[kind]))
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.05)
    model.to(torch.bfloat16).save_pretrained(directory / kind)
    return directory / kind


async def _generated(directory: Path) -> list[tuple[list[int], Generation]]:
    engine = EmbeddedEngine(max_num_seqs=SAMPLES, returns_experts=True)
    await engine.load(directory, None, identity=PolicyIdentity(run_uid="r", lineage=0, version=0))
    random = np.random.default_rng(0)
    try:
        prompts = [random.integers(0, _SIZES["vocab_size"], PROMPT).tolist() for _ in range(SAMPLES)]
        sampling = [SamplingParams(max_tokens=SAMPLED, ignore_eos=True, seed=number) for number in range(SAMPLES)]
        requests = [
            GenerateRequest(request_id=str(number), prompt_token_ids=tuple(prompt), sampling=sampling[number])
            for number, prompt in enumerate(prompts)
        ]
        return list(zip(prompts, await asyncio.gather(*map(engine.generate, requests)), strict=True))
    finally:
        await engine.close()


def _sample(prompt: list[int], generation: Generation) -> TrainSample:
    zeros = np.zeros(len(prompt), np.float32)
    return TrainSample(
        token_ids=np.concatenate([np.array(prompt, np.int32), generation.token_ids]),
        loss_mask=np.concatenate([zeros, np.ones(len(generation.token_ids))]).astype(np.uint8),
        inference_logprobs=np.concatenate([zeros, generation.logprobs]),
        advantages=np.ones(len(prompt) + len(generation.token_ids), np.float32),
        ordinal=0,
        member=0,
        attempt=0,
        env="",
        reward=0.0,
        temperature=1.0,
        min_version=0,
        max_version=0,
        lineage=0,
        routed_experts=generation.routed_experts,
    )


def _mismatch(model: Any, samples: list[TrainSample], routing: RoutingShape | None) -> float:
    """Return the mean of k3 over the sampled tokens."""
    micro_batch = build_micro_batch(samples, seq_len=128, device=torch.device("cpu"), routing=routing)
    with torch.no_grad():
        logprobs_BT, _ = token_logprobs(model, micro_batch)
    ratio = (logprobs_BT - micro_batch.inference_logprobs_BT)[micro_batch.loss_mask_BT].double()
    return float((ratio.exp() - 1 - ratio).mean())


@pytest.mark.parametrize(("kind", "factor"), [("qwen3_moe", 5), ("deepseek_v3", 10)])
async def test_replayed_experts_remove_most_of_the_mismatch(kind: str, factor: float, tmp_path: Path) -> None:
    directory = _saved(kind, tmp_path)
    samples = [_sample(*each) for each in await _generated(directory)]
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    routing = replay_routing(model, key="trainer.model.moe.replay")
    free, replayed = _mismatch(model, samples, None), _mismatch(model, samples, routing)
    print(f"{kind}: mismatch_kl {free:.3g} without, {replayed:.3g} with replay")
    assert replayed * factor < free


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3"])
async def test_less_of_it_is_left_as_well_where_the_trainer_is_steps_ahead_of_the_engine(
    kind: str, tmp_path: Path
) -> None:
    """The samples stay those of version 0, and the trainer takes steps on others of it: what is left is the update."""
    directory = _saved(kind, tmp_path)
    generated = [_sample(*each) for each in await _generated(directory)]
    measured, trained = generated[: SAMPLES // 2], generated[SAMPLES // 2 :]
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    routing = replay_routing(model, key="trainer.model.moe.replay")
    optimizer = torch.optim.AdamW(model.parameters(), lr=STEP_SIZE, weight_decay=0.0)
    micro_batch = build_micro_batch(trained, seq_len=128, device=torch.device("cpu"), routing=routing)
    signs_B1 = torch.tensor([1.0, -1.0]).repeat(len(trained) // 2)[:, None]
    found: dict[int, tuple[float, float]] = {}
    for staleness in range(9):
        if staleness in (0, 2, 8):
            found[staleness] = (_mismatch(model, measured, None), _mismatch(model, measured, routing))
        logprobs_BT, _ = token_logprobs(model, micro_batch)
        optimizer.zero_grad()
        (-(signs_B1 * logprobs_BT)[micro_batch.loss_mask_BT].mean()).backward()
        optimizer.step()
    for staleness, (free, replayed) in found.items():
        print(f"{kind}, staleness {staleness}: mismatch_kl {free:.3g} without, {replayed:.3g} with replay")
    assert found[0][1] < found[8][1], "the policy is another one by now"
    assert all(2 * replayed < free for free, replayed in found.values())
