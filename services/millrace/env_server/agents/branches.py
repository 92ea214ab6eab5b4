"""Which model calls of an agent are trained on: agents ask aside, start over, and shorten their own conversations.

| `branches` | trained |
|---|---|
| `used` | what went into the last call: its conversation, and calls whose reply it quotes (a summary, a helper) |
| `last` | the conversation that ended with the last call |
| `longest` | the conversation in which most was sampled |
| `all` | every call |

A conversation goes on where a request begins with an earlier one and its reply, compared as messages: what the policy
thought, ids of calls and the spelling of their arguments do not matter. A call of a tool is quoted, too, by its id,
if no other call has that.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.decoding import decode_json
from millrace.errors import CorruptObjectError

MODES = ("used", "last", "longest", "all")
DEFAULT = "used"
LEFT_OUT_METRIC = "agent_calls_left_out"
"""Metric of rollouts: model calls that are not trained on because their branch is not."""
_MIN_QUOTE_CHARS, _MIN_ID_CHARS = 20, 8
"""A shorter reply may be in a message by chance; it has to be the whole message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCall:
    """A model call that was answered; calls are in the order in which they ended."""

    prompt: Sequence[Mapping[str, Any]]
    reply: Mapping[str, Any]
    num_tokens: int


def trained_calls(calls: Sequence[AgentCall], mode: str) -> set[int]:
    """Return the indices of an agent's model calls that are trained on, by `mode`: "used", "last", "longest" or "all".

    `calls` are those of one rollout, in the order in which they ended. "last" is the conversation of the last call,
    "longest" the one in which most was sampled, and "used" the last and all whose reply is quoted in it.
    """
    if mode == "all" or not calls:
        return set(range(len(calls)))
    parents = _parents(calls)
    if mode == "longest":
        lengths = [0] * len(calls)
        for index, call in enumerate(calls):
            parent = parents[index]
            lengths[index] = call.num_tokens + (0 if parent is None else lengths[parent])
        # Of equal ones the later: an agent that starts over goes on with that.
        last = max(range(len(calls)), key=lambda index: (lengths[index], index))
        return _conversation(last, parents)
    found = _conversation(len(calls) - 1, parents)
    if mode == "last":
        return found
    counts = Counter(name for call in calls for name in _ids(call.reply))
    own_ids = [[name for name in _ids(call.reply) if counts[name] == 1] for call in calls]
    # To a fixed point: a quoted call may itself quote others.
    fresh = set(found)
    while fresh:
        quoting = [message for index in fresh for message in calls[index].prompt]
        others = [index for index in range(len(calls)) if index not in found]
        fresh = set()
        for index in others:
            is_quoted = _is_quoted(_text(calls[index].reply), quoting) or _is_named(own_ids[index], quoting)
            if index not in found and is_quoted:
                fresh |= _conversation(index, parents) - found
                found |= fresh
    return found


def _parents(calls: Sequence[AgentCall]) -> list[int | None]:
    """Return for each call the index of the latest earlier call whose prompt and reply its own prompt begins with.

    None for a call that continues no other.
    """
    ends: dict[int, int] = {}
    parents: list[int | None] = []
    for index, call in enumerate(calls):
        parent, chain = None, 0
        for message in call.prompt:
            # A hash of the messages so far, so that a conversation is compared with all earlier ones in one pass.
            chain = hash((chain, _key(message)))
            parent = ends.get(chain, parent)
        parents.append(parent)
        ends[hash((chain, _key(call.reply)))] = index
    return parents


def _conversation(last: int, parents: Sequence[int | None]) -> set[int]:
    """Return the indices of the call `last` and of all calls that it continues; `parents` is what `_parents`
    returned.
    """
    found: set[int] = set()
    at: int | None = last
    while at is not None:
        found.add(at)
        at = parents[at]
    return found


def _is_quoted(text: str, messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a message has a reply's text in it.

    A short text, which may be there by chance, has to be a whole message, and one that the policy did not write.
    """
    if len(text) >= _MIN_QUOTE_CHARS:
        return any(text in _text(message) for message in messages)
    # The policy itself may have written the same short text.
    return bool(text) and any(text == _text(message) and message.get("role") != "assistant" for message in messages)


def _is_named(ids: Sequence[str], messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a message answers one of the tool calls with these ids, or has one of the ids in its text.

    Short ids in a text do not count.
    """
    return any(
        call_id == message.get("tool_call_id") or (len(call_id) >= _MIN_ID_CHARS and call_id in _text(message))
        for call_id in ids
        for message in messages
    )


def _ids(reply: Mapping[str, Any]) -> list[str]:
    """Return the ids of a reply's tool calls."""
    return [str(call["id"]) for call in reply.get("tool_calls") or () if call.get("id")]


def _key(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what two messages must have in common to be equal: role, text and tool calls, without ids and
    reasoning.
    """
    calls = [_called(call) for call in message.get("tool_calls") or ()]
    return (message.get("role"), _text(message), tuple(calls))


def _called(call: Mapping[str, Any]) -> tuple[str, str]:
    """Return (name, arguments) of a tool call, the arguments as JSON with sorted keys if they can be parsed."""
    function = call.get("function") or call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = decode_json(arguments or "{}", what="arguments", reason="REQUEST_INVALID")
        except CorruptObjectError:
            return str(function.get("name")), str(arguments)
    return str(function.get("name")), json.dumps(arguments, sort_keys=True, default=str)


def _text(message: Mapping[str, Any]) -> str:
    """Return a message's text, the parts of its content joined by line ends, without white space around it."""
    content = message.get("content")
    if isinstance(content, list | tuple):
        parts = (part.get("text") if isinstance(part, Mapping) else part for part in content)
        content = "\n".join(str(part) for part in parts if part is not None)
    return str(content or "").strip()
