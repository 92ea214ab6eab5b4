"""The rollouts of a run as people look at them: read from the archives in its object store, without a server."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from millrace.decoding import decode_json
from millrace.errors import CorruptObjectError

if TYPE_CHECKING:
    from millrace.rollouts.types import Rollout
    from millrace.storage import ObjectStore

_STEP = re.compile(r"rollouts/(\d+)/")
SORTS: dict[str, Callable[["SampleRecord"], Any]] = {
    "step": lambda found: (found.step, found.rollout.ordinal, found.rollout.member),
    "reward": lambda found: found.rollout.reward,
    "tokens": lambda found: found.rollout.num_tokens,
    "turns": lambda found: found.rollout.num_turns,
    "seconds": lambda found: found.rollout.seconds,
}
"""What samples can be sorted by."""


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """A rollout and the step whose batch resolved it."""

    step: int
    rollout: "Rollout"

    def to_json(self) -> dict[str, Any]:
        """The record as plain data."""
        rollout = self.rollout
        error = rollout.error
        return {
            "step": self.step,
            "env": rollout.env,
            "purpose": rollout.purpose.name.lower(),
            "task": rollout.ordinal,
            "task_id": rollout.task_id,
            "member": rollout.member,
            "attempt": rollout.attempt,
            "status": str(rollout.status),
            "error": None if error is None else {"type": error.type, "message": error.message, "frames": error.frames},
            "reward": rollout.reward,
            "metrics": dict(rollout.metrics),
            "stop": rollout.stop_condition,
            "truncated": rollout.is_truncated,
            "turns": rollout.num_turns,
            "tokens": rollout.num_tokens,
            "sampled_tokens": rollout.num_loss_tokens,
            "versions": [rollout.min_version, rollout.max_version],
            "seconds": rollout.seconds,
            "messages": messages_of(rollout),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFilter:
    """Which samples are shown; what is None or empty lets everything pass."""

    env: str = ""
    step: int | None = None
    task: int | None = None
    status: str = ""
    min_reward: float | None = None
    max_reward: float | None = None
    text: str = ""
    """Part of some message, in any case."""

    def passes(self, rollout: "Rollout") -> bool:
        """Whether the rollout is one of those that are asked for; the step is the archive's."""
        return (
            (not self.env or rollout.env == self.env)
            and (self.task is None or rollout.ordinal == self.task)
            and (not self.status or str(rollout.status).lower() == self.status.lower())
            and (self.min_reward is None or rollout.reward >= self.min_reward)
            and (self.max_reward is None or rollout.reward <= self.max_reward)
            and (not self.text or self.text.lower() in _text_of(rollout).lower())
        )


def read_samples(store: "ObjectStore", prefix: str, uid: str, wanted: SampleFilter) -> Iterator[SampleRecord]:
    """The rollouts that pass, archive by archive in order of steps; duplicates are left out.

    `CorruptObjectError` names an archive that is damaged. One archive is in memory at a time.
    """
    from millrace.rollouts.wire import decode_archive
    from millrace.runlog.names import Names

    root = Names(prefix, uid).root
    for info in store.list(f"{root}rollouts/"):
        found = _STEP.search(info.key.removeprefix(root))
        if found is None or (wanted.step is not None and int(found[1]) != wanted.step):
            continue
        for rollout in decode_archive(store.get(info.key)):
            if not rollout.is_duplicate and wanted.passes(rollout):
                yield SampleRecord(int(found[1]), rollout)


def sort_samples(samples: Sequence[SampleRecord], order: str) -> list[SampleRecord]:
    """In the order of a name in `SORTS`, or the other way round with a `-` before it."""
    return sorted(samples, key=SORTS[order.removeprefix("-")], reverse=order.startswith("-"))


def messages_of(rollout: "Rollout") -> list[dict[str, Any]]:
    """The conversation; one message that says so where it is not kept or cannot be read."""
    try:
        messages = decode_json(rollout.messages_json or "[]", what="the conversation", reason="MESSAGES_CORRUPT")
    except CorruptObjectError:
        messages = None
    if isinstance(messages, list) and all(isinstance(message, dict) for message in messages):
        return messages
    return [{"role": "note", "content": "the conversation is not kept in a form that can be shown"}]


def content_of(message: dict[str, Any]) -> str:
    """The text of a message: its content, parts of it one a line, then its tool calls."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    lines = [_part(part) for part in parts if part is not None]
    for call in message.get("tool_calls") or []:
        function = call.get("function", call) if isinstance(call, dict) else {}
        lines.append(f"→ {function.get('name', '?')}({function.get('arguments', '')})")
    return "\n".join(lines)


def _part(part: Any) -> str:
    if isinstance(part, dict):
        text = part.get("text")
        return text if isinstance(text, str) else f"[{part.get('type', 'part')}]"
    return str(part)


def _text_of(rollout: "Rollout") -> str:
    return "\n".join(content_of(message) for message in messages_of(rollout))
