"""Environments that are servers of their own, through the library's taskset for them: they end in trained steps.

The server is what `openenv init` writes, unchanged but for the number of its sessions. It is played with `verifiers`
0.3.1 and 0.4 beside each other, which bring different releases of `openenv`.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import pytest

from millrace.local.directory import free_ports
from millrace.local.redis import die_with_parent
from millrace.rollouts.types import RolloutStatus
from millrace.rollouts.wire import decode_archive
from millrace.storage.local import LocalStore
from millrace_testing import polling

NAME = "echo_back"
STEPS, BATCH, GROUP = 3, 8, 2  # the third is sampled from a policy that has moved: the first has no learning rate yet
START_S = 240.0
ONE_SESSION, SESSIONS = "max_concurrent_envs=1,", "max_concurrent_envs=32,"
READY = "Echo Back environment ready!"


@pytest.fixture(scope="module")
def base_url(openenv_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a new server of `openenv init`, which rewards a message by its length."""
    place = tmp_path_factory.mktemp("openenv")
    program = Path(openenv_python).with_name("openenv")
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    subprocess.run([program, "init", NAME], cwd=place, env=env, check=True, timeout=START_S, capture_output=True)
    app = place / NAME / "server" / "app.py"
    written = app.read_text()
    assert written.count(ONE_SESSION) == 1
    app.write_text(written.replace(ONE_SESSION, SESSIONS))
    [port] = free_ports(1)
    argv = [openenv_python, "-m", "uvicorn", f"{NAME}.server.app:app", "--host", "127.0.0.1", "--port", str(port)]
    with (place / "log").open("w") as log:
        process = subprocess.Popen(
            argv, cwd=place, env=env, stdout=log, stderr=subprocess.STDOUT, preexec_fn=die_with_parent
        )
    try:

        def answers() -> bool:
            assert process.poll() is None, (place / "log").read_text()[-3000:]
            with closing(HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
                try:
                    connection.request("GET", "/schema")
                    return connection.getresponse().status == 200
                except OSError:
                    return False

        polling.block_until(answers, timeout_s=START_S)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.mark.timeout(900)
def test_a_server_of_openenv_ends_in_trained_steps(
    warm, openenv_python: str, pinned_pythons: dict[str, str], base_url: str
) -> None:
    """Nothing is stale in this run, so that the trainer's log-probabilities are those of the engine."""
    args = {"base_url": base_url, "resets": [{}, {}], "millrace": {"env": {"player": {"max_turns": 2}}}}
    pythons = {"openenv/0.3": pinned_pythons["0.3"], "openenv/0.4": openenv_python}
    environments = [{"id": "openenv", "name": name, "python": python, "args": args} for name, python in pythons.items()]
    settings = {"max-steps": STEPS, "seq-len": 2048, "async-level": 0, "orchestrator.batch-size": BATCH}
    settings |= {"orchestrator.rollouts-per-example": GROUP, "orchestrator.sampling.max-tokens": 16}
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    summary, _ = warm.train(
        "--orchestrator.env",
        json.dumps(environments),
        *flags,
        "--no-orchestrator.filter-zero-advantages",
        "--no-orchestrator.eval",
        timeout_s=700,
    )
    assert summary["steps"] == STEPS and summary["staleness_max"] == 0
    steps = map(json.loads, (warm.path / summary["policy_path"]).with_name("metrics.jsonl").read_text().splitlines())
    exact = [step["metrics"]["mismatch_kl/mean"] for step in steps if step["kind"] == "step"]
    assert len(exact) == STEPS and max(exact) <= 1e-9, "the trainer sees the very tokens that the engine sampled"
    run = (warm.path / summary["checkpoint_path"]).parents[1]
    place = run.parents[2]
    warm.millrace("run", "audit", run.name, "--deep", "--store", place.as_uri())
    store = LocalStore(place)
    keys = [info.key for info in store.list(f"millrace/runs/{run.name}/rollouts/")]
    rollouts = [rollout for key in keys for rollout in decode_archive(store.get(key))]
    failed = [rollout.error for rollout in rollouts if rollout.status is not RolloutStatus.OK]
    assert not failed, failed[0]
    assert {rollout.env for rollout in rollouts} == pythons.keys()
    for rollout in rollouts:
        messages = json.loads(rollout.messages_json)
        said = [message.get("content") or "" for message in messages if message["role"] == "assistant"]
        seen = [json.loads(message["content"])["observation"] for message in messages if message["role"] == "user"]
        assert seen[0]["echoed_message"] == READY
        assert [each["echoed_message"].strip() for each in seen[1:]] == [each.strip() for each in said[: len(seen) - 1]]
        assert rollout.samples and rollout.num_turns == len(said)
        assert len(said) == 2 or not said[0].strip(), "an empty message ends it"
    assert any(rollout.reward for rollout in rollouts), "messages are rewarded by their length"
