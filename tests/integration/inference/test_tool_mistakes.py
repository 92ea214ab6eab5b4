"""Calls whose arguments are no object: the environment answers the policy, and the rollout is trained on."""

from collections.abc import AsyncIterator
from types import ModuleType
from typing import Any

import pytest
import verifiers as vf
from datasets import Dataset

from millrace.env_server.adapters.v0 import V0Adapter
from millrace.inference.http.parsers import ChatParsers, ParsedCompletion, ToolCall
from millrace.internal.v1 import rollout_pb2
from millrace.internal.v1.play_pb2 import EnvSpec, PlayGroupRequest, Sampling
from millrace.rollouts.types import RolloutStatus

BY_ITEMS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}{% endfor %}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def find(text: str) -> str:
    """Find a text."""
    return f"found {text}"


def fine(completion: Any) -> float:
    return 1.0


@pytest.fixture
async def adapter() -> AsyncIterator[V0Adapter]:
    module = ModuleType("tooled")
    tasks = Dataset.from_list([{"question": "find it", "answer": ""}])
    module.load_environment = lambda: vf.ToolEnv(  # type: ignore[attr-defined]
        tools=[find], dataset=tasks, rubric=vf.Rubric(funcs=[fine]), max_turns=3
    )
    loaded = V0Adapter.load(EnvSpec(name="tooled", id="tooled"), module, {"renderer": "off"})
    await loaded.start()
    yield loaded
    await loaded.close()


@pytest.mark.parametrize("arguments", ["[1, 2]", '"text"', "7", "null", "{broken"])
async def test_arguments_of_another_type_are_answered_and_trained_on(
    served: Any, adapter: V0Adapter, monkeypatch: pytest.MonkeyPatch, arguments: str
) -> None:
    said = iter([ParsedCompletion(content=None, calls=[ToolCall("find", arguments)])])

    def parse_completion(self: ChatParsers, text: str, **_: Any) -> ParsedCompletion | None:
        return next(said, None)

    monkeypatch.setattr(ChatParsers, "parse_completion", parse_completion)
    monkeypatch.setattr(served.slot.current.tokenizer, "chat_template", BY_ITEMS)  # it wants an object
    request = PlayGroupRequest(
        run_uid="r",
        purpose=rollout_pb2.PURPOSE_TRAIN,
        ordinal=0,
        members=[0],
        group_size=1,
        env=EnvSpec(name="tooled", id="tooled"),
        base_url=f"{served.base_url}/v1",
        model="policy",
        sampling=Sampling(temperature=1.0, max_tokens=8),
        rollout_timeout_seconds=60,
    )
    [outcome] = await adapter.play(request, tokenizer_dir="")
    assert outcome.status is RolloutStatus.OK, outcome.error_message
    assert outcome.num_turns == 2 and sum(sample.num_loss_tokens for sample in outcome.samples) >= 2
    [answer] = [message for message in outcome.messages if message["role"] == "tool"]
    assert answer["content"], "what was wrong is said to the policy"
