"""Public task packages, unmodified, through the integrations of `verifiers`: they end in trained steps.

`reasoning-gym` is one turn; `textarena` has several, as a v0 game and as the library's own v1 taskset. Nothing is
downloaded: the words that the game draws from are made here, and NLTK fetches nothing through a proxy.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

from millrace.rollouts.types import RolloutStatus
from millrace.rollouts.wire import decode_archive
from millrace.storage.local import LocalStore

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "environments" / "public_tasks"
WORDS = ["apple", "bread", "chair", "house", "plant", "river", "stone", "table", "train", "water"]
STEPS, BATCH, GROUP = 2, 12, 2
ENVIRONMENTS = [
    {"id": "sums-of-reasoning-gym", "args": {"gym": "chain_sum", "num_train_examples": 64, "num_eval_examples": 4}},
    {"id": "word-game-of-textarena", "args": {"game": "Wordle-v0", "num_train_examples": 64}},
    {"id": "textarena", "args": {"game": "Hangman-v0", "num_tasks": 64}},
]


@pytest.fixture(scope="module")
def nltk_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What NLTK would download: a list of words, and a tagger that knows them as nouns."""
    root = tmp_path_factory.mktemp("nltk")
    words, tagger = root / "corpora" / "words", root / "taggers" / "averaged_perceptron_tagger_eng"
    for directory in (words, tagger):
        directory.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (words / name).write_text("\n".join(WORDS) + "\n")
    nouns = dict.fromkeys([*WORDS, "test"], "NN")
    for name, content in {"weights": {}, "tagdict": nouns, "classes": ["NN"]}.items():
        (tagger / f"averaged_perceptron_tagger_eng.{name}.json").write_text(json.dumps(content))
    return root


@pytest.mark.timeout(600)
def test_public_packages_end_in_trained_steps(warm, public_environments: Path, nltk_data: Path) -> None:
    offline = {"HTTPS_PROXY": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    env = {"PYTHONPATH": f"{FIXTURES}:{public_environments}", "NLTK_DATA": str(nltk_data), **offline}
    settings = {"max-steps": STEPS, "seq-len": 1536, "orchestrator.batch-size": BATCH}
    settings |= {"orchestrator.rollouts-per-example": GROUP, "orchestrator.sampling.max-tokens": 16}
    argv = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    summary, _ = warm.train(
        "--orchestrator.env",
        json.dumps(ENVIRONMENTS),
        *argv,
        "--no-orchestrator.filter-zero-advantages",
        "--orchestrator.eval.env",
        json.dumps(ENVIRONMENTS[:1]),
        "--orchestrator.eval.num-examples",
        "2",
        env=env,
        timeout_s=500,
    )
    assert summary["steps"] == STEPS
    assert summary["mismatch_kl"] <= 1e-4, "the trainer sees the very tokens that the engine sampled"
    run = (warm.path / summary["checkpoint_path"]).parents[1]
    store = LocalStore(run.parents[2])
    keys = [info.key for info in store.list(f"millrace/runs/{run.name}/rollouts/")]
    rollouts = [rollout for key in keys for rollout in decode_archive(store.get(key))]
    failed = [rollout.error for rollout in rollouts if rollout.status is not RolloutStatus.OK]
    assert not failed, failed[0]
    played = Counter(rollout.env for rollout in rollouts)
    assert set(played) == {environment["id"] for environment in ENVIRONMENTS}
    for rollout in rollouts:
        roles = [message["role"] for message in json.loads(rollout.messages_json)]
        assert rollout.samples and roles.count("assistant") == rollout.num_turns
    for game in ("word-game-of-textarena", "textarena"):
        turns = [rollout.num_turns for rollout in rollouts if rollout.env == game]
        assert max(turns) > 1, "a wrong move may be tried again"
