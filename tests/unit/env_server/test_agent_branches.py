"""Which calls of an agent are trained on, and which line of its output says why it failed."""

import json

import pytest

from millrace.config.sections.environments import AgentConfig, EnvConfig
from millrace.env_server.agents.branches import AgentCall, trained_calls
from millrace.env_server.agents.programs import cause_first, cause_of
from millrace.env_server.agents.sessions import AgentLimits, AgentRules
from millrace.errors import InvalidSpecError


def user(text):
    return {"role": "user", "content": text}


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


def call(name, arguments):
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}


def made(*prompt, reply, tokens=1):
    return AgentCall(prompt=prompt, reply=reply if isinstance(reply, dict) else said(reply), num_tokens=tokens)


SUMMARY = "so far the agent has found the door"
COMPACTED = [
    made(user("go"), reply="step one"),
    made(user("go"), said("step one"), user("sum up"), reply=SUMMARY, tokens=2),
    made(user(f"go; {SUMMARY}"), reply="step two"),
]
THROWN_AWAY = [
    made(user("go"), reply="a first try at it", tokens=9),
    made(user("go"), said("a first try at it"), user("on"), reply="on it", tokens=9),
    made(user("go"), reply="a second one"),
]
ASIDE = [
    made(user("go"), reply="one"),
    made(user("name this chat"), reply="a chat about going places"),
    made(user("go"), said("one"), user("on"), reply="two"),
]


@pytest.mark.parametrize(
    ("calls", "mode", "kept"),
    [
        (COMPACTED, "used", {0, 1, 2}),
        (COMPACTED, "last", {2}),
        (COMPACTED, "longest", {0, 1}),
        (COMPACTED, "all", {0, 1, 2}),
        (THROWN_AWAY, "used", {2}),
        (THROWN_AWAY, "last", {2}),
        (THROWN_AWAY, "longest", {0, 1}),
        (ASIDE, "used", {0, 2}),
        (ASIDE, "last", {0, 2}),
        (ASIDE, "all", {0, 1, 2}),
        ([], "used", set()),
    ],
)
def test_what_is_trained(calls, mode, kept):
    assert trained_calls(calls, mode) == kept


def test_a_conversation_goes_on_however_the_agent_writes_it_down():
    first = made(user("go"), reply=said(None, tool_calls=[call("look", '{"a": 1, "b": 2}')], reasoning_content="hm"))
    again = said("", tool_calls=[{**call("look", '{"b":2,"a":1}'), "id": "other"}])
    second = made(user([{"type": "text", "text": "go"}]), again, reply="done")
    assert trained_calls([first, second], "last") == {0, 1}


def test_a_short_reply_is_quoted_only_as_a_whole_message_of_others():
    calls = [
        made(user("x?"), reply="ok"),
        made(user("go"), reply="ok"),
        made(user("go"), said("ok"), user("on"), reply="z"),
    ]
    assert trained_calls(calls, "used") == {1, 2}
    helped = [made(user("x?"), reply="42"), made(user("go"), {"role": "tool", "content": "42"}, reply="z")]
    assert trained_calls(helped, "used") == {0, 1}


def test_a_call_that_the_agent_writes_down_in_its_own_way_is_known_by_its_id():
    asked = made(user("go"), reply=said(None, tool_calls=[{**call("look", "{}"), "id": "call_0123456789ab"}]))
    told = said("Calling tools: [{'id': 'call_0123456789ab', 'function': 'look'}]")
    answer = made(user("go"), told, user("Observation: a thing"), reply="done")
    assert trained_calls([asked, answer], "used") == {0, 1}
    assert trained_calls([asked, asked, answer], "used") == {2}, "an id that two calls have says nothing"


def test_modes_are_checked():
    assert AgentRules.decode("") == AgentRules(branches="used")
    for value in ("first", 1, ["last"]):
        with pytest.raises(InvalidSpecError, match=r"agent\.branches"):
            AgentRules.decode(json.dumps({"branches": value}))


def test_limits_of_the_run_count_in_the_place_of_the_environments():
    rules = AgentRules.decode(EnvConfig(id="a", agent=AgentConfig(max_requests=3, timeout_s=9.5)).agent.to_wire())
    assert rules.over(AgentLimits(max_requests=8, max_tokens=7)) == AgentLimits(
        max_requests=3, max_tokens=7, deadline_s=9.5
    )
    assert EnvConfig(id="a", agent=AgentConfig(branches="used")).agent.to_wire() == ""
    for limits in ({"max_requests": -1}, {"most": 1}, [], {"deadline_s": "x"}):
        with pytest.raises(InvalidSpecError, match="limits"):
            AgentRules.decode(json.dumps({"limits": limits}))


TRACEBACK = """Traceback (most recent call last):
  File "/app/agent.py", line 3, in <module>
    main()
    ^^^^^^
  File "/app/agent.py", line 2, in main
    raise ValueError("no key")
ValueError: no key
"""


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (TRACEBACK, "ValueError: no key"),
        (TRACEBACK + "  more of the message\nfor its author\n", "ValueError: no key"),
        (
            TRACEBACK
            + "\nDuring handling of the above exception, another exception occurred:\n\n"
            + TRACEBACK.replace("no key", "x"),
            "ValueError: x",
        ),
        ("Error: cannot find module 'x'\n    at main.js:3\n", "at main.js:3"),
        ("usage: agent [-h]\nagent: error: no task\n\n--------\n", "agent: error: no task"),
        ("", ""),
    ],
)
def test_the_cause_of_what_a_program_wrote(text, cause):
    assert cause_of(text) == cause


def test_the_librarys_message_has_the_cause_first():
    first = cause_first(f"harness 'mine' exited 1: {TRACEBACK}")
    assert first.startswith("harness 'mine' exited 1: ValueError: no key\nTraceback")
    cut = cause_first(f"harness 'mine' model connection to interception failed: {TRACEBACK}")
    assert cut.startswith("harness 'mine' model connection to interception failed: ValueError: no key\nTraceback")
    quoted = cause_first(f"harness 'mine': RuntimeError: the program said:\n{TRACEBACK}")
    assert quoted.startswith("harness 'mine': RuntimeError: the program said: ValueError: no key\nTraceback")
    assert cause_first(TRACEBACK).startswith("ValueError: no key\nTraceback")
    assert cause_first("harness 'mine' exited 1: no task") == "harness 'mine' exited 1: no task"
    assert cause_first("setup failed:\nfor a reason") == "setup failed:\nfor a reason"
