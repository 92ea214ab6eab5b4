"""Log-probs without the logits: equal to those of the logits, in the memory of a chunk."""

import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from millrace.rollouts.types import TrainSample
from millrace.trainer.learning import forward as head
from millrace.trainer.learning.batch import build_micro_batch
from millrace.trainer.learning.forward import Targets, linear_logprobs, select_logprobs, token_logprobs

ROWS, COLUMNS, VOCABULARY, HIDDEN = 3, 7, 37, 8


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation gives."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_iter(result):
            if isinstance(each, torch.Tensor):
                self.elements = max(self.elements, each.numel())
        return result


def inputs(dtype: torch.dtype, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(ROWS * COLUMNS, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64)
    bias = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64)
    hidden, weight, bias = (each.to(dtype).requires_grad_() for each in (hidden, weight, bias))
    return hidden, weight, bias


def targets(*, entropy: bool, kept: Callable[[int, torch.Tensor], torch.Tensor] | None = None) -> Targets:
    generator = torch.Generator().manual_seed(1)
    return Targets(
        places_N=torch.arange(ROWS * COLUMNS),
        labels_N=torch.randint(VOCABULARY, (ROWS * COLUMNS,), generator=generator),
        temperature_N=torch.tensor([0.7, 1.0, 1.9]).repeat_interleave(COLUMNS),
        is_entropy_learned=entropy,
        kept=kept,
    )


