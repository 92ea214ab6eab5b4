"""Other kinds of environments through the whole system: two turns with a tool, and the v1 generation."""

import json
from pathlib import Path

from millrace.rollouts.types import RolloutStatus
from millrace.rollouts.wire import decode_archive
from millrace.storage.local import LocalStore

REPOSITORY = Path(__file__).resolve().parents[2]


def archived(workplace, summary: dict) -> list:
    """Every rollout that the run's headers resolved."""
    run = (workplace.path / summary["checkpoint_path"]).parents[1]
    store = LocalStore(run.parents[2])
    keys = [info.key for info in store.list(f"millrace/runs/{run.name}/rollouts/")]
    return [rollout for key in keys for rollout in decode_archive(store.get(key))]


def train(workplace, environment: dict, *argv: str, **options) -> tuple[dict, list]:
    summary, _ = workplace.train(
        "--orchestrator.env",
        json.dumps([environment]),
        "--max-steps",
        "2",
        "--orchestrator.batch-size",
        "32",
        "--orchestrator.rollouts-per-example",
        "8",
        "--no-orchestrator.filter-zero-advantages",
        "--orchestrator.eval.num-examples",
        "4",
        *argv,
        **options,
    )
    return summary, archived(workplace, summary)


def test_two_turns_and_a_tool_give_exact_tokens(warm) -> None:
    summary, rollouts = train(
        warm, {"id": "code-lookup"}, "--seq-len", "256", "--orchestrator.sampling.max-tokens", "16"
    )
    assert summary["steps"] == 2
    assert summary["mismatch_kl"] <= 1e-4, "the trainer sees the very tokens that the engine sampled"
    good = [rollout for rollout in rollouts if rollout.status == RolloutStatus.OK]
    assert len(good) >= 64
    assert all(rollout.samples and rollout.num_turns >= 1 for rollout in good)
    assert {rollout.num_turns for rollout in good} <= {1, 2}


def test_a_v1_taskset_trains(warm) -> None:
    fixture = REPOSITORY / "tests" / "fixtures" / "environments" / "rev_text_v1"
    summary, rollouts = train(
        warm,
        {"id": "rev-text-v1"},
        "--seq-len",
        "512",
        env={"PYTHONPATH": str(fixture)},
    )
    assert summary["steps"] == 2
    assert summary["mismatch_kl"] <= 1e-4
    assert all(span.version <= 2 for rollout in rollouts for sample in rollout.samples for span in sample.policy_spans)
