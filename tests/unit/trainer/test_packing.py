"""Packed rows: the loss and the gradient of padded ones, and no token that sees another sample."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import MambaConfig, Qwen3Config, Qwen3MoeConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from millrace.config.sections.loss import LossConfig
from millrace.config.sections.trainer import PackConfig
from millrace.errors import InvalidSpecError
from millrace.rollouts.types import TrainSample, Truncation
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.learning import packing as deciding
from millrace.trainer.learning.batch import MicroBatch, build_micro_batch
from millrace.trainer.learning.forward import token_logprobs
from millrace.trainer.learning.packing import packing_of
from millrace.trainer.learning.plan import Packing, Rows, how_rows_are_made, in_order, plan_micro_batches
from millrace.trainer.losses import divisor, token_losses, total_loss

CPU = torch.device("cpu")
VOCABULARY = 61
LENGTHS = (23, 17, 11, 9, 9, 6, 5, 3, 2, 2)
ALWAYS = Packing(per_token=1.0, per_square=1.0, causal_cost=1.0, masked_cost=1.0, is_always=True)
ONE_ROW = replace(ALWAYS, is_varlen=True)
"""The plan of a kernel for varying lengths, computed with a dense mask."""


def model_of(kind: str, *, tied: bool, dtype: torch.dtype = torch.float64) -> nn.Module:
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "initializer_range": 0.2,
        "tie_word_embeddings": tied,
    }
    experts: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    torch.manual_seed(0)
    config = Qwen3Config(**sizes) if kind == "dense" else Qwen3MoeConfig(**sizes, **experts)
    implementation = "eager" if dtype is torch.float64 else None  # grouped products are not there for it
    return AutoModelForCausalLM.from_config(config, experts_implementation=implementation).to(dtype).eval()


def sample(length: int, index: int, **changes: Any) -> TrainSample:
    rng = np.random.default_rng((length, index))
    mask = (np.arange(length) >= min(2, length - 1)).astype(np.uint8)
    values: dict[str, Any] = {
        "token_ids": rng.integers(0, VOCABULARY, length).astype(np.int32),
        "loss_mask": mask,
        "inference_logprobs": (mask * rng.uniform(-5.0, -3.0, length)).astype(np.float32),
        "advantages": (mask * rng.normal()).astype(np.float32),
        "ordinal": index,
        "member": 0,
        "attempt": 0,
        "env": "e",
        "reward": 0.0,
        "temperature": (0.7, 1.0)[index % 2],
        "min_version": 0,
        "max_version": 0,
        "lineage": 0,
    }
    return TrainSample(**{**values, **changes})


def samples_of(*, ce: bool = False, cut: bool = False) -> list[TrainSample]:
    made = [sample(length, index) for index, length in enumerate(LENGTHS)]
    if ce:  # of every other sample
        made = [
            replace(each, ce_weights=np.full(each.num_tokens, 0.5, np.float32)) if at % 2 else each
            for at, each in enumerate(made)
        ]
    return [
        replace(each, truncation=Truncation(top_k=40)) if at % 3 == 0 and cut else each for at, each in enumerate(made)
    ]


def micro_batches(
    samples: list[TrainSample], packing: Packing | None, *, world_size: int = 1
) -> list[list[MicroBatch]]:
    def build(rows: Rows) -> MicroBatch:
        taken = [samples[index] for row in rows for index in row]
        return build_micro_batch(taken, rows=in_order(rows), seq_len=64, device=CPU)

    lengths = [each.num_tokens for each in samples]
    plan = plan_micro_batches(lengths, max_tokens=46, world_size=world_size, packing=packing)
    return [[build(rows) for rows in rank] for rank in plan]


def learned(
    model: nn.Module, rank: list[MicroBatch], everything: list[MicroBatch], config: LossConfig
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss of some micro-batches of a batch, and its gradient."""
    model.zero_grad()
    num_tokens = sum(each.num_rl_tokens for each in everything)
    num_samples = sum(each.num_rl_samples for each in everything)
    num_ce_tokens = sum(each.num_ce_tokens for each in everything)
    rl_divisor, total = divisor(config, num_tokens=num_tokens, num_samples=num_samples), 0.0
    for each in rank:
        logprobs_BT, entropy_BT = token_logprobs(model, each, is_entropy_learned=config.entropy_coef > 0)
        entropy = entropy_BT if config.entropy_coef else None
        losses = token_losses(each.loss_inputs(logprobs_BT, entropy_BT=entropy), config)
        loss = total_loss(losses, rl_divisor=rl_divisor, num_ce_tokens=num_ce_tokens)
        loss.backward()
        total += float(loss.detach())
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def require_equal(one: Any, other: Any, *, tolerance: float) -> None:
    assert one[0] == pytest.approx(other[0], abs=tolerance, rel=tolerance)
    assert one[1].keys() == other[1].keys() and one[1]
    for name, gradient in one[1].items():
        largest = float(other[1][name].abs().max())
        assert float((gradient - other[1][name]).abs().max()) <= tolerance * largest, name