def gradients(both: torch.Tensor, of: tuple[torch.Tensor, ...], *, entropy: bool) -> tuple[torch.Tensor, ...]:
    weights = torch.randn(both.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(both)
    weights = weights if entropy else weights * torch.tensor([1.0, 0.0])
    return torch.autograd.grad((torch.nan_to_num(both, neginf=0.0) * weights).sum(), of)


def evens(start: int, z_NV: torch.Tensor) -> torch.Tensor:
    """Cut every odd token of the vocabulary at every third position."""
    places_N = torch.arange(start, start + len(z_NV))
    return (torch.arange(z_NV.shape[1]) % 2 == 0)[None] | (places_N % 3 != 0)[:, None]


@pytest.fixture(params=[(4, 5), (64, 64)], ids=["chunks", "one chunk"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(head.CHUNK, "cpu", request.param)
    monkeypatch.setattr(head, "SORTED_TOKENS", request.param[0])


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("entropy", [False, True], ids=["entropy known", "entropy learned"])
@pytest.mark.parametrize("kept", [None, evens], ids=["whole", "cut"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_values_and_gradients_are_those_of_the_logits(dtype: torch.dtype, kept: Any, entropy: bool) -> None:
    asked = targets(entropy=entropy, kept=kept)
    exact = inputs(torch.float64)
    logits_NV = nn.functional.linear(*exact)
    if kept is not None:
        logits_NV = logits_NV.masked_fill(~kept(0, logits_NV), -math.inf)
    wanted = torch.cat(
        select_logprobs(
            logits_NV[:, None],
            asked.labels_N[:, None],
            temperature_B=asked.temperature_N,
            is_entropy_learned=entropy,
        ),
        dim=-1,
    )
    given = inputs(dtype)
    found = linear_logprobs(*given, targets=asked)
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if dtype is torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    if kept is not None:
        assert bool((found[:, 0] == -math.inf).any()), "a label was cut away"
    torch.testing.assert_close(found.double(), wanted, **tolerance)
    expected = gradients(wanted, exact, entropy=entropy)
    for one, other in zip(gradients(found, given, entropy=entropy), expected, strict=True):
        torch.testing.assert_close(one.double(), other, **tolerance)


@pytest.mark.usefixtures("chunks")
def test_a_repetition_has_the_same_bits_and_a_frozen_head_no_gradient() -> None:
    asked = targets(entropy=True)
    hidden, weight, bias = inputs(torch.float32)
    ones = [gradients(linear_logprobs(hidden, weight, bias, targets=asked), (hidden, weight), entropy=True)]
    ones.append(gradients(linear_logprobs(hidden, weight, bias, targets=asked), (hidden, weight), entropy=True))
    assert all(torch.equal(one, other) for one, other in zip(*ones, strict=True))
    frozen = linear_logprobs(hidden, weight.detach(), targets=asked)
    (alone,) = gradients(frozen, (hidden,), entropy=True)
    assert alone.shape == hidden.shape and weight.grad is None


def test_what_is_not_finite_stays_so() -> None:
    hidden, weight, _ = (each.detach().clone() for each in inputs(torch.float32))
    hidden[4, 0] = math.nan
    found = linear_logprobs(hidden, weight, targets=targets(entropy=False))
    assert torch.isnan(found[4]).all() and torch.isfinite(found[:4]).all() and torch.isfinite(found[5:]).all()


@pytest.mark.parametrize("vocabulary", [20_000, 80_000])
@pytest.mark.parametrize("tokens", [300, 1200])
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
def test_no_tensor_is_as_large_as_the_logits(tokens: int, vocabulary: int, cut: bool) -> None:
    """The largest is a chunk, or the gradient of the weight, however many tokens and whatever the vocabulary."""

    def everything(start: int, z_NV: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(z_NV, dtype=torch.bool)

    hidden = torch.randn(tokens, 4, requires_grad=True)
    weight = torch.randn(vocabulary, 4, requires_grad=True)
    asked = Targets(
        places_N=torch.arange(tokens),
        labels_N=torch.zeros(tokens, dtype=torch.int64),
        temperature_N=torch.ones(tokens),
        is_entropy_learned=True,
        kept=everything if cut else None,
    )
    with Largest() as largest:
        linear_logprobs(hidden, weight, targets=asked).sum().backward()
    chunk = head.SORTED_TOKENS * vocabulary if cut else math.prod(head.CHUNK["cpu"])
    assert largest.elements <= max(chunk, weight.numel()) and largest.elements < tokens * vocabulary


def sample(length: int) -> TrainSample:
    mask = np.ones(length, np.uint8)
    return TrainSample(
        token_ids=np.random.default_rng(length).integers(0, 211, length).astype(np.int32),
        loss_mask=mask,
        inference_logprobs=-mask.astype(np.float32),
        advantages=mask.astype(np.float32),
        ordinal=0,
        member=0,
        attempt=0,
        env="e",
        reward=0.0,
        temperature=0.8,
        min_version=0,
        max_version=0,
        lineage=0,
    )


def model_of(kind: str) -> nn.Module:
    from transformers import GemmaConfig, LlamaConfig, Qwen3Config
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 211,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "initializer_range": 0.2,
    }
    torch.manual_seed(0)
    match kind:
        case "tied":
            config = Qwen3Config(**sizes, tie_word_embeddings=True)
        case "untied":
            config = LlamaConfig(**sizes, tie_word_embeddings=False)
        case _:
            config = GemmaConfig(**sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    if kind == "scaled":  # as Gemma 2 and Cohere do after their heads
        inner = model.forward

        def forward(**arguments: Any) -> Any:
            output = inner(**arguments)
            output.logits = 2 * torch.tanh(output.logits / 2)
            return output

        model.forward = forward
    return model


def test_what_is_tried_of_a_model_draws_no_dropout() -> None:
    """A resumed run meets such a model for the first time: its step has to draw what the run before it drew."""
    model = model_of("scaled")
    model.config.attention_dropout = 0.5
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    model.train()
    micro_batch = build_micro_batch([sample(9), sample(30)], seq_len=64, device=torch.device("cpu"))
    found: list[tuple[list[float], bytes]] = []
    for _ in range(2):
        torch.manual_seed(3)
        logprobs_BT, _ = token_logprobs(model, micro_batch)
        found.append((logprobs_BT.flatten().tolist(), torch.get_rng_state().numpy().tobytes()))
    before = torch.manual_seed(3).get_state().numpy().tobytes()
    assert found[0][1] != before, "there is dropout"
    assert found[0] == found[1]


class Saved:
    """What an operation keeps for its backward."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def test_what_is_tried_of_a_model_is_forgotten_before_it_is_computed_again() -> None:
    """Or the first micro-batch of a run holds its activations twice."""
    model = model_of("scaled")
    inner, saved, held = model.forward, weakref.WeakSet[Saved](), list[int]()

    def save(tensor: torch.Tensor) -> Saved:
        saved.add(found := Saved(tensor.detach()))  # or it would keep itself
        return found

    def forward(**arguments: Any) -> Any:
        held.append(len(saved))
        return inner(**arguments)

    model.forward = forward
    with torch.autograd.graph.saved_tensors_hooks(save, lambda each: each.tensor):
        found = token_logprobs(model, build_micro_batch([sample(9)], seq_len=64, device=torch.device("cpu")))
        assert found[0].requires_grad and len(saved) > 10
    assert held == [0, 0], "it is tried once, then computed"


@pytest.mark.parametrize("kind", ["tied", "untied", "scaled"])
def test_a_model_is_asked_for_no_logits_unless_it_changes_them(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(head.CHUNK, "cpu", (1024, 64))
    model = model_of(kind)
    samples = [sample(length) for length in (9, 30, 17)]
    micro_batch = build_micro_batch(samples, seq_len=64, device=torch.device("cpu"))
    found = token_logprobs(model, micro_batch, is_entropy_learned=True)
    with Largest() as largest:
        found = token_logprobs(model, micro_batch, is_entropy_learned=True)
    attention_BT = torch.tensor([[1] * len(each.token_ids) + [0] * (30 - len(each.token_ids)) for each in samples])
    logits_BKV = model(input_ids=micro_batch.token_ids_BT, attention_mask=attention_BT).logits[:, :-1]
    scored_BK = micro_batch.loss_mask_BT[:, 1:]
    wanted = select_logprobs(
        logits_BKV,
        micro_batch.token_ids_BT[:, 1:],
        temperature_B=micro_batch.sampled.temperature_W[micro_batch.sampled.way_BT[:, 0]],
        is_entropy_learned=True,
    )
    parameters = tuple(model.parameters())
    for one, other in zip(found, wanted, strict=True):
        one, other = one[:, 1:][scored_BK], other[scored_BK]
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        ones = torch.autograd.grad(one.sum(), parameters, retain_graph=True)
        others = torch.autograd.grad(other.sum(), parameters, retain_graph=True)
        for mine, theirs in zip(ones, others, strict=True):
            assert float((mine - theirs).abs().max()) <= 1e-5 * max(float(theirs.abs().max()), 1.0)
    assert (largest.elements >= logits_BKV.numel()) == (kind == "scaled")
