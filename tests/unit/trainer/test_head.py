"""Log-probs without the logits: equal to those of the logits, in the memory of a chunk."""

import logging
import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from millrace.config.sections.loss import CorrectionConfig, KlConfig, LossConfig
from millrace.rollouts.types import TrainSample, Truncation
from millrace.trainer.learning import forward as head
from millrace.trainer.learning.batch import build_micro_batch
from millrace.trainer.learning.forward import OnePass, Targets, linear_logprobs, select_logprobs, token_logprobs
from millrace.trainer.losses import LOSSES, Objective, token_losses

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
    monkeypatch.setitem(head.WHOLE_BYTES, "cpu", request.param[0] * VOCABULARY * 8)
    monkeypatch.setitem(head.CACHED_COLUMNS, "cpu", request.param[1])


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


def by_token(both_N2: torch.Tensor, *, entropy: bool) -> torch.Tensor:
    """A loss that is curved in every log-prob (and entropy), so that a slope at another value would show."""
    logprobs_N, entropy_N = torch.nan_to_num(both_N2, neginf=0.0).unbind(-1)
    shares_N = torch.sin(logprobs_N) + (torch.cos(2 * entropy_N) if entropy else 0.0)
    return (shares_N * torch.linspace(0.5, 1.5, len(both_N2), dtype=both_N2.dtype)).sum()


