"""Every parameter that the SDKs of OpenAI and Anthropic can send is answered, refused by name, or harmless."""

import inspect

import pytest
from anthropic.resources.messages import AsyncMessages
from openai.resources.chat.completions import AsyncCompletions as AsyncChats
from openai.resources.completions import AsyncCompletions
from openai.resources.responses import AsyncResponses

from millrace.errors import InvalidSpecError
from millrace.inference.http.schema import ChatBody, CompletionBody, GenerateBody, GenerateSampling, TokenizeBody
from millrace.rollouts import parameters
from millrace.rollouts.parameters import Treatment, check_parameters, check_tools

TABLES = {
    "chats": (AsyncChats, parameters.CHAT),
    "completions": (AsyncCompletions, parameters.COMPLETIONS),
    "responses": (AsyncResponses, parameters.RESPONSES),
    "messages": (AsyncMessages, parameters.MESSAGES),
}
BODIES = {
    "chats": (ChatBody, parameters.CHAT),
    "completions": (CompletionBody, parameters.COMPLETIONS),
    "generate": (GenerateBody, parameters.GENERATE),
    "generate_sampling": (GenerateSampling, parameters.GENERATE_SAMPLING),
    "tokenize": (TokenizeBody, parameters.TOKENIZE),
}


@pytest.mark.parametrize("api", TABLES)
def test_nothing_that_an_sdk_can_send_is_missing_in_the_table(api):
    sdk, table = TABLES[api]
    names = set(inspect.signature(sdk.create).parameters) - {"self"}
    assert len(names) > 15
    assert not names - set(table)


def test_nothing_that_litellm_sends_to_an_openai_server_is_missing_in_the_table():
    litellm = pytest.importorskip("litellm")
    own = {"api_base", "api_key", "api_version", "base_url", "max_retries", "model_list", "deployment_id"}
    own |= {"organization", "request_timeout", "default_headers", "include_server_side_tool_invocations"}
    assert not set(litellm.constants.OPENAI_CHAT_COMPLETION_PARAMS) - set(parameters.CHAT) - own


@pytest.mark.parametrize("table", [*(each for _, each in TABLES.values()), parameters.GENERATE, parameters.TOKENIZE])
def test_what_is_not_answered_says_why(table):
    assert all(each.why for each in table.values() if each.fate is not Treatment.ANSWERED)


@pytest.mark.parametrize("api", BODIES)
def test_the_engine_has_a_field_for_what_the_table_calls_answered_and_for_nothing_else(api):
    body, table = BODIES[api]
    answered = {name for name, each in table.items() if each.fate is Treatment.ANSWERED}
    fields = set(body.model_fields)
    assert answered <= fields
    assert {name for name in fields - answered if table[name].fate is not Treatment.HARMLESS} <= {"prompt_logprobs"}


@pytest.mark.parametrize(
    ("said", "field"),
    [
        ({"nonsense": 1}, "nonsense"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"best_of": 2}, "best_of"),
    ],
)
def test_what_would_be_ignored_is_refused_by_name(said, field):
    with pytest.raises(InvalidSpecError) as caught:
        check_parameters(said, parameters.CHAT)
    assert [each.field for each in caught.value.violations] == [field]


def test_null_and_neutral_values_say_nothing():
    check_parameters({"nonsense": None, "best_of": 1, "modalities": ["text"], "tools": []}, parameters.CHAT)


@pytest.mark.parametrize(
    "wrong",
    [
        "f",
        [1],
        [{"name": "f"}],
        [{"type": "web_search"}],
        [{"type": "function", "function": {"name": 3}}],
        [{"type": "function", "function": {"name": "f", "description": 3}}],
        [{"type": "function", "function": {"name": "f", "parameters": "x"}}],
        [{"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {"name": "f"}}],
    ],
)
def test_tools_that_are_none_are_refused(wrong):
    with pytest.raises(InvalidSpecError, match=r"tools"):
        check_tools(wrong)
