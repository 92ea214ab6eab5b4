"""Public task packages, unmodified, through the integrations of `verifiers`: they end in trained steps.

`reasoning-gym` is one turn; `textarena` has several, as a v0 game and as the library's own v1 taskset. Both are played
with `verifiers` 0.3.1 and, as v1 tasksets, with 0.4 as well. Nothing is downloaded: the words that the game draws from
are made here, and NLTK fetches nothing through a proxy.
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
STEPS, BATCH, GROUP, NUM_TASKS = 2, 12, 2, 8
ENVIRONMENTS = [
    {"id": "sums-of-reasoning-gym", "args": {"gym": "chain_sum", "num_train_examples": 64, "num_eval_examples": 4}},
    {"id": "word-game-of-textarena", "args": {"game": "Wordle-v0", "num_train_examples": 64}},
    {"id": "textarena", "args": {"game": "Hangman-v0", "num_tasks": 64}},
]


@pytest.fixture(scope="module")
def nltk_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what NLTK would download: a list of words, and a tagger that knows them as nouns."""
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
    evaluated = ("--orchestrator.eval.env", json.dumps(ENVIRONMENTS[:1]), "--orchestrator.eval.num-examples", "2")
    rollouts = _trained(warm, ENVIRONMENTS, public_environments, nltk_data, *evaluated)
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


@pytest.mark.timeout(900)
def test_one_taskset_is_trained_with_two_releases(
    warm, public_environments: Path, pinned_pythons: dict[str, str], nltk_data: Path
) -> None:
    """`textarena` and `reasoning-gym` beside each other with 0.3.1 and 0.4: the same prompts, token by token."""
    new = pinned_pythons["0.4"]
    [site] = Path(new).parents[1].glob("lib/python*/site-packages")
    (site / "public_tasks.pth").write_text(f"{FIXTURES}\n")
    each = [
        {"id": "textarena", "args": {"game": "Hangman-v0", "num_tasks": NUM_TASKS}},
        {"id": "sums_of_reasoning_gym_v1", "args": {"size": NUM_TASKS}},
    ]
    old = [{**environment, "name": f"{environment['id']}/0.3"} for environment in each]
    environments = [*old, *({**environment, "name": f"{environment['id']}/0.4", "python": new} for environment in each)]
    rollouts = _trained(warm, environments, public_environments, nltk_data, "--no-orchestrator.eval", batch=24)
    failed = [rollout.error for rollout in rollouts if rollout.status is not RolloutStatus.OK]
    assert not failed, failed[0]
    assert {rollout.env for rollout in rollouts} == {environment["name"] for environment in environments}
    prompts: dict[tuple[str, int], set[tuple[int, ...]]] = {}
    for rollout in rollouts:
        sample = rollout.samples[0]
        prompt = tuple(sample.token_ids[: int(sample.loss_mask.argmax())].tolist())
        prompts.setdefault((rollout.env.partition("/")[0], rollout.task_index), set()).add(prompt)
    assert all(len(seen) == 1 for seen in prompts.values())
    for release in ("0.3", "0.4"):
        turns = [rollout.num_turns for rollout in rollouts if rollout.env == f"textarena/{release}"]
        assert max(turns) > 1, "a wrong move may be tried again"
    shared = {
        release: {(rollout.env.partition("/")[0], rollout.task_index) for rollout in rollouts if release in rollout.env}
        for release in ("/0.3", "/0.4")
    }
    assert shared["/0.3"] & shared["/0.4"], "some task was played with both"


def _trained(warm, environments: list[dict], public: Path, nltk_data: Path, *argv: str, batch: int = BATCH) -> list:
    """Train on them offline, audit the run, and return its rollouts."""
    offline = {"HTTPS_PROXY": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    env = {"PYTHONPATH": f"{FIXTURES}:{public}", "NLTK_DATA": str(nltk_data), **offline}
    settings = {"max-steps": STEPS, "seq-len": 1536, "orchestrator.batch-size": batch}
    settings |= {"orchestrator.rollouts-per-example": GROUP, "orchestrator.sampling.max-tokens": 16}
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    summary, _ = warm.train(
        "--orchestrator.env",
        json.dumps(environments),
        *flags,
        "--no-orchestrator.filter-zero-advantages",
        *argv,
        env=env,
        timeout_s=500,
    )
    assert summary["steps"] == STEPS
    steps = map(json.loads, (warm.path / summary["policy_path"]).with_name("metrics.jsonl").read_text().splitlines())
    exact = [step["metrics"]["mismatch_kl/mean"] for step in steps if step["kind"] == "step"]
    assert len(exact) == STEPS and max(exact) <= 1e-6, "the trainer sees the very tokens that the engine sampled"
    run = (warm.path / summary["checkpoint_path"]).parents[1]
    place = run.parents[2]
    warm.millrace("run", "audit", run.name, "--deep", "--store", place.as_uri())
    store = LocalStore(place)
    keys = [info.key for info in store.list(f"millrace/runs/{run.name}/rollouts/")]
    return [rollout for key in keys for rollout in decode_archive(store.get(key))]
