"""Micro-batches: every sample once, bounded, equal for all ranks; log-probs independent of the padding."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from millrace.config.sections.loss import LossConfig
from millrace.rollouts.types import OwnSampling, TrainSample, Truncation
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.learning.batch import build_micro_batch
from millrace.trainer.learning.forward import select_logprobs, token_logprobs
from millrace.trainer.learning.metrics import Score, StepMetrics
from millrace.trainer.losses import token_losses, total_loss

CPU = torch.device("cpu")


def _sample(length: int, *, prompt: int = 2, seed: int = 0, temperature: float = 1.0, version: int = 0) -> TrainSample:
    rng = np.random.default_rng(seed)
    mask = np.zeros(length, np.uint8)
    mask[prompt:] = 1
    return TrainSample(
        token_ids=rng.integers(1, 32, length).astype(np.int32),
        loss_mask=mask,
        inference_logprobs=(mask * -1.5).astype(np.float32),
        advantages=(mask * 0.5).astype(np.float32),
        ordinal=0,
        member=0,
        attempt=0,
        env="e",
        reward=0.0,
        temperature=temperature,
        min_version=version,
        max_version=version,
        lineage=0,
    )


def test_rows_are_padded_and_cut() -> None:
    micro_batch = build_micro_batch([_sample(5), _sample(9, seed=1)], seq_len=7, device=CPU)
    assert micro_batch.token_ids_BT.shape == (2, 7)
    assert micro_batch.loss_mask_BT.sum(1).tolist() == [3, 5]
    assert micro_batch.rows.position_ids_RL.tolist() == [list(range(7))] * 2
    assert micro_batch.rows.token_ids_RL.equal(micro_batch.token_ids_BT)
    assert micro_batch.num_tokens == 12 and micro_batch.num_rl_tokens == 8 and micro_batch.num_ce_tokens == 0
    assert micro_batch.rows.scored_N.tolist() == [2, 3, 4, 9, 10, 11, 12, 13], "prompts and padding are not"
    assert not micro_batch.rows.is_packed


def test_position_zero_is_never_scored() -> None:
    micro_batch = build_micro_batch([_sample(4, prompt=0)], seq_len=8, device=CPU)
    assert micro_batch.loss_mask_BT.tolist() == [[False, True, True, True]]


def test_an_empty_micro_batch_has_no_members() -> None:
    micro_batch = build_micro_batch([], seq_len=8, device=CPU)
    assert micro_batch.num_rl_tokens == 0 and micro_batch.num_ce_tokens == 0
    logprobs_BT, _ = token_logprobs(_tiny(), micro_batch)
    assert torch.isfinite(logprobs_BT).all()


def _tiny() -> torch.nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        initializer_range=0.2,
    )
    return Qwen3ForCausalLM(config).eval()


def test_logprobs_are_those_of_each_row_alone_under_its_temperature() -> None:
    model = _tiny()
    samples = [_sample(6, prompt=3, seed=1), _sample(11, prompt=5, seed=2, temperature=0.5), _sample(8, seed=3)]
    samples.append(_sample(7, seed=4, temperature=0.0))  # greedy: engines report it at temperature 1
    micro_batch = build_micro_batch(samples, seq_len=16, device=CPU)
    logprobs_BT, entropy_BT = token_logprobs(model, micro_batch)
    for row, sample in enumerate(samples):
        tokens = torch.tensor(sample.token_ids.astype(np.int64))
        with torch.no_grad():
            logits_TV = model(tokens[None]).logits[0].double() / (sample.temperature or 1.0)
        table_TV = torch.log_softmax(logits_TV, -1)
        for position in torch.nonzero(micro_batch.loss_mask_BT[row]).flatten().tolist():
            expected = float(table_TV[position - 1, tokens[position]])
            assert float(logprobs_BT[row, position].detach()) == pytest.approx(expected, abs=2e-5)
            entropy = float(-(table_TV[position - 1].exp() * table_TV[position - 1]).sum())
            assert float(entropy_BT[row, position]) == pytest.approx(entropy, abs=2e-5)
    assert float(logprobs_BT[0, 0].detach()) == pytest.approx(-math.log(32))
    assert logprobs_BT.requires_grad and not entropy_BT.requires_grad


def test_tokens_that_were_sampled_in_another_way_are_computed_in_theirs() -> None:
    """Ranges of one sample, beside samples of other temperatures, cut and not, packed into one row and not."""
    model, cut = _tiny(), Truncation(top_k=4)
    own = (OwnSampling(start=4, end=7, temperature=0.5), OwnSampling(start=9, end=11, temperature=1.5, truncation=cut))
    samples = [_sample(6, seed=1, temperature=0.7), replace(_sample(11, prompt=3, seed=2), own_sampling=own)]
    ways = [(0.7, None)] * 6, [(1.0, None)] * 4 + [(0.5, None)] * 3 + [(1.0, None)] * 2 + [(1.5, 4)] * 2
    for rows in (None, [[1, 0]]):
        micro_batch = build_micro_batch(samples, seq_len=16, device=CPU, rows=rows)
        logprobs_BT, _ = token_logprobs(model, micro_batch)
        for row, sample in enumerate(samples):
            tokens = torch.tensor(sample.token_ids.astype(np.int64))
            with torch.no_grad():
                logits_TV = model(tokens[None]).logits[0].double()
            for position in torch.nonzero(micro_batch.loss_mask_BT[row]).flatten().tolist():
                temperature, most = ways[row][position]
                logits_V = logits_TV[position - 1] / temperature
                if most is not None:
                    logits_V = logits_V.masked_fill(logits_V < logits_V.topk(most).values[-1], -math.inf)
                expected = float(torch.log_softmax(logits_V, -1)[tokens[position]])
                assert float(logprobs_BT[row, position].detach()) == pytest.approx(expected, abs=2e-5)


def test_select_logprobs_by_hand() -> None:
    logits = torch.tensor([[[0.0, math.log(3.0)]]], dtype=torch.float64)
    logprobs, entropy = select_logprobs(logits, torch.tensor([[1]]), temperature_B=torch.tensor([1.0]))
    assert logprobs.item() == pytest.approx(math.log(0.75))
    assert entropy.item() == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    half, _ = select_logprobs(logits, torch.tensor([[1]]), temperature_B=torch.tensor([0.5]))
    assert half.item() == pytest.approx(math.log(0.9))


def test_score_by_hand() -> None:
    micro_batch = build_micro_batch([_sample(4, version=5), _sample(4, version=4)], seq_len=8, device=CPU)
    trainer = torch.full((2, 4), -1.5)
    trainer[0, 2] += 0.5
    score = Score()
    score.add(micro_batch, trainer, version=5)
    result = score.reduce(Gang())
    assert result.num_tokens == 2 and result.num_other_version_tokens == 2
    assert result.mismatch_kl == pytest.approx((math.exp(0.5) - 0.5 - 1) / 2, rel=1e-6)
    assert result.max_abs_logprob_diff == pytest.approx(0.5)


def test_a_sampled_token_that_is_cut_away_is_counted_and_masked() -> None:
    whole = replace(_sample(8, prompt=3), truncation=Truncation(top_k=4))
    model = _tiny()
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(whole.token_ids.astype(np.int64))[None]).logits[0]
    tokens = whole.token_ids.copy()
    tokens[-1] = int(logits[-2].argmin())  # position 6 has the same tokens before it
    tokens[-2] = int(logits[-3].argmax())
    micro_batch = build_micro_batch([replace(whole, token_ids=tokens), _sample(8)], seq_len=8, device=CPU)
    logprobs_BT, entropy_BT = token_logprobs(model, micro_batch)
    assert logprobs_BT[0, -1] == -math.inf and torch.isfinite(entropy_BT).all()
    losses = token_losses(micro_batch.loss_inputs(logprobs_BT), LossConfig())
    assert losses.rl[0, -1] == 0 and not losses.rl_members[0, -1]
    taught = replace(whole, token_ids=tokens, ce_weights=np.ones(8, np.float32))
    weighted = build_micro_batch([taught, _sample(8)], seq_len=8, device=CPU)
    taught_BT, _ = token_logprobs(model, weighted)
    assert torch.isfinite(taught_BT[0, 1:3]).all() and not torch.allclose(taught_BT[0, 1:3], taught_BT[0, :1])
    # Not to the bit: the head is multiplied with other rows, which several threads divide in another way.
    rest, before = taught_BT[:, 3:], logprobs_BT[:, 3:]
    torch.testing.assert_close(rest, before, msg="what nobody sampled was not cut, and the rest was")
    with_ce = token_losses(weighted.loss_inputs(logprobs_BT.detach()), LossConfig())
    assert with_ce.ce[0, -1] == 0 and not with_ce.ce_members[0, -1] and with_ce.ce_members[0, 1:3].all()
    total_loss(losses, rl_divisor=11, num_ce_tokens=0).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    metrics = StepMetrics(["e"])
    metrics.add(
        micro_batch,
        losses=losses,
        loss=losses.rl.sum(),
        trainer_logprobs_BT=logprobs_BT.detach(),
        entropy_BT=entropy_BT,
    )
    found = metrics.reduce(Gang()).values()
    outside = int((logprobs_BT[0, 3:] == -math.inf).sum())
    assert found["is_outside_support/mean"] == pytest.approx(outside / 11)
    assert math.isfinite(found["mismatch_kl/mean"]) and math.isfinite(found["mismatch_kl/max"])


def test_masked_advantages_are_shares_of_the_masked_tokens() -> None:
    micro_batch = build_micro_batch([_sample(6)], seq_len=6, device=CPU)
    micro_batch.advantages_BT[0] = torch.tensor([0.0, 0.0, 1.0, 1.0, -1.0, -1.0])
    micro_batch.inference_logprobs_BT[0, 2:] = math.log(0.5)
    logprobs_BT = torch.full((1, 6), math.log(0.5))
    logprobs_BT[0, 2], logprobs_BT[0, 3], logprobs_BT[0, 4] = math.log(0.9), math.log(0.95), math.log(0.1)
    losses = token_losses(micro_batch.loss_inputs(logprobs_BT), LossConfig())
    metrics = StepMetrics(["e"])
    metrics.add(
        micro_batch, losses=losses, loss=losses.rl.sum(), trainer_logprobs_BT=logprobs_BT, entropy_BT=logprobs_BT * 0
    )
    found = metrics.reduce(Gang()).values()
    assert found["is_masked/mean"] == pytest.approx(3 / 4)
    assert found["masked_advantage_positive/mean"] == pytest.approx(2 / 3)
    assert found["masked_advantage_negative/mean"] == pytest.approx(1 / 3)


def test_a_log_ratio_to_a_reference_is_that_of_the_trainers_policy() -> None:
    plain = _sample(5)
    distilled = replace(plain, reference_kl=0.5)
    micro_batch = build_micro_batch([plain, distilled], seq_len=5, device=CPU)
    logprobs_BT = torch.full((2, 5), -1.0, requires_grad=True)
    advantages = micro_batch.loss_inputs(logprobs_BT).advantages
    assert advantages[0].tolist() == [0, 0, 0.5, 0.5, 0.5]
    # 0.5 * (teacher - behaviour) = 0.5 was recorded, the trainer is at -1 and the behaviour policy was at -1.5.
    assert advantages[1].tolist() == pytest.approx([0, 0, 0.25, 0.25, 0.25])
    assert not advantages.requires_grad


def test_a_token_that_only_the_policy_before_the_batch_left_out_counts_as_unmoved() -> None:
    micro_batch = build_micro_batch([_sample(5)], seq_len=5, device=CPU)
    proximal_BT = torch.tensor([[0.0, 0.0, -math.inf, -2.0, -2.0]])
    inputs = replace(micro_batch, proximal_logprobs_BT=proximal_BT).loss_inputs(torch.full((1, 5), -1.0))
    assert inputs.proximal_logprobs is not None
    assert inputs.proximal_logprobs[0, 2:].tolist() == [-1.0, -2.0, -2.0]
    assert inputs.proximal_log_ratio[0].tolist() == [0.0, 0.0, 0.5, -0.5, -0.5]


def test_what_several_steps_measured_is_what_one_of_all_rows_would_have() -> None:
    """Apart from the loss, of which each step has its own mean: its metric is the mean of these."""

    def measured(*lengths: int) -> StepMetrics:
        micro_batch = build_micro_batch([_sample(n, seed=n) for n in lengths], seq_len=9, device=CPU)
        logprobs_BT = -0.1 * micro_batch.token_ids_BT.float()
        losses = token_losses(micro_batch.loss_inputs(logprobs_BT), LossConfig())
        metrics = StepMetrics(["e"])
        loss = losses.rl.sum() / micro_batch.num_rl_tokens
        entropy_BT = logprobs_BT.exp()
        metrics.add(micro_batch, losses=losses, loss=loss, trainer_logprobs_BT=logprobs_BT, entropy_BT=entropy_BT)
        return metrics.reduce(Gang())

    whole, parts = measured(4, 7, 9), [measured(4, 9), measured(7)]
    merged, wanted = StepMetrics.merged(parts).values(), whole.values()
    assert merged.pop("loss/mean") == pytest.approx(sum(part.values()["loss/mean"] for part in parts) / 2)
    wanted.pop("loss/mean")
    assert merged == pytest.approx(wanted)
    assert StepMetrics.merged([whole]).values() == whole.values()


def test_metrics_by_environment_and_the_spread_of_the_advantages() -> None:
    """Environment a: two tokens, one of them clipped. b: three, none."""
    samples = [replace(_sample(4), env="a"), replace(_sample(5), env="b")]
    micro_batch = build_micro_batch(samples, seq_len=5, device=CPU)
    micro_batch.inference_logprobs_BT[:, 2:] = -1.0
    micro_batch.advantages_BT[0], micro_batch.advantages_BT[1] = 1.0, -0.5
    logprobs_BT = torch.full((2, 5), -1.0)
    logprobs_BT[0, 3] = 0.0
    inputs = replace(micro_batch.loss_inputs(logprobs_BT), reference_logprobs=torch.full((2, 5), -1.0))
    losses = token_losses(inputs, LossConfig.model_validate({"type": "ppo"}))
    metrics = StepMetrics(["a", "b"])
    metrics.add_reference(micro_batch, inputs)
    metrics.add(
        micro_batch, losses=losses, loss=losses.rl.sum(), trainer_logprobs_BT=logprobs_BT, entropy_BT=logprobs_BT * 0
    )
    found = metrics.reduce(Gang()).values()
    assert [found[f"is_masked/{env}/mean"] for env in ("a", "b", "all")] == pytest.approx([1 / 2, 0, 1 / 5])
    k3 = math.exp(-1) - 1 + 1
    assert [found[f"reference_kl/{env}/mean"] for env in ("a", "b", "all")] == pytest.approx([k3 / 2, 0, k3 / 5])
    assert found["advantage/mean"] == pytest.approx(0.1)
    assert found["advantage/std"] == pytest.approx((2 / 5 * 0.9**2 + 3 / 5 * 0.6**2) ** 0.5)
    assert [found[f"is_masked_{side}/a/mean"] for side in ("low", "high")] == pytest.approx([0, 1 / 2])
    assert [found[f"is_masked_{side}/b/mean"] for side in ("low", "high")] == [0, 0]
    assert [found[f"advantage/{env}/mean"] for env in ("a", "b")] == [1.0, -0.5]
    assert [found[f"advantage/{env}/std"] for env in ("a", "b")] == [0.0, 0.0]
    one, e = pytest.approx(1.0), math.e
    assert [found[f"ratio/a/{name}"] for name in ("mean", "min", "max")] == pytest.approx([(1 + e) / 2, 1, e])
    assert [found[f"ratio/b/{name}"] for name in ("mean", "min", "max")] == [one, one, one]
    assert found["ess/a/mean"] == pytest.approx((1 + e) ** 2 / (2 * (1 + e**2))) and found["ess/b/mean"] == one
    assert not [name for name in found if "squared" in name]


def test_ratios_and_their_effective_sample_size() -> None:
    """Ratios 1, 2 and 1/2 (and one of e^800, which counts as e^20)."""
    micro_batch = build_micro_batch([_sample(5)], seq_len=5, device=CPU)
    micro_batch.inference_logprobs_BT[0, 2:] = -1.0
    logprobs_BT = torch.tensor([[0.0, 0.0, -1.0, -1.0 + math.log(2), -1.0 - math.log(2)]])

    def measured(logprobs_BT: torch.Tensor) -> dict[str, float]:
        losses = token_losses(micro_batch.loss_inputs(logprobs_BT), LossConfig())
        metrics = StepMetrics(["e"])
        metrics.add(
            micro_batch,
            losses=losses,
            loss=losses.rl.sum(),
            trainer_logprobs_BT=logprobs_BT,
            entropy_BT=logprobs_BT * 0,
        )
        return metrics.reduce(Gang()).values()

    found = measured(logprobs_BT)
    assert (found["ratio/min"], found["ratio/max"]) == (pytest.approx(0.5), pytest.approx(2.0))
    assert found["ratio/mean"] == pytest.approx(3.5 / 3)
    assert found["ess/mean"] == pytest.approx(3.5**2 / (3 * 5.25)) and "ratio_squared/mean" not in found
    assert measured(logprobs_BT + 800)["ratio/max"] == pytest.approx(math.exp(20))
