"""Echo: GRPO's advantages on what was sampled, a cross-entropy weight on what the environment said."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from millrace.algorithms import Echo, Grpo
from millrace.config import RLConfig
from millrace.config.load import load, validate_document
from millrace.config.sections.loss import LossConfig
from millrace.errors import InvalidSpecError
from millrace.orchestrator.drive.batch_writer import credit_group, has_advantage
from millrace.rollouts.types import RoleSpan, Rollout, Sample
from millrace.trainer.losses import LossInputs, token_losses, total_loss
from millrace_testing.orchestrator.builders import make_play, make_rollout

MASK = [0, 1, 1, 0, 0, 0, 1]
ROLES = (RoleSpan(role="tool", start=3, end=4), RoleSpan(role="user", start=4, end=6))


def rollout(reward: float, *, member: int = 0) -> Rollout:
    sample = Sample(
        token_ids=np.arange(7, dtype=np.int32),
        loss_mask=np.asarray(MASK, np.uint8),
        inference_logprobs=-np.asarray(MASK, np.float32),
        roles=ROLES,
    )
    return replace(make_rollout(0, member, reward=reward, group_size=2), samples=(sample,))


def config(algo: dict[str, Any]) -> Any:
    orchestrator = {"env": [{"id": "a"}], "algo": {"type": "echo"} | algo, "rollouts_per_example": 2, "batch_size": 2}
    return validate_document({"orchestrator": orchestrator}).orchestrator.algo


@pytest.mark.parametrize(
    ("roles", "wanted"),
    [
        ({}, [0, 0, 0, 0.1, 0, 0, 0]),
        ({"user": {"alpha": 0.5}}, [0, 0, 0, 0, 0.5, 0.5, 0]),
        ({"user": {"alpha": 0.5}, "tool": {"alpha": 2}}, [0, 0, 0, 2, 0.5, 0.5, 0]),
        ({"system": {"alpha": 1}}, None),
    ],
)
def test_a_role_has_its_weight_and_the_advantages_are_those_of_grpo(roles: dict[str, Any], wanted: Any) -> None:
    group = [rollout(1.0), rollout(0.0, member=1)]
    found = Echo.from_config(config({"roles": roles} if roles else {})).credit(group)
    for (credit,), (plain,) in zip(found, Grpo().credit(group), strict=True):
        assert credit.advantages.tolist() == plain.advantages.tolist() and credit.rl_weights is None
        if wanted is None:
            assert credit.ce_weights is None
        else:
            assert credit.ce_weights.dtype == np.float32 and np.allclose(credit.ce_weights, wanted, atol=1e-7)


def test_equal_rewards_leave_what_the_environment_said_within_the_length_of_a_sample() -> None:
    play = make_play(0, group_size=2)
    for member in range(2):
        play.add(rollout(1.0, member=member))
    algorithm = Echo(weights={"user": 0.5})
    assert [has_advantage(item, item.credit) for item in credit_group(play, algorithm, seq_len=7)] == [True, True]
    assert [has_advantage(item, item.credit) for item in credit_group(play, algorithm, seq_len=4)] == [False, False]


def test_the_gradient_is_that_of_both_terms_each_over_its_own_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((1, 7, 5), generator=generator, dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(-1)[..., 0]
    mask, weights = torch.tensor([MASK], dtype=torch.bool), torch.tensor([[0, 0, 0, 2, 0.5, 0.5, 0.0]]).double()
    advantages = torch.where(mask, 0.75, 0.0).double()
    zeros = torch.zeros_like(weights)
    inputs = LossInputs(
        trainer_logprobs=logprobs,
        inference_logprobs=torch.where(mask, logprobs.detach() - 0.1, zeros),
        advantages=advantages,
        loss_mask=mask,
        rl_weights=torch.ones_like(weights),
        ce_weights=weights,
        entropy=zeros,
    )
    losses = token_losses(inputs, LossConfig(type="importance_sampling", kl_tau=0.0))
    loss = total_loss(losses, rl_divisor=3, num_ce_tokens=3)
    [found] = torch.autograd.grad(loss, logits, retain_graph=True)
    ratio = torch.exp(logprobs - (logprobs.detach() - 0.1))
    plain = -(advantages * ratio)[mask].sum() / 3 - (weights * logprobs).sum() / 3
    [wanted] = torch.autograd.grad(plain, logits)
    assert torch.allclose(found, wanted, atol=1e-15)


def test_a_table_without_a_role_and_roles_elsewhere_are_refused() -> None:
    for algo, words in (
        ({"roles": {}}, "names no role"),
        ({"type": "grpo", "roles": {"tool": {"alpha": 1}}}, "has no meaning for grpo"),
        ({"roles": {"tool": {"alpha": 0}}}, "must be above 0"),
        ({"roles": {"tools": {"alpha": 1}}}, "did you mean"),
    ):
        with pytest.raises(InvalidSpecError, match=words):
            config(algo)


def test_prime_rls_echo_is_ours_for_a_run_and_for_a_source(tmp_path: Any) -> None:
    text = """\
model.name = "m"
[orchestrator]
batch_size = 4
group_size = 2
[[orchestrator.train.source]]
env.taskset.id = "a"
[[orchestrator.train.source]]
env.taskset.id = "b"
algo = { type = "echo", roles = { user = { alpha = 0.3 } } }
"""
    (tmp_path / "a.toml").write_text(text)
    first, second = load(RLConfig, ["@", "a.toml"], {}, cwd=tmp_path).config.orchestrator.env
    assert first.algo is None and second.algo.type == "echo" and second.algo.role_weights == {"user": 0.3}