LOSSES: list[dict[str, Any]] = [
    {"entropy_coef": 0.01},
    {"type": "ppo", "aggregation": "sequence"},
    {"type": "gspo", "clip_low": 0.2, "clip_high": 0.2, "aggregation": "sequence"},
    {"type": "gspo"},
    {"type": "cispo", "aggregation": "constant", "constant_tokens": 32},
    {"type": "importance_sampling", "correction": [{"type": "sequence_tis", "high": 2.0}]},
]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: "-".join(map(str, loss.values()))[:40])
def test_every_loss_is_that_of_padded_rows(loss: dict[str, Any]) -> None:
    model, config = model_of("dense", tied=False), LossConfig.model_validate(loss)
    samples = samples_of(ce=True, cut=loss.get("type") == "ppo")
    (padded,) = micro_batches(samples, None)
    assert not any(each.rows.is_packed for each in padded)
    wanted = learned(model, padded, padded, config)
    for packing in (ALWAYS, ONE_ROW):
        (packed,) = micro_batches(samples, packing)
        assert any(each.rows.is_packed for each in packed) and len(packed) < len(padded)
        require_equal(learned(model, packed, packed, config), wanted, tolerance=1e-12)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ["dense", "experts"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["f64", "f32"])
def test_every_model_and_a_gang_of_two_learn_what_padded_rows_teach(
    kind: str, tied: bool, dtype: torch.dtype, tolerance: float
) -> None:
    model, config, samples = model_of(kind, tied=tied, dtype=dtype), LossConfig(), samples_of(ce=True)
    (padded,) = micro_batches(samples, None)
    wanted = learned(model, padded, padded, config)
    (packed,) = micro_batches(samples, ALWAYS)
    require_equal(learned(model, packed, packed, config), wanted, tolerance=tolerance)
    ranks = micro_batches(samples, ALWAYS, world_size=2)
    both = [learned(model, rank, ranks[0] + ranks[1], config) for rank in ranks]
    summed = {name: both[0][1][name] + both[1][1][name] for name in both[0][1]}
    require_equal((both[0][0] + both[1][0], summed), wanted, tolerance=tolerance)


def test_fine_tuning_is_that_of_padded_rows() -> None:
    model = model_of("dense", tied=True)
    samples = [
        replace(each, loss_mask=np.zeros_like(each.loss_mask), ce_weights=np.ones(each.num_tokens, np.float32))
        for each in samples_of()
    ]
    (padded,), (packed,) = micro_batches(samples, None), micro_batches(samples, ALWAYS)
    config = LossConfig()
    require_equal(learned(model, packed, packed, config), learned(model, padded, padded, config), tolerance=1e-12)


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(2, 20), min_size=2, max_size=8), at=st.integers(0, 7), kind=st.sampled_from("de"))
def test_no_token_sees_another_sample(lengths: list[int], at: int, kind: str) -> None:
    """Other tokens in one sample change its own log-probs only; with experts, those who share them to rounding."""
    model = model_of({"d": "dense", "e": "experts"}[kind], tied=False, dtype=torch.float32)
    samples = [sample(length, index) for index, length in enumerate(lengths)]
    at %= len(samples)
    changed = [*samples]
    changed[at] = replace(samples[at], token_ids=(samples[at].token_ids + 1) % VOCABULARY)
    rows = [[*range(len(samples))]]
    found = []
    for each in (samples, changed):
        micro_batch = build_micro_batch(each, rows=rows, seq_len=64, device=CPU)
        with torch.no_grad():
            found.append(token_logprobs(model, micro_batch)[0])
    assert micro_batch.rows.is_packed
    for index in range(len(samples)):
        difference = float((found[0][index] - found[1][index]).abs().max())
        if index == at:
            assert difference > 1e-3
        else:
            assert difference <= (0.0 if kind == "d" else 1e-6)


