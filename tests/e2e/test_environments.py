"""Other kinds of environments through the whole system: two turns with a tool, and the v1 generation."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from millrace.rollouts.types import RolloutStatus
from millrace.rollouts.wire import decode_archive
from millrace.storage.local import LocalStore
from millrace_testing import tool_callers
from millrace_testing.workplaces import Workplace

pytestmark = pytest.mark.long

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS, BATCH, GROUP = 2, 32, 8
MIN_OK = STEPS * BATCH


def archived(workplace, summary: dict) -> list:
    """Return every rollout that the run's headers resolved."""
    run = (workplace.path / summary["checkpoint_path"]).parents[1]
    store = LocalStore(run.parents[2])
    keys = [info.key for info in store.list(f"millrace/runs/{run.name}/rollouts/")]
    return [rollout for key in keys for rollout in decode_archive(store.get(key))]


def train(workplace, environment: dict, *argv: str, **options) -> tuple[dict, list]:
    summary, _ = workplace.train(
        "--orchestrator.env",
        json.dumps([environment]),
        "--max-steps",
        str(STEPS),
        "--orchestrator.batch-size",
        str(BATCH),
        "--orchestrator.rollouts-per-example",
        str(GROUP),
        "--no-orchestrator.filter-zero-advantages",
        "--orchestrator.eval.num-examples",
        "4",
        *argv,
        **options,
    )
    return summary, archived(workplace, summary)


def roles_of(rollout) -> list[str]:
    """Who wrote each message."""
    return [message["role"] for message in json.loads(rollout.messages_json)]


def num_sampled_parts(sample) -> int:
    """Return how many stretches of a sample's tokens were sampled: its turns."""
    before = np.concatenate([[0], sample.loss_mask[:-1]])
    return int(((sample.loss_mask == 1) & (before == 0)).sum())


def check_common(summary: dict, rollouts: list) -> list:
    """Return what holds for every kind of environment; returns the OK rollouts."""
    assert summary["steps"] == STEPS
    assert summary["mismatch_kl"] <= 1e-4, "the trainer sees the very tokens that the engine sampled"
    good = [rollout for rollout in rollouts if rollout.status == RolloutStatus.OK]
    assert len(good) >= MIN_OK, "two full batches were trained on"
    for rollout in good:
        assert rollout.samples
        assert all(sample.loss_mask.any() and sample.policy_spans for sample in rollout.samples)
        assert all(span.version <= STEPS for sample in rollout.samples for span in sample.policy_spans)
    return good


def test_two_turns_and_a_tool_give_exact_tokens(warm) -> None:
    summary, rollouts = train(
        warm, {"id": "code-lookup"}, "--seq-len", "256", "--orchestrator.sampling.max-tokens", "16"
    )
    good = check_common(summary, rollouts)
    # The environment always answers the first reply, so only a rollout that was cut short has one turn. That the tokens
    # of two turns are the engine's own, one by one, is asserted with a scripted engine in
    # tests/integration/env_server/test_env_server_v0.py (test_two_turns_and_a_tool_are_one_exact_sample).
    assert {rollout.num_turns for rollout in good} <= {1, 2}
    twice = [rollout for rollout in good if rollout.num_turns == 2]
    assert len(twice) >= MIN_OK // 2
    for rollout in twice:
        assert sum(num_sampled_parts(sample) for sample in rollout.samples) == 2
        assert roles_of(rollout) == ["user", "assistant", "user", "assistant"]


def test_a_v1_taskset_trains(warm) -> None:
    fixture = REPOSITORY / "tests" / "fixtures" / "environments" / "rev_text_v1"
    summary, rollouts = train(
        warm,
        {"id": "rev-text-v1"},
        "--seq-len",
        "512",
        env={"PYTHONPATH": str(fixture)},
    )
    good = check_common(summary, rollouts)
    assert len({rollout.task_id for rollout in good}) >= MIN_OK // GROUP


@pytest.fixture(scope="module")
def caller(make_workplace: Callable[[str], Workplace]) -> Workplace:
    """Return the tiny model has learned by heart how to call: nothing here is told what to say."""
    workplace = make_workplace("caller")
    tool_callers.warm_up(workplace)
    return workplace


@pytest.mark.timeout(900)
@pytest.mark.parametrize("environment", ["letter-tools", "letter-mcp"])
def test_a_tool_env_trains_a_model_that_calls_its_tool(caller: Workplace, environment: str) -> None:
    """A `ToolEnv`, whose tool is a function, and an `MCPEnv`, whose tool is a server over pipes."""
    workplace = caller
    fixtures = REPOSITORY / "tests" / "fixtures" / "environments"
    paths = [fixtures / "letter_tools", fixtures / "letter_mcp", REPOSITORY / "environments" / "code_lookup"]
    summary, rollouts = train(
        workplace,
        {"id": environment},
        *("--model.name", tool_callers.MODEL, "--seq-len", "320", "--orchestrator.sampling.max-tokens", "90"),
        *("--orchestrator.sampling.temperature", "0.7"),  # at 1.0 half of the replies of so small a model are calls
        *("--inference.engine", "embedded", "--inference.model.tool-call-parser", "hermes"),
        *("--inference.model.enable-auto-tool-choice", "true"),
        env={"PYTHONPATH": os.pathsep.join(map(str, paths))},
        timeout_s=600,
    )
    good = check_common(summary, rollouts)
    called = [rollout for rollout in good if "tool" in roles_of(rollout)]
    assert len(called) >= MIN_OK // 2
    tokenizer = AutoTokenizer.from_pretrained(workplace.path / tool_callers.MODEL)
    for rollout in called:
        roles = roles_of(rollout)
        assert roles[:3] == ["user", "assistant", "tool"] and len(roles) == 2 * rollout.num_turns
        assert sum(num_sampled_parts(sample) for sample in rollout.samples) == rollout.num_turns
        text = tokenizer.decode(rollout.samples[0].token_ids.tolist())
        assert text.startswith("<|im_start|>system\nlook<|im_end|>\n"), "the tools of the environment are in the prompt"
    # Calls that the template writes as the policy did leave the turns in one sample.
    whole = [rollout for rollout in called if len(rollout.samples) == 1 and rollout.num_turns == 2]
    assert len(whole) >= len(called) // 2
    assert max(rollout.reward for rollout in whole) > 0
