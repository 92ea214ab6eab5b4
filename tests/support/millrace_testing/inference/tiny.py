"""A tiny Qwen3 with a byte-level tokenizer, as files, and reference log-probs from a plain forward pass."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from millrace.inference.embedded import loader
from millrace.models.saved import saved_tensors
from millrace.policies.digest import digest_hex, policy_digest, tensor_digest
from millrace.policies.manifest import StagedPolicy
from millrace.policies.tensors import TensorBytes

torch.set_num_threads(1)

END = "<|im_end|>"
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.x }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_config(**changes: object) -> Qwen3Config:
    return Qwen3Config(
        **{
            "architectures": ["Qwen3ForCausalLM"],
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 192,
            "tie_word_embeddings": True,
            "vocab_size": 272,
            "initializer_range": 0.08,
            "max_position_embeddings": 256,
            "eos_token_id": 258,
            "pad_token_id": 256,
            "dtype": "float32",
            **changes,
        }
    )


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate([*alphabet, "<|endoftext|>", "<|im_start|>", END])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=TEMPLATE,
    )


def tiny_model(seed: int, **changes: object) -> torch.nn.Module:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(tiny_config(**changes)).eval().requires_grad_(False)


def tensors_of(model: torch.nn.Module) -> dict[str, TensorBytes]:
    """Return the tensors a trainer publishes, under the names of the saved model. A tied lm_head is left out."""
    seen: dict[int, str] = {}
    state = model.state_dict()
    own = {name: tensor for name, tensor in state.items() if seen.setdefault(tensor.data_ptr(), name) == name}
    saved = saved_tensors(model, {name: tensor.shape for name, tensor in own.items()})
    return {
        part.name: loader.as_tensor_bytes(tensor.reshape(-1)[part.start : part.end].reshape(part.shape))
        for name, tensor in own.items()
        for part in saved[name]
    }


def staged_of(
    tensors: torch.nn.Module | Mapping[str, TensorBytes], probe: Any = None, adapter: Any = None, **fields: Any
) -> StagedPolicy:
    """Return a staged policy. Its manifest has only what engines read: digest, probe and adapter."""
    held = tensors_of(tensors) if isinstance(tensors, torch.nn.Module) else tensors
    digest = policy_digest({n: (t.dtype, t.shape, digest_hex(tensor_digest(t))) for n, t in held.items()})
    manifest: Any = SimpleNamespace(digest=digest, probe=probe, adapter=adapter)
    return StagedPolicy(manifest=manifest, tensors=held, **fields)


def reference_logprobs(model: torch.nn.Module, prompt: list[int], completion: list[int], temperature: float = 1.0):
    """Return the completion's log-probs, float32 [T], by one forward pass over prompt and completion."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].float()
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    return logprobs[torch.arange(len(completion)), torch.tensor(completion)].numpy()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the config and the tokenizer, without weights."""
    path = tmp_path_factory.mktemp("tiny")
    tiny_config().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def make_model() -> Callable[..., torch.nn.Module]:
    return tiny_model


@pytest.fixture(scope="session")
def make_tensors() -> Callable[[torch.nn.Module], dict[str, TensorBytes]]:
    return tensors_of


@pytest.fixture(scope="session")
def make_staged() -> Callable[..., StagedPolicy]:
    return staged_of


@pytest.fixture(scope="session")
def reference() -> Callable[..., np.ndarray]:
    return reference_logprobs
