"""A real `ToolEnv` against the HTTP API of the embedded engine, with an engine behind it that says what it is told."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from millrace.inference.engine import EngineState, EngineStatus, FinishReason, GenerateRequest, Generation
from millrace.inference.http.parsers import ChatParsers
from millrace.inference.http.server import HttpApi, start_http
from millrace.inference.model_files import ModelSlot, ServedModel
from millrace.internal.v1 import play_pb2
from millrace.rollouts.types import PolicySpan, Rollout, RolloutStatus
from millrace_testing import tool_templates
from millrace_testing.inference import tiny

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

ENV = "letter-tools"
END = "<|im_end|>"
CALL = '<tool_call>\n{"name": "look", "arguments": {"letter": "a"}}\n</tool_call>'
XML_CALL = "<tool_call>\n<function=look>\n<parameter=letter>\na\n</parameter>\n</function>\n</tool_call>"


class TellingEngine:
    """Generates the replies of its script, one after the other."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.script: list[str] = []
        self.prompts: list[str] = []

    def status(self) -> EngineStatus:
        return EngineStatus(
            state=EngineState.READY,
            identity=None,
            is_paused=False,
            num_running=0,
            num_waiting=0,
            max_num_seqs=8,
            max_model_len=4096,
            progress_age_s=0.0,
            num_generated_tokens=0,
            num_finished=0,
        )

    async def generate(self, request: GenerateRequest) -> Generation:
        self.prompts.append(self.tokenizer.decode(request.prompt_token_ids))
        ids = self.tokenizer.encode(self.script.pop(0) + END)
        spans = (
            PolicySpan(lineage=0, version=3, start=0, end=1),
            PolicySpan(lineage=0, version=4, start=1, end=len(ids)),
        )
        return Generation(
            token_ids=np.array(ids, np.int32),
            logprobs=np.linspace(-0.5, -0.1, len(ids), dtype=np.float32),
            policy_spans=spans,
            finish_reason=FinishReason.STOP,
        )

    async def abort_all(self) -> None:
        """Nothing is ever in flight."""


class Tools:
    """An env-server, an engine that plays by a script, and how its answers are parsed."""

    def __init__(self, server: Any, directory: Path) -> None:
        self.server = server
        self.tokenizer = tiny.tiny_tokenizer()
        self.engine = TellingEngine(self.tokenizer)
        self._directory = directory

    async def play(self, *replies: str, template: str, parsers: ChatParsers) -> Rollout:
        """Return one rollout in which the policy says this."""
        self.tokenizer.chat_template = template
        self.engine.script, self.engine.prompts = list(replies), []
        engine: Any = self.engine
        served = ServedModel(names=("policy",), directory=self._directory, tokenizer=self.tokenizer)
        api = HttpApi(engine, ModelSlot(current=served), parsers=parsers)
        http = await start_http(api, "127.0.0.1", 0)
        try:
            await self.server.open(ENV)
            sampling = play_pb2.Sampling(temperature=1.0, max_tokens=256)
            url = f"http://127.0.0.1:{http.port}/v1"
            return await self.server.play_one(ENV, 0, base_url=url, sampling=sampling)
        finally:
            await http.stop()

    def trained(self, rollout: Rollout) -> list[str]:
        """Return what is trained on in each sample."""
        return [self.text(sample.token_ids[sample.loss_mask == 1]) for sample in rollout.samples]

    def text(self, token_ids: Any) -> str:
        return self.tokenizer.decode(token_ids.tolist())


@pytest_asyncio.fixture(loop_scope="session")
async def tools(server: Any, tmp_path: Path) -> AsyncIterator[Tools]:
    yield Tools(server, tmp_path)


def messages_of(rollout: Rollout) -> list[dict[str, Any]]:
    return json.loads(rollout.messages_json)


