"""Rotary factors that follow the longest position of a call, fixed by the length of the context."""

import copy

import pytest
import torch
from torch import nn

from millrace.models.context_length import contexts_like, fix_context_length
from millrace_testing import scaled_positions
from millrace_testing.inference import tiny
from millrace_testing.scaled_positions import BORDER, KINDS

LONG = 40
SHORT_TOKENS, LONG_TOKENS = torch.arange(3, 13)[None], torch.arange(50, 50 + LONG)[None]


@torch.no_grad()
def logits(model: nn.Module, *rows: torch.Tensor) -> torch.Tensor:
    """Those of the first row, computed beside the others."""
    width = max(row.shape[1] for row in rows)
    tokens = torch.cat([nn.functional.pad(row, (0, width - row.shape[1])) for row in rows])
    return model(input_ids=tokens).logits[0, : rows[0].shape[1]]


def fixed(kind: str, length: int) -> nn.Module:
    model = scaled_positions.model_of(kind)
    fix_context_length(model, length)
    return model


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


@pytest.mark.parametrize("length", [BORDER, LONG])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_its_own_beside_others_and_behind_others(kind: str, length: int) -> None:
    model, other = fixed(kind, length), SHORT_TOKENS + 9 if length == BORDER else LONG_TOKENS
    alone = logits(model, SHORT_TOKENS)
    assert apart(logits(model, SHORT_TOKENS, other), alone) < 1e-5
    logits(model, other)
    assert torch.equal(logits(model, SHORT_TOKENS), alone)


@pytest.mark.parametrize("kind", KINDS)
def test_without_it_a_row_takes_the_factors_of_the_longest(kind: str) -> None:
    model = scaled_positions.model_of(kind)
    assert apart(logits(model, SHORT_TOKENS, LONG_TOKENS), logits(model, SHORT_TOKENS)) > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_the_factors_are_those_of_a_sequence_as_long_as_the_context(kind: str) -> None:
    library = scaled_positions.model_of(kind)
    assert apart(logits(fixed(kind, BORDER), SHORT_TOKENS), logits(library, SHORT_TOKENS)) < 1e-5
    assert apart(logits(fixed(kind, LONG), LONG_TOKENS), logits(library, LONG_TOKENS)) < 1e-5
    assert apart(logits(fixed(kind, LONG), SHORT_TOKENS), logits(fixed(kind, BORDER), SHORT_TOKENS)) > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_padding_behind_the_context_changes_nothing(kind: str) -> None:
    padded = nn.functional.pad(SHORT_TOKENS, (0, 64))
    found = logits(fixed(kind, BORDER), padded)[: SHORT_TOKENS.shape[1]]
    assert apart(found, logits(fixed(kind, BORDER), SHORT_TOKENS)) < 1e-5


@pytest.mark.parametrize(
    ("kind", "length", "contexts"),
    [
        ("longrope", 2, (2, BORDER)),
        ("longrope", BORDER, (2, BORDER)),
        ("longrope", BORDER + 1, (BORDER + 1,)),
        ("longrope_experts", LONG, (BORDER + 1,)),
        ("dynamic", BORDER, (2, BORDER)),
        ("dynamic", LONG, (LONG, LONG)),
    ],
)
def test_the_contexts_that_have_the_same_factors(kind: str, length: int, contexts: tuple[int, ...]) -> None:
    assert contexts_like(fixed(kind, length)) == contexts


def test_a_copy_is_fixed_by_itself() -> None:
    model = fixed("longrope", LONG)
    twin = copy.deepcopy(model)
    del model
    alone = logits(twin, SHORT_TOKENS)
    assert apart(logits(twin, SHORT_TOKENS, LONG_TOKENS), alone) < 1e-5


def test_other_models_stay_as_they_are() -> None:
    model = tiny.tiny_model(0)
    before = logits(model, SHORT_TOKENS)
    fix_context_length(model, 8)
    assert contexts_like(model) == () and torch.equal(logits(model, SHORT_TOKENS), before)


def test_layers_of_several_types_are_fixed_each() -> None:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    longrope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [8.0] * 4,
        "original_max_position_embeddings": BORDER,
    }
    config = Gemma3TextConfig(
        vocab_size=272,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.2,
        sliding_window=16,
        max_position_embeddings=256,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": longrope},
    )
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(config).eval()
    before = apart(logits(model, SHORT_TOKENS, LONG_TOKENS), logits(model, SHORT_TOKENS))
    fix_context_length(model, LONG)
    assert contexts_like(model) == (BORDER + 1,)
    assert apart(logits(model, SHORT_TOKENS, LONG_TOKENS), logits(model, SHORT_TOKENS)) < 1e-5 < before
