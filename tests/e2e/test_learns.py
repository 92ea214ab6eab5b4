"""The demo learns: held-out reward rises on each of three seeds, and does not rise without a learning rate."""

import json
import math

import pytest

from millrace_testing.scraper import Scrapes, scraping

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
WITHIN_S = 560.0
"""A demo takes a minute on two idle cores; beside three other long tests it takes ten times that."""

CONTROL_STEPS = 30
"""Enough for every counter to be seen moving; without a learning rate each step is like the others."""

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


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_held_out_reward_rises(seed: int, make_warm) -> None:
    workplace = make_warm(seed)
    summary, output = workplace.train("--seed", str(seed), timeout_s=WITHIN_S)
    assert summary["reward_after"] - summary["reward_before"] >= 0.10, output[-3000:]
    assert summary["steps"] == 80
    assert 0 <= summary["mismatch_kl"] <= 1e-4
    assert 0 <= summary["trainer_wait_ratio"] <= 1
    assert all(key in summary for key in KEYS)
    weights = summary["weights"]
    assert weights["published"]["versions"] == 81, "as deltas: about two thirds of full copies at this learning rate"
    assert weights["published"]["ratio"] < 0.8 and weights["fetched"]["ratio"] < 0.8
    assert output.count("\nstep ") == 80, "one plain line per step"
    _check_policy(workplace.path / summary["policy_path"])
    assert (workplace.path / summary["plot_path"]).read_bytes().startswith(b"\x89PNG")
    assert (workplace.path / summary["checkpoint_path"] / "manifest.json").is_file()


def test_without_learning_rate_nothing_changes(warm) -> None:
    with scraping(warm.path) as scrapes:
        steps = ("--max-steps", str(CONTROL_STEPS))
        summary, _ = warm.train("--trainer.optim.lr", "0", *steps, timeout_s=WITHIN_S)
    # 256 rollouts of the same 64 tasks before and after: the difference of the means has a deviation of about 0.02.
    assert abs(summary["reward_after"] - summary["reward_before"]) < 0.06
    policies = sorted((warm.path / summary["checkpoint_path"]).parents[1].glob("policies/*/manifest.json"))
    assert len(policies) == CONTROL_STEPS + 1
    digests = {json.loads(manifest.read_text())["digest"] for manifest in policies}
    assert len(digests) == 1, "with learning rate 0 every version has the same weights, bit for bit"
    _check_metrics(scrapes)


def _check_metrics(scrapes: Scrapes) -> None:
    """What every service told Prometheus in the middle of the run moved, and was what the run did."""
    series = {
        ("orchestrator", "millrace_orchestrator_batches_committed_total"): CONTROL_STEPS,
        ("trainer", "millrace_trainer_steps_total"): CONTROL_STEPS,
        ("trainer", "millrace_trainer_publish_duration_seconds_count"): CONTROL_STEPS + 1,
        ("inference", "millrace_inference_policy_version"): CONTROL_STEPS,
        ("inference", "millrace_inference_pause_duration_seconds_count"): CONTROL_STEPS + 1,
        ("env-server", "millrace_env_server_append_duration_seconds_count"): CONTROL_STEPS * 256 + 512,
    }
    (run,) = {labels for _, labels in _keys(scrapes, "orchestrator", "millrace_orchestrator_batches_committed_total")}
    for (service, name), most in series.items():
        values = scrapes.values(service, name, run if service == "orchestrator" else "")
        assert values == sorted(values), f"{name} fell"
        assert len(set(values)) > 5 and most / 2 < values[-1] <= 1.5 * most, f"{name}: {values[-1]} of {most}"
    assert 1 in scrapes.values("orchestrator", "millrace_runs", "state=running")
    assert max(scrapes.values("env-server", "millrace_env_server_rollouts", "state=playing")) > 0
    assert max(scrapes.values("inference", "millrace_inference_requests_running")) > 0
    for service in ("orchestrator", "env-server", "trainer", "inference"):
        assert {"millrace_waits_overdue", "millrace_build_info", "process_open_fds"} <= scrapes.names(service)


def _keys(scrapes: Scrapes, service: str, name: str) -> set[tuple[str, str]]:
    return {key for one in scrapes.by_service[service] for key in one if key[0] == name}


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