@pytest.mark.parametrize(
    ("parsers", "template", "call"),
    [
        (ChatParsers(), tool_templates.hermes(), CALL),
        (ChatParsers(), tool_templates.hermes(), f"I look.\n{CALL}"),
        (ChatParsers(tool_calls="qwen3_json", reasoning="qwen3"), tool_templates.hermes(), f"<think>hm</think>{CALL}"),
        (ChatParsers(reasoning="deepseek_r1"), tool_templates.hermes(), f"<think>\nhm\n</think>{CALL}"),
        (ChatParsers(tool_calls="qwen3_coder"), tool_templates.xml(), XML_CALL),
        (ChatParsers(tool_calls="qwen3_xml", reasoning="qwen3"), tool_templates.xml(), f"<think>hm</think>{XML_CALL}"),
    ],
    ids=["hermes", "hermes-content", "qwen3-hermes", "deepseek_r1-hermes", "qwen3_coder", "qwen3-qwen3_xml"],
)
async def test_a_tool_is_called_and_both_turns_are_one_exact_sample(tools, parsers, template, call):
    last = "<think>so</think>ku" if parsers.reasoning else "ku"
    rollout = await tools.play(call, last, template=template, parsers=parsers)
    assert rollout.status is RolloutStatus.OK and rollout.num_turns == 2, rollout.error
    user, assistant, tool, answer = messages_of(rollout)
    assert [user["role"], assistant["role"], tool["role"], answer["role"]] == ["user", "assistant", "tool", "assistant"]
    [made] = map(json.loads, assistant["tool_calls"])
    assert (made["name"], json.loads(made["arguments"])) == ("look", {"letter": "a"})
    assert answer["content"] == "ku"
    assert rollout.metrics["look_calls"] == rollout.metrics["total_tool_calls"] == 1
    assert rollout.reward == 0.5 * rollout.metrics["looked"] + 0.5 * rollout.metrics["said"] > 0
    # The tools that the environment offers stand in the prompt, without a demand that would bend what is sampled.
    shown = json.loads(tools.engine.prompts[0].split("system\n")[1].split(END)[0])
    assert [one["function"]["name"] for one in shown] == ["look"] and "strict" not in shown[0]["function"]
    assert set(shown[0]["function"]["parameters"]["properties"]) == {"letter"}
    # Written out by hand: what the policy saw and said, token by token.
    [sample] = rollout.samples
    middle = f"\n<|im_start|>tool\n{tool['content']}{END}\n<|im_start|>assistant\n"
    assert tools.text(sample.token_ids) == tools.engine.prompts[0] + call + END + middle + last + END
    assert tools.trained(rollout) == [call + END + last + END]
    assert [span.version for span in sample.policy_spans] == [3, 4, 3, 4]
    sizes = [len(tools.tokenizer.encode(text + END)) for text in (call, last)]
    expected = np.concatenate([np.linspace(-0.5, -0.1, size, dtype=np.float32) for size in sizes])
    np.testing.assert_array_equal(sample.inference_logprobs[sample.loss_mask == 1], expected)


async def test_a_call_that_the_template_writes_in_another_way_begins_a_sample(tools):
    """The spaces that the policy left out stand in the next prompt: what it said is no part of that."""
    call = '<tool_call>{"name":"look","arguments":{"letter":"a"}}</tool_call>'
    rollout = await tools.play(call, "ku", template=tool_templates.hermes(), parsers=ChatParsers())
    assert rollout.status is RolloutStatus.OK and rollout.metrics["look_calls"] == 1
    assert tools.trained(rollout) == [call + END, "ku" + END], "each turn is trained once, in the context that it had"
    first, second = rollout.samples
    assert tools.text(first.token_ids) == tools.engine.prompts[0] + call + END
    assert tools.text(second.token_ids) == tools.engine.prompts[1] + "ku" + END


async def test_a_template_that_drops_thoughts_begins_a_sample(tools):
    template = tool_templates.hermes(keeps_thoughts=False)
    call = f"<think>hm</think>{CALL}"
    rollout = await tools.play(call, "so</think>ku", template=template, parsers=ChatParsers(reasoning="qwen3"))
    assert rollout.status is RolloutStatus.OK and rollout.rewritten_turn == 2
    assert tools.trained(rollout) == [call + END, "so</think>ku" + END]
    assert "hm" not in tools.engine.prompts[1]


@pytest.mark.parametrize(
    ("call", "answered"),
    [
        ('{"name": "look", "arguments": {"letter": "?"}}', "'?'"),
        ('{"name": "look", "arguments": {}}', "letter"),
        ('{"name": "look", "arguments": "a"}', "mapping"),
        ('{"name": "smell", "arguments": {"letter": "a"}}', "'smell'"),
    ],
)
async def test_a_call_that_the_tool_refuses_is_answered_and_trained_on(tools, call, answered):
    said = f"<tool_call>\n{call}\n</tool_call>"
    rollout = await tools.play(said, "ku", template=tool_templates.hermes(), parsers=ChatParsers())
    assert rollout.status is RolloutStatus.OK and rollout.num_turns == 2, rollout.error
    assert answered in messages_of(rollout)[2]["content"]
    assert tools.trained(rollout) == [said + END + "ku" + END]


@pytest.mark.parametrize("said", ["<tool_call>{broken</tool_call>", CALL[:-20], "<tool_call>" * 50, "\x00\x1b[2J�"])
async def test_what_is_no_call_is_a_reply(tools, said):
    rollout = await tools.play(said, template=tool_templates.hermes(), parsers=ChatParsers())
    assert rollout.status is RolloutStatus.OK and rollout.num_turns == 1, rollout.error
    assert messages_of(rollout)[1]["content"] == said
    assert tools.trained(rollout) == [said + END]


async def test_two_calls_in_one_turn_are_both_answered(tools):
    rollout = await tools.play(f"{CALL}\n{CALL}", "ku", template=tool_templates.hermes(), parsers=ChatParsers())
    assert rollout.status is RolloutStatus.OK and rollout.metrics["look_calls"] == 2
    assert [message["role"] for message in messages_of(rollout)] == ["user", "assistant", "tool", "tool", "assistant"]
    assert tools.trained(rollout) == [f"{CALL}\n{CALL}{END}ku{END}"]


async def test_an_engine_without_automatic_choice_fails_the_rollout_by_name(tools):
    parsers = ChatParsers(has_auto_tool_choice=False)
    rollout = await tools.play("ku", template=tool_templates.hermes(), parsers=parsers)
    assert rollout.status is RolloutStatus.MODEL_ERROR and "enable_auto_tool_choice" in rollout.error.message
