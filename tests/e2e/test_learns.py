"""The demo learns: held-out reward rises on each of three seeds, and does not rise without a learning rate."""

import json
import math

import pytest

KEYS = (
    "reward_before",
    "reward_after",
    "steps",
    "seconds",
    "trainer_wait_ratio",
    "mismatch_kl",
    "policy_path",
    "checkpoint_path",
    "plot_path",
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_held_out_reward_rises(seed: int, make_workplace) -> None:
    workplace = make_workplace(f"seed{seed}")
    workplace.warm_up(seed)
    summary, output = workplace.train("--seed", str(seed))
    assert summary["reward_after"] - summary["reward_before"] >= 0.10, output[-3000:]
    assert summary["steps"] == 80
    assert 0 <= summary["mismatch_kl"] <= 1e-4
    assert 0 <= summary["trainer_wait_ratio"] <= 1
    assert all(key in summary for key in KEYS)
    assert output.count("\nstep ") == 80, "one plain line per step"
    _check_policy(workplace.path / summary["policy_path"])
    assert (workplace.path / summary["plot_path"]).read_bytes().startswith(b"\x89PNG")
    assert (workplace.path / summary["checkpoint_path"] / "manifest.json").is_file()


@pytest.mark.timeout(600)
def test_without_learning_rate_nothing_changes(warm) -> None:
    summary, _ = warm.train("--trainer.optim.lr", "0")
    # 256 rollouts of the same 64 tasks before and after: the difference of the means has a deviation of about 0.02.
    assert abs(summary["reward_after"] - summary["reward_before"]) < 0.06
    policies = sorted((warm.path / summary["checkpoint_path"]).parents[1].glob("policies/*/manifest.json"))
    assert len(policies) == 81
    digests = {json.loads(manifest.read_text())["digest"] for manifest in policies}
    assert len(digests) == 1, "with learning rate 0 every version has the same weights, bit for bit"


def _check_policy(path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "banana"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    torch.manual_seed(0)
    reply = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert reply.shape[1] > prompt["input_ids"].shape[1]
    assert all(math.isfinite(float(parameter.detach().sum())) for parameter in model.parameters())
