"""The conversations that every chat template is tried with: rows of SFT, by name."""

from typing import Any

Message = dict[str, Any]


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _said(content: str, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


def _call(number: int, a: int, b: int) -> Message:
    return {
        "type": "function",
        "id": f"call_000{number}",
        "function": {"name": "add", "arguments": {"a": a, "b": b}},
    }


def _result(content: str, number: int = 1) -> Message:
    return {"role": "tool", "content": content, "tool_call_id": f"call_000{number}", "name": "add"}


_NUMBER = {"type": "integer", "description": "a number"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add numbers",
            "parameters": {"type": "object", "properties": {"a": _NUMBER, "b": _NUMBER}, "required": ["a", "b"]},
        },
    }
]

CONVERSATIONS: dict[str, dict[str, Any]] = {
    "one turn": {"messages": [_user("What is two?"), _said("It is 2.")]},
    "system, two turns": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            _user("One?"),
            _said("Yes one."),
            _user("Two?"),
            _said("Yes two."),
        ]
    },
    "a call": {
        "messages": [
            _user("Add 1 and 2."),
            _said("", tool_calls=[_call(1, 1, 2)]),
            _result("3"),
            _said("Sum is 3."),
        ],
        "tools": TOOLS,
    },
    "two calls": {
        "messages": [
            _user("Add both."),
            _said("Both now.", tool_calls=[_call(1, 1, 2), _call(2, 3, 4)]),
            _result("3"),
            _result("7", 2),
            _said("3 and 7."),
        ],
        "tools": TOOLS,
    },
    "reasoning": {"messages": [_user("Why?"), _said("Because.", reasoning_content="hm hm")]},
    "reasoning twice": {
        "messages": [
            _user("Why?"),
            _said("Because.", reasoning_content="hm hm"),
            _user("And?"),
            _said("So.", reasoning_content="oh oh"),
        ]
    },
    "reasoning as text": {
        "messages": [
            _user("Why?"),
            _said("<think>\nhm hm\n</think>\n\nBecause."),
            _user("And?"),
            _said("<think>\noh oh\n</think>\n\nSo."),
        ]
    },
    "reasoning and a call": {
        "messages": [
            _user("Add 1 and 2."),
            _said("", reasoning_content="use add", tool_calls=[_call(1, 1, 2)]),
            _result("3"),
            _said("Sum is 3.", reasoning_content="done"),
        ],
        "tools": TOOLS,
    },
    "an empty answer": {"messages": [_user("Say nothing."), _said("")]},
    "an empty answer before": {"messages": [_user("Say nothing."), _said(""), _user("Now?"), _said("Now.")]},
    "system amid": {
        "messages": [
            _user("One?"),
            _said("Yes one."),
            {"role": "system", "content": "Be kind."},
            _user("Two?"),
            _said("Yes two."),
        ]
    },
    "spaces": {"messages": [_user("One?"), _said("  two words \n"), _user("Two?"), _said("\n\nthree")]},
    "developer": {"messages": [{"role": "developer", "content": "Be brief."}, _user("One?"), _said("Yes.")]},
}