def one_pass(asked: Targets, *, entropy: bool) -> Targets:
    """The targets with the slopes of `by_token`."""

    def slopes(tokens: slice, both_C2: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            own_C2 = both_C2.requires_grad_()
            whole_N2 = own_C2.new_zeros((ROWS * COLUMNS, 2)).index_put((torch.arange(ROWS * COLUMNS)[tokens],), own_C2)
            return torch.autograd.grad(by_token(whole_N2, entropy=entropy), own_C2)[0]

    return replace(asked, slopes=slopes)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("entropy", [False, True], ids=["entropy known", "entropy learned"])
@pytest.mark.parametrize("kept", [None, evens], ids=["whole", "cut"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_one_pass_gives_the_gradient_of_two(
    dtype: torch.dtype, kept: Any, entropy: bool, biased: bool, caplog: pytest.LogCaptureFixture
) -> None:
    asked = targets(entropy=entropy, kept=kept)
    exact = [each.detach().to(dtype).double().requires_grad_() for each in inputs(torch.float64)][: 2 + biased]
    wanted = torch.autograd.grad(by_token(linear_logprobs(*exact, targets=asked), entropy=entropy), exact)
    given = [each.detach().to(dtype).requires_grad_() for each in exact]
    two = by_token(linear_logprobs(*given, targets=asked), entropy=entropy)
    one = by_token(linear_logprobs(*given, targets=one_pass(asked, entropy=entropy)), entropy=entropy)
    torch.testing.assert_close(one, two)
    roundings = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}
    for mine, old, theirs in zip(torch.autograd.grad(one, given), torch.autograd.grad(two, given), wanted, strict=True):
        assert mine.dtype == dtype
        errors = [float((each.double() - theirs).norm() / theirs.norm()) for each in (mine, old)]
        assert errors[0] <= 1.2 * errors[1] + roundings[dtype]
    assert not caplog.records


@pytest.mark.usefixtures("chunks")
def test_a_loss_over_several_tokens_gets_its_own_gradient_in_a_second_pass(caplog: pytest.LogCaptureFixture) -> None:
    given = list(inputs(torch.float64))
    slopes = one_pass(targets(entropy=False), entropy=False)
    found, wanted = (
        torch.autograd.grad(linear_logprobs(*given, targets=each)[:, 0].sum().square(), given)
        for each in (slopes, targets(entropy=False))
    )
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@pytest.mark.usefixtures("chunks")
def test_one_pass_of_a_frozen_head_and_of_frozen_hidden_states() -> None:
    asked = targets(entropy=False)
    hidden, weight, bias = inputs(torch.float64)
    for given in ((hidden, weight.detach(), None), (hidden.detach(), weight, bias.detach())):
        learned = [each for each in given if each is not None and each.requires_grad]
        one, two = (
            torch.autograd.grad(by_token(linear_logprobs(*given, targets=each), entropy=False), learned)
            for each in (one_pass(asked, entropy=False), asked)
        )
        torch.testing.assert_close(one, two)


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


@pytest.mark.computes
@pytest.mark.parametrize("vocabulary", [20_000, 80_000])
@pytest.mark.parametrize("tokens", [300, 1200])
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
def test_no_tensor_is_as_large_as_the_logits(
    tokens: int, vocabulary: int, cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest is a chunk, or the gradient of the weight, however many tokens and whatever the vocabulary."""
    monkeypatch.setitem(head.WHOLE_BYTES, "cpu", 8 << 20)  # logits that fit into one chunk are a tensor

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


CONFIGS = {
    **{name: LossConfig(type=name) for name in LOSSES},
    "entropy": LossConfig(type="ppo", entropy_coef=0.01),
    "kl": LossConfig(type="ppo", kl=KlConfig(coef=0.1, place="loss")),
    "kl in the reward": LossConfig(type="ppo", kl=KlConfig(coef=0.1, place="reward")),
    "by sequence": LossConfig(type="ppo", aggregation="sequence"),
    "token mask": LossConfig(type="ppo", correction=[CorrectionConfig(type="token_mask", low=0.5, high=2.0)]),
    "sequence mask": LossConfig(type="ppo", correction=[CorrectionConfig(type="sequence_mask", low=0.5, high=2.0)]),
}
TWO_PASSES = ("gspo", "sequence mask")


@pytest.mark.parametrize("truncated", [False, True], ids=["whole", "truncated"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_loss_has_the_same_gradient_in_one_pass(
    name: str, truncated: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(head.WHOLE_BYTES, "cpu", 211 * 4 * 10)
    model, config = model_of("tied"), CONFIGS[name]
    samples = [sample(length) for length in (9, 30, 17)]
    if truncated:
        samples = [replace(each, truncation=Truncation(top_k=60)) for each in samples]
    micro_batch = build_micro_batch(samples, seq_len=64, device=torch.device("cpu"))
    objective = Objective(loss_of=token_losses, config=config, rl_divisor=53, num_ce_tokens=0)
    reference_BT = torch.full(micro_batch.token_ids_BT.shape, -1.5) if config.kl is not None else None

    def loss_at(logprobs_BT: torch.Tensor, entropy_BT: torch.Tensor) -> torch.Tensor:
        learned_BT = entropy_BT if config.entropy_coef else None
        inputs = micro_batch.loss_inputs(logprobs_BT, entropy_BT=learned_BT, reference_logprobs_BT=reference_BT)
        return objective(inputs)[1]

    def gradient(tried: OnePass | None) -> list[torch.Tensor]:
        found = token_logprobs(model, micro_batch, is_entropy_learned=config.entropy_coef > 0, one_pass=tried)
        return list(torch.autograd.grad(loss_at(*found), list(model.parameters())))

    tried = OnePass(loss_at)
    for mine, theirs in zip(gradient(tried), gradient(None), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-7)
    assert tried.num_tokens == 53
    is_one_pass = objective.is_by_token(is_truncated=truncated)
    assert is_one_pass == (name not in TWO_PASSES and not (truncated and name == "by sequence"))
    if is_one_pass:
        assert not caplog.records, "the slopes that were used are those of the loss"


def test_a_loss_of_the_users_own_takes_two_passes() -> None:
    objective = Objective(
        loss_of=lambda inputs, config: token_losses(inputs, config), config=LossConfig(), rl_divisor=1, num_ce_tokens=0
    )
    assert not objective.is_by_token(is_truncated=False)
