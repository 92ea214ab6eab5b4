"""Refusal of content that is not text in requests to our engines: of messages a trainer sees the tokens alone.

Without this check an image fails wherever the chat template or the engine meets it first, in words that name neither.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from millrace.errors import InvalidSpecError, Violation


def other_part(messages: Iterable[Any]) -> str:
    """Return the type of the first content part that is not text, as `image_url`; "" if all are text.

    Messages are mappings or models.
    """
    for message in messages:
        content = _field(message, "content")
        for part in content if isinstance(content, list | tuple) else ():
            kind = "text" if isinstance(part, str) else str(_field(part, "type") or "of no type")
            if kind != "text":
                return kind
    return ""


def refusal(kind: str) -> str:
    """Return the error message for a content part of type `kind`."""
    return (
        f"a message of the environment has a content part {kind!r}, and Millrace plays and trains on text alone; "
        "leave such parts out of its prompts and replies, or evaluate it at an endpoint that takes them "
        "(millrace eval --client.base-url)"
    )


def refuse_other_parts(prompts: Iterable[Any], *, tasks: str) -> None:
    """Raise InvalidSpecError if a task of the environment has content parts that our engines do not accept.

    `prompts` are lists of messages, or texts; `tasks` names their set in the message. Parts that come up only in the
    course of a rollout fail that rollout.
    """
    for index, prompt in enumerate(prompts):
        if kind := other_part(prompt if isinstance(prompt, list | tuple) else ()):
            message = f"its {tasks} task {index}: {refusal(kind)}"
            raise InvalidSpecError([Violation(field="orchestrator.env.id", message=message)])


def with_plain_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its text parts joined by line ends, because many chat templates take one string only.

    A message with other parts, or with a string, is returned unchanged.
    """
    content = message.get("content")
    if not isinstance(content, list) or other_part([message]):
        return message
    return {**message, "content": "\n".join(part if isinstance(part, str) else part["text"] for part in content)}


def _field(thing: Any, name: str) -> Any:
    return thing.get(name) if isinstance(thing, Mapping) else getattr(thing, name, None)


def not_text_error(base: type[Exception]) -> type[Exception]:
    """Make a class `NotTextError` derived from `base`, which `verifiers` treats as the environment's own mistake."""
    return type("NotTextError", (base,), {"__doc__": "The environment sends what is not text to an engine of ours."})
