"""Other shapes of models in the embedded engine, and the weights' side of updates."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GemmaConfig, LlamaConfig, MistralConfig

from millrace.errors import InvalidStateError
from millrace.inference.embedded import loader
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.embedded.loader import load_model
from millrace.inference.engine import GenerateRequest, PolicyIdentity, SamplingParams

V0 = PolicyIdentity(run_uid="r", lineage=0, version=0)
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}


async def play(directory, staged, prompt: list[int]):
    engine = EmbeddedEngine()
    try:
        await engine.load(directory, staged, identity=V0)
        sampling = SamplingParams(max_tokens=30, seed=1, ignore_eos=True)
        held = await engine.prove(staged) if staged else None
        request = GenerateRequest(request_id="1", prompt_token_ids=tuple(prompt), sampling=sampling)
        return await engine.generate(request), held
    finally:
        await engine.close()


@pytest.mark.parametrize(
    "config",
    [LlamaConfig(**SMALL), GemmaConfig(**SMALL, head_dim=8), LlamaConfig(**SMALL, tie_word_embeddings=True)],
    ids=["llama", "gemma", "llama-tied"],
)
async def test_other_architectures_are_exact(config, tmp_path, make_tensors, make_staged, reference):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    config.save_pretrained(tmp_path)
    tensors = make_tensors(model)
    assert ("lm_head.weight" in tensors) == (not config.tie_word_embeddings)
    got, _ = await play(tmp_path, make_staged(tensors), [1, 2, 3])
    np.testing.assert_allclose(got.logprobs, reference(model, [1, 2, 3], got.token_ids.tolist()), atol=1e-5)


async def test_bfloat16_policies_keep_their_bits(tmp_path, make_model, make_tensors, make_staged, reference):
    from millrace.policies.digest import digest_hex, policy_digest, tensor_digest

    model = make_model(0).to(torch.bfloat16)
    model.config.save_pretrained(tmp_path)
    tensors = make_tensors(model)
    got, held = await play(tmp_path, make_staged(tensors), [1, 2, 3])
    published = policy_digest({n: (t.dtype, t.shape, digest_hex(tensor_digest(t))) for n, t in tensors.items()})
    assert held is not None and held.digest == published
    # bf16 rounds differently in another batch shape: 5e-2 is what is seen between engines, see PLATFORM figures
    expected = reference(model, [1, 2, 3], got.token_ids.tolist())
    assert np.abs(got.logprobs - expected).mean() < 5e-2


async def test_a_directory_with_weights_loads_without_tensors(tmp_path, make_model, reference):
    model = make_model(0)
    model.save_pretrained(tmp_path)
    got, _ = await play(tmp_path, None, [1, 2, 3])
    np.testing.assert_allclose(got.logprobs, reference(model, [1, 2, 3], got.token_ids.tolist()), atol=1e-5)


def test_models_that_the_cache_cannot_run_are_refused(tmp_path):
    AutoModelForCausalLM.from_config(MistralConfig(**SMALL, sliding_window=16)).save_pretrained(tmp_path)
    with pytest.raises(InvalidStateError, match="sliding window of 16"):
        load_model(tmp_path, None, context_length=17)
    with pytest.raises(InvalidStateError, match=r"config\.json"):
        load_model(tmp_path / "nowhere", {}, context_length=17)
    assert load_model(tmp_path, None, context_length=16) is not None, "no sequence gets out of its window"


def test_tied_names_must_agree(make_model, make_tensors):
    model = make_model(0)
    tensors = make_tensors(model)
    tied = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    loader.check_tensors(model, tied)
    other = make_tensors(make_model(1))
    with pytest.raises(InvalidStateError, match="tied"):
        loader.check_tensors(model, {**tensors, "lm_head.weight": other["model.embed_tokens.weight"]})


def test_mixed_dtypes_are_refused_with_examples(make_model, make_tensors):
    model = make_model(0)
    tensors = make_tensors(model)
    half = make_tensors(make_model(0).to(torch.bfloat16))
    mixed = {**tensors, "model.norm.weight": half["model.norm.weight"]}
    with pytest.raises(InvalidStateError, match=r"bfloat16 \(model\.norm\.weight\), float32 \("):
        loader.hold_formats(model, mixed)  # nothing of this model is kept in float32
    with pytest.raises(InvalidStateError, match=r"bfloat16 \(model\.norm\.weight\), float16 \("):
        loader.float_dtype(mixed | {"lm_head.weight": make_tensors(make_model(0).half())["model.norm.weight"]})
