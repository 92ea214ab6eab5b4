"""Agents of a registry, as they are, are trained on through the address of their rollout, offline."""

import json
from collections import defaultdict
from pathlib import Path

import pytest

from millrace.rollouts.types import Rollout, RolloutStatus
from millrace.rollouts.wire import decode_archive
from millrace.storage.local import LocalStore

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "environments" / "public_agents"
AGENTS = ["openai-agents", "pydantic-ai", "langchain", "smolagents", "mini-swe-agent"]
KILLED = "pydantic-ai"
STEPS, GROUP = 2, 2


@pytest.mark.timeout(900)
def test_agents_of_a_registry_end_in_trained_steps(warm, agents_python: Path, tmp_path: Path) -> None:
    marker = tmp_path / "killed"
    environments = [
        {
            "id": "public_agents",
            "name": name,
            "args": {"agent": name, "python": str(agents_python), "marker": str(marker) if name == KILLED else ""},
        }
        for name in AGENTS
    ]
    settings = {"max-steps": STEPS, "seq-len": 1536, "orchestrator.batch-size": GROUP * len(AGENTS)}
    settings |= {"orchestrator.rollouts-per-example": GROUP, "orchestrator.sampling.max-tokens": 16}
    argv = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    summary, _ = warm.train(
        "--orchestrator.env",
        json.dumps(environments),
        *argv,
        "--no-orchestrator.filter-zero-advantages",
        "--orchestrator.eval.env",
        json.dumps(environments[:1]),
        "--orchestrator.eval.num-examples",
        "1",
        "--orchestrator.eval.rollouts-per-example",
        "1",
        env={"PYTHONPATH": str(FIXTURES), "MILLRACE_ENV_CAPACITY": "6"},  # each agent is seconds of a core
        timeout_s=800,
    )
    assert summary["steps"] == STEPS
    assert summary["mismatch_kl"] <= 1e-9, "the trainer sees the very tokens that the engine sampled"
    run = (warm.path / summary["checkpoint_path"]).parents[1]
    store = run.parents[2]
    warm.millrace("run", "audit", run.name, "--deep", "--store", store.as_uri())
    played = _rollouts(store, run.name)
    failed = [rollout for name in AGENTS for rollout in played[name] if rollout.status is not RolloutStatus.OK]
    assert marker.exists() and [rollout.env for rollout in failed] == [KILLED]
    assert "SIGKILL" in failed[0].error.message
    assert set(played) == set(AGENTS)
    for name in AGENTS:
        ended = [rollout for rollout in played[name] if rollout.status is RolloutStatus.OK]
        assert all(rollout.num_turns >= 2 and rollout.samples for rollout in ended), name
    # Each rollout tried the token of one that had ended before it.
    late = {rollout.metrics["late_token"] for rollouts in played.values() for rollout in rollouts if rollout.metrics}
    assert late <= {0.0, 410.0} and 410.0 in late


def _rollouts(store: Path, uid: str) -> dict[str, list[Rollout]]:
    found: dict[str, list[Rollout]] = defaultdict(list)
    files = LocalStore(store)
    for info in files.list(f"millrace/runs/{uid}/rollouts/"):
        for rollout in decode_archive(files.get(info.key)):
            found[rollout.env].append(rollout)
    return found
