"""The conversation of a rollout, as far as the log keeps it."""

import json
from typing import TYPE_CHECKING, Any

from millrace.decoding import decode_json
from millrace.errors import CorruptObjectError

if TYPE_CHECKING:
    from millrace.rollouts.types import Rollout


def messages_of(rollout: "Rollout") -> list[dict[str, Any]]:
    """Return the conversation of a rollout as chat messages.

    A single message of the role "note" says so if it is not kept or cannot be read.
    """
    try:
        messages = decode_json(rollout.messages_json or "[]", what="the conversation", reason="MESSAGES_CORRUPT")
    except CorruptObjectError:
        messages = None
    if isinstance(messages, list) and all(isinstance(message, dict) for message in messages):
        return messages
    return [{"role": "note", "content": "the conversation is not kept in a form that can be shown"}]


def given_of(rollout: "Rollout") -> dict[str, Any]:
    """Return the values that the rollout's task is scored with, by name.

    Empty if none are kept, or they cannot be read.
    """
    try:
        given = decode_json(rollout.task_json or "{}", what="what a task is scored with", reason="TASK_CORRUPT")
    except CorruptObjectError:
        return {}
    return given if isinstance(given, dict) else {}


def answer_of(rollout: "Rollout") -> str:
    """Return the answer that the rollout's task is scored with, as text; "" if there is none."""
    answer = given_of(rollout).get("answer", "")
    return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)


def info_of(rollout: "Rollout") -> str:
    """Return the values that the rollout's task is scored with, but for its answer, as JSON; "" if there are none."""
    given = {name: value for name, value in given_of(rollout).items() if name != "answer"}
    return json.dumps(given, ensure_ascii=False) if given else ""


def content_of(message: dict[str, Any]) -> str:
    """Return the text of a chat message: its content, each part on a line of its own, then its tool calls."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    lines = [_part(part) for part in parts if part is not None]
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        named = call.get("function", call) if isinstance(call, dict) else call
        function = named if isinstance(named, dict) else {}
        lines.append(f"→ {function.get('name', '?')}({function.get('arguments', '')})")
    return "\n".join(lines)


def _part(part: Any) -> str:
    """Return the text of a part of a message's content; of a part that is no text, its type in brackets."""
    if isinstance(part, dict):
        text = part.get("text")
        return text if isinstance(text, str) else f"[{part.get('type', 'part')}]"
    return str(part)
