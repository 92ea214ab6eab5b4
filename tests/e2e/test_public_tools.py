"""A public package with several turns and tools, unmodified, through the integration of `verifiers`, to a trained step.

`nemo-gym` keeps a counter for each rollout after HTTP; the library's own v1 taskset offers it to the policy as an MCP
tool server. The package needs Python 3.12 and other pins than ours, so its server runs in an environment of its own, as
the library's `resources_url` foresees.
"""

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from importlib import util
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from millrace.env_server.adapters.renderer import choose_renderer
from millrace.local.redis import die_with_parent
from millrace.rollouts.types import RolloutStatus
from millrace.rollouts.wire import decode_archive
from millrace.storage.local import LocalStore
from millrace_testing import polling, tool_callers, tool_templates
from millrace_testing.workplaces import Workplace

NAME = "example_session_state_mgmt"
STEPS, BATCH, GROUP = 2, 10, 2
START_S = 180.0


@pytest.fixture(scope="module")
def dataset(nemo_gym_python: str) -> Path:
    """Return the package's own tasks: `add 1 then add 2 then get the count`."""
    [site] = Path(nemo_gym_python).parents[1].glob("lib/python*/site-packages")
    return site / "resources_servers" / NAME / "data" / "example.jsonl"


@pytest.fixture(scope="module")
def resources_url(nemo_gym_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the package's server, started by the library's own program for it."""
    spec = util.find_spec("verifiers.v1")
    assert spec is not None and spec.submodule_search_locations
    program = Path(spec.submodule_search_locations[0]) / "tasksets" / "nemo_gym" / "server.py"
    place = tmp_path_factory.mktemp("nemo-gym")
    entry = f"resources_servers.{NAME}.app:StatefulCounterResourcesServer"
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    with (place / "log").open("w") as log:
        process = subprocess.Popen(
            [nemo_gym_python, "-P", str(program)],
            cwd=place,
            env={**env, "NEMO_GYM_RESOURCE_SERVER": entry},
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_parent,
        )
    try:
        port = place / "nemo_gym.port"

        def is_there() -> bool:
            assert process.poll() is None, (place / "log").read_text()[-3000:]
            return port.exists() and bool(port.read_text())

        polling.block_until(is_there, timeout_s=START_S)
        yield f"http://127.0.0.1:{port.read_text()}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def caller(make_workplace: Callable[[str], Workplace], dataset: Path) -> Workplace:
    """Return the tiny model with the format of a Qwen3, which has learned by heart what a good player says."""
    workplace = make_workplace("counter")
    played = [_played(json.loads(line)) for line in dataset.read_text().splitlines()]
    offered = [json.dumps(tool) for tool in played[0]["tools"]]
    phrases = [tool_templates.TOOLS_BEGIN, tool_templates.TOOLS_END, '{"name": "', '", "arguments": ', *offered]
    tool_callers.learn(
        workplace,
        played * 40,
        template=tool_templates.qwen3(),
        seq_len=320,
        batch_size=10,
        steps=90,
        symbols=(*tool_templates.QWEN3_SYMBOLS, *phrases),  # else a prompt has a thousand tokens, one per byte
    )
    assert choose_renderer(workplace.path / tool_callers.MODEL) == "qwen3"
    return workplace


def _played(row: dict) -> tool_callers.Conversation:
    """Return the conversation that solves a task."""
    params = row["responses_create_params"]
    question, count = params["input"][0]["content"], row["expected_count"]

    def called(name: str, answer: dict, **arguments: int) -> list[dict]:
        function = {"name": name, "arguments": arguments}
        call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        return [call, {"role": "tool", "content": json.dumps(answer, separators=(",", ":"))}]

    messages = [{"role": "user", "content": question}]
    for number in re.findall(r"\d+", question):
        messages += called("increment_counter", {"success": True}, count=int(number))
    messages += called("get_counter_value", {"count": count})
    messages.append({"role": "assistant", "content": str(count)})
    functions = [{key: tool[key] for key in ("name", "description", "parameters")} for tool in params["tools"]]
    return {"messages": messages, "tools": [{"type": "function", "function": function} for function in functions]}


@pytest.mark.timeout(900)
def test_a_public_package_with_turns_and_tools_ends_in_trained_steps(
    caller: Workplace, resources_url: str, dataset: Path
) -> None:
    args = {"dataset": str(dataset), "task": {"resources_url": resources_url}, "env": {"agent": {"max_turns": 6}}}
    settings = {"model.name": tool_callers.MODEL, "max-steps": STEPS, "seq-len": 640}
    settings |= {"orchestrator.batch-size": BATCH, "orchestrator.rollouts-per-example": GROUP}
    settings |= {"orchestrator.sampling.max-tokens": 64, "orchestrator.sampling.temperature": 0.7}
    settings |= {"inference.engine": "embedded"}
    argv = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    summary, _ = caller.train(
        "--orchestrator.env",
        json.dumps([{"id": "nemo_gym", "args": args}]),
        *argv,
        "--no-orchestrator.filter-zero-advantages",
        "--no-orchestrator.eval",
        timeout_s=700,
    )
    assert summary["steps"] == STEPS
    steps = map(json.loads, (caller.path / summary["policy_path"]).with_name("metrics.jsonl").read_text().splitlines())
    exact = [step["metrics"]["mismatch_kl/mean"] for step in steps if step["kind"] == "step"]
    assert len(exact) == STEPS and max(exact) <= 1e-6, "the trainer sees the very tokens that the engine sampled"
    run = (caller.path / summary["checkpoint_path"]).parents[1]
    store = LocalStore(run.parents[2])
    keys = [info.key for info in store.list(f"millrace/runs/{run.name}/rollouts/")]
    rollouts = [rollout for key in keys for rollout in decode_archive(store.get(key))]
    failed = [rollout.error for rollout in rollouts if rollout.status is not RolloutStatus.OK]
    assert len(rollouts) >= STEPS * BATCH and not failed, failed[:1]
    tokenizer = AutoTokenizer.from_pretrained(caller.path / tool_callers.MODEL)
    for rollout in rollouts:
        messages = json.loads(rollout.messages_json)
        answers = [message["content"] for message in messages if message["role"] == "tool"]
        assert [message["role"] for message in messages].count("assistant") == rollout.num_turns
        [sample] = rollout.samples
        text = tokenizer.decode(sample.token_ids.tolist())
        assert text.startswith("<|im_start|>system\n# Tools"), "the tools of the package are in the prompt"
        assert text.count("<tool_response>") == len(answers)
        assert all(f"<tool_response>\n{answer}\n</tool_response>" in text for answer in answers)
        if rollout.reward == 1.0:  # only the package knows where the counter stood
            assert answers[:2] == ['{"success":true}'] * 2 and rollout.num_turns > 2
    played = [rollout for rollout in rollouts if rollout.num_turns > 2]
    assert len(played) >= len(rollouts) // 2 and any(rollout.reward == 1.0 for rollout in played)
