"""vLLM's server takes whole chat completions apart by our parsers, where it was started with names that we have."""

from typing import Any, NamedTuple

import pytest

from millrace.inference.vllm.server.parsers import use_our_parsers
from millrace_testing.inference.parser_cases import TOOLS

CALL = '<tool_call>{"name": "find", "arguments": {"text": "x"}}</tool_call>'


class Call(NamedTuple):
    id: str | None
    name: str
    arguments: str


class Tool(NamedTuple):
    described: dict[str, Any]

    def model_dump(self, *, exclude_none: bool) -> dict[str, Any]:
        assert exclude_none
        return self.described


class Request:
    """A chat request as vLLM's."""

    messages = ()
    tools = [Tool(each) for each in TOOLS]  # noqa: RUF012 - nobody changes it

    def __init__(self, tool_choice: str | None = "auto", **template_kwargs: Any) -> None:
        self.tool_choice = tool_choice
        self.chat_template_kwargs = template_kwargs


class ResponsesRequest:
    """A request of another API."""

    tool_choice = "auto"


class Composed:
    """What vLLM composes of two parsers."""

    def parse(self, text: str, request: Any, enable_auto_tools: bool = False, token_ids: Any = ()) -> Any:
        return "vLLM's own"

    def parse_delta(self) -> str:
        return "vLLM's own"

    def _initialize_history_tool_call_cnt(self, request: Any) -> None:
        self.num_seen = len(request.messages)

    def _make_tool_call_id(self, name: str) -> str | None:
        return f"{name}:{self.num_seen}"


def composed(tool_calls: str | None, reasoning: str | None, *, auto: bool = True) -> Any:
    class Manager:
        @classmethod
        def get_parser(
            cls, tool_parser_name: Any = None, reasoning_parser_name: Any = None, *args: Any, **_: Any
        ) -> Any:
            return Composed if tool_parser_name or reasoning_parser_name else None

    use_our_parsers(Manager, call_type=Call)
    made = Manager.get_parser(
        tool_parser_name=tool_calls, reasoning_parser_name=reasoning, enable_auto_tools=auto, model_name="m"
    )
    return None if made is None else made()


def test_a_call_that_is_only_thought_of_is_not_made() -> None:
    parser = composed("hermes", "deepseek_r1")
    thought = f"<think>perhaps {CALL}</think>"
    assert parser.parse(thought + "no", Request(), True) == (f"perhaps {CALL}", "no", [])
    reasoning, content, calls = parser.parse(thought + CALL, Request(), True)
    assert (reasoning, content) == (f"perhaps {CALL}", None)
    assert calls == [Call("find:0", "find", '{"text": "x"}')]
    assert composed("hermes", None).parse(thought, Request(), True) == (None, thought, [])


def test_calls_are_looked_for_where_the_request_leaves_them_to_the_model() -> None:
    assert composed("hermes", None).parse(CALL, Request("none"), True) == (None, CALL, [])
    assert composed(None, "qwen3").parse(f"a</think>{CALL}", Request(None)) == ("a", CALL, [])
    assert composed(None, "qwen3").parse("a</think>b", Request(enable_thinking=False)) == (None, "a</think>b", [])
    assert composed("hermes", None).parse("", Request(), True) == (None, None, [])


@pytest.mark.parametrize(
    ("tool_calls", "reasoning"), [("mistral", None), ("hermes", "glm45"), ("kimi_k2", "qwen3"), (None, "step3")]
)
def test_parsers_that_are_vllms_alone_stay(tool_calls: str | None, reasoning: str | None) -> None:
    assert composed(tool_calls, reasoning).parse(CALL, Request(), True) == "vLLM's own"


def test_what_is_constrained_streamed_or_of_another_api_stays() -> None:
    parser = composed("hermes", "qwen3")
    assert parser.parse(CALL, Request("required"), True) == "vLLM's own"
    assert parser.parse(CALL, ResponsesRequest(), True) == "vLLM's own"
    assert parser.parse_delta() == "vLLM's own"
    assert composed(None, None) is None
    without = composed("mistral", "qwen3", auto=False)
    assert without.parse(f"a</think>{CALL}", Request()) == ("a", CALL, []), "its parser of calls is not used"