def test_positions_restart_and_what_is_left_of_a_row_is_nobodys() -> None:
    micro_batch = build_micro_batch(
        [sample(4, 0), sample(3, 1), sample(5, 2)], rows=[[0, 1], [2]], seq_len=64, device=CPU
    )
    assert micro_batch.rows.position_ids_RL.tolist() == [[0, 1, 2, 3, 0, 1, 2], [0, 1, 2, 3, 4, 0, 1]]
    assert micro_batch.rows.token_ids_RL[0, 4:].equal(micro_batch.token_ids_BT[1, :3])
    assert micro_batch.rows.token_ids_RL[1, 5:].tolist() == [0, 0]
    assert micro_batch.rows.before_N.tolist() == [1, 2, 5, 8, 9, 10]
    assert micro_batch.num_tokens == 12


def settle(model: nn.Module, mode: str) -> Packing | None:
    config = PackConfig.model_validate({"mode": mode})
    return packing_of(model, config, longest=64, compute_dtype=torch.float32, gang=Gang())


def test_a_model_that_carries_its_state_along_is_not_packed(caplog: pytest.LogCaptureFixture) -> None:
    config = MambaConfig(vocab_size=VOCABULARY, hidden_size=16, state_size=4, num_hidden_layers=2)
    model = AutoModelForCausalLM.from_config(config).eval()
    assert settle(model, "auto") is None and "mixes samples" in caplog.text
    with pytest.raises(InvalidSpecError, match="mixes the samples of one row") as caught:
        settle(model, "always")
    assert caught.value.reason == "PACK_UNSUPPORTED"
    assert settle(model, "never") is None


@pytest.mark.parametrize(
    ("peer", "is_packed"),
    [([True, True, True, True], True), ([True, True, True, False], True), ([False, True, True, True], False)],
)
def test_ranks_that_have_other_devices_make_one_plan(
    monkeypatch: pytest.MonkeyPatch, peer: list[bool], is_packed: bool
) -> None:
    """This rank has the kernel for varying lengths; the peer says [as `Apart` has them …, has the kernel]."""
    monkeypatch.setattr(deciding, "use_varlen_kernel", lambda *args, **keys: True)
    gang = Gang()
    monkeypatch.setattr(gang, "agree", lambda work: [work(), peer])
    model = model_of("dense", tied=True, dtype=torch.float32)
    found = packing_of(model, PackConfig(), longest=64, compute_dtype=torch.float32, gang=gang)
    assert (found is not None) == is_packed
    assert found is None or found.is_varlen == peer[-1]


def test_all_that_plans_depend_on_is_in_the_words_of_a_checkpoint() -> None:
    others = [replace(ALWAYS, **{each.name: 2.5 if each.type is float else True}) for each in fields(Packing)]
    varied = {how_rows_are_made(each) for each in (None, *others) if each != ALWAYS}
    assert len(varied) == 1 + len(fields(Packing)) - 1  # `is_always` is so already
    assert how_rows_are_made(replace(ALWAYS)) == how_rows_are_made(ALWAYS) not in varied


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_what_the_plan_decides_with_is_of_the_model_and_of_the_record(kind: str) -> None:
    model = model_of(kind, tied=True, dtype=torch.float32)
    found = settle(model, "auto")
    assert found is not None and not found.is_always and not found.is_varlen
    assert (found.causal_cost, found.masked_cost) == (PackConfig().causal_cost, PackConfig().masked_cost)
    assert found == settle(model, "auto") and found.per_token > 0 and found.per_square > 0
    always = settle(model, "always")
    assert always is not None and always.is_always
