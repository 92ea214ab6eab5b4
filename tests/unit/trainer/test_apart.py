"""The trial of a model: in which company a sample is computed as it is alone."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, MambaConfig, Qwen3Config

from millrace.config.sections.trainer import PackConfig
from millrace.errors import InvalidSpecError
from millrace.models.context_length import fix_context_length
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.learning.packing import Apart, lengths_named, packing_of
from millrace.trainer.learning.plan import ALONE, plan_micro_batches
from millrace_testing import scaled_positions
from millrace_testing.scaled_positions import BORDER

SIZES: dict[str, Any] = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2}


def tried(model: nn.Module, *, longest: int = 48) -> tuple[bool, bool, bool]:
    found = Apart.of(model, longest=longest, tolerance=1e-4, device=torch.device("cpu"))
    return found.in_row, found.in_micro_batch, found.in_turn


def made(config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def with_chunks() -> Any:
    """Return a model whose embeddings change at the 16th token of a row, whichever sample is there."""
    chunks: dict[str, Any] = {"attention_chunk_size": 16}
    model = made(Qwen3Config(**SIZES, **HEADS, **chunks))

    def from_there(module: nn.Module, args: Any, embedded_RLD: torch.Tensor) -> torch.Tensor:
        return torch.cat([embedded_RLD[:, :16], 2 * embedded_RLD[:, 16:]], dim=1)

    model.get_input_embeddings().register_forward_hook(from_there)
    return model


def with_mean_of_rows() -> Any:
    """Return a model that computes a row from all rows of the call."""
    model = made(Qwen3Config(**SIZES, **HEADS))
    model.get_input_embeddings().register_forward_hook(
        lambda module, args, given: given - given.mean(0, keepdim=True) / 2
    )
    return model


def with_memory() -> Any:
    """Return a model that counts its calls."""
    model, calls = made(Qwen3Config(**SIZES, **HEADS)), []

    def later(module: nn.Module, args: Any, given: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return given * (1 + 0.1 * len(calls))

    model.get_input_embeddings().register_forward_hook(later)
    return model


def test_rows_of_full_attention_keep_samples_apart_at_every_length() -> None:
    windows = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    assert tried(made(Qwen3Config(**SIZES, **HEADS, **windows))) == (True, True, True)


def test_what_mixes_rows_only_beyond_a_length_of_the_config_is_seen() -> None:
    assert tried(with_chunks()) == (False, True, True)
    assert tried(with_chunks(), longest=16) == (True, True, True), "no sample gets so long"


def test_recurrent_layers_mix_a_row_and_nothing_else() -> None:
    config = MambaConfig(vocab_size=61, hidden_size=16, state_size=4, num_hidden_layers=2)
    assert tried(made(config)) == (False, True, True)


@pytest.mark.parametrize(("kind", "in_turn"), [("longrope", True), ("longrope_experts", True), ("dynamic", False)])
def test_factors_of_the_longest_row_are_seen_and_fixed_ones_are_apart(kind: str, in_turn: bool) -> None:
    assert tried(scaled_positions.model_of(kind)) == (True, False, in_turn)
    model = scaled_positions.model_of(kind)
    fix_context_length(model, 48)
    assert tried(model) == (True, True, True)


def test_positions_that_were_never_learned_are_not_tried() -> None:
    assert tried(made(GPT2Config(vocab_size=61, n_embd=16, n_layer=2, n_head=2, n_positions=BORDER))) == (True,) * 3


def test_lengths_are_found_wherever_a_config_keeps_them() -> None:
    assert lengths_named(scaled_positions.config_of("longrope"), below=1000) == [BORDER, 256]
    assert lengths_named(scaled_positions.config_of("longrope"), below=BORDER) == []
    nested = {
        "text_config": {"rope_parameters": {"full": {"original_max_position_embeddings": 32.0}}, "windows": [8, 16]}
    }
    config: Any = type("Config", (), {"to_dict": lambda self: {**nested, "hidden_size": 64, "use_window": True}})()
    assert lengths_named(config, below=1000) == [8, 16, 32]


def settled(model: nn.Module, mode: str) -> Any:
    config = PackConfig.model_validate({"mode": mode})
    return packing_of(model, config, longest=48, compute_dtype=torch.float32, gang=Gang())


@pytest.mark.parametrize("mode", ["auto", "never"])
def test_a_model_that_mixes_a_micro_batch_computes_each_sample_alone(
    mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert settled(with_mean_of_rows(), mode) is ALONE and "every micro-batch holds one sample" in caplog.text
    plan = plan_micro_batches([5, 9, 3], max_tokens=100, world_size=2, packing=ALONE)
    assert [[sum(map(len, rows)) for rows in rank] for rank in plan] == [[1, 1], [1, 0]]
    assert sorted(index for rank in plan for rows in rank for row in rows for index in row) == [0, 1, 2]
    with pytest.raises(InvalidSpecError, match="mixes the samples of one row"):
        settled(with_mean_of_rows(), "always")


@pytest.mark.parametrize("mode", ["auto", "never"])
def test_a_model_that_remembers_other_calls_is_refused(mode: str) -> None:
    with pytest.raises(InvalidSpecError, match="keeps something from call to call") as caught:
        settled(with_memory(), mode)
    assert caught.value.reason == "SAMPLES_MIXED"
