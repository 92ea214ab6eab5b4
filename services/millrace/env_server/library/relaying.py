"""What endpoints that are not ours answer, before the library's relaying client looks at it.

Some give the arguments of a tool call as an object (or leave them null), where OpenAI's APIs have a text of JSON. The
library takes such an answer for a broken one, and its rollout ends. They are made texts here, for whole answers and for
events of a stream alike, so that harness and trace get what the API promises.
"""

import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

from verifiers.v1.clients.eval import EvalClient
from verifiers.v1.dialects import DIALECTS

from millrace.decoding import decode_object
from millrace.env_server.library.tool_calls import arguments_text
from millrace.errors import CorruptObjectError

_DATA = re.compile(rb"(?m)^data:[ \t]*(\{.*\})[ \t]*\r?$")
"""The line of an event that has an object."""


def install() -> None:
    """Have every answer's tool arguments be texts. Idempotent."""
    if getattr(EvalClient.relay, "_is_millraces", False):
        return
    for kind in {type(dialect) for dialect in DIALECTS}:
        _take_objects(kind)
    stock = EvalClient.relay

    async def relay(self: EvalClient, *args: Any, **kwargs: Any) -> Any:
        reply = await stock(self, *args, **kwargs)
        reply.chunks = _events(reply.chunks)
        return reply

    relay._is_millraces = True  # type: ignore[attr-defined]
    EvalClient.relay = relay


def _take_objects(kind: Any) -> None:
    stock = kind.validate_response

    def validate_response(self: Any, raw: Any) -> Any:
        make_texts(raw)
        return stock(self, raw)

    kind.validate_response = validate_response


async def _events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async for chunk in chunks:
        yield _DATA.sub(_data, chunk) if b'"arguments"' in chunk else chunk


def _data(line: re.Match[bytes]) -> bytes:
    try:
        value = decode_object(line[1], what="an event of an endpoint's stream", reason="ENGINE_ANSWER_INVALID")
    except CorruptObjectError:
        return line[0]  # the library says what is wrong with it
    return b"data: " + json.dumps(value).encode() if make_texts(value) else line[0]


def make_texts(answer: Any) -> bool:
    """Make the tool arguments of an answer, or of an event of a stream, texts in place; return whether any were not."""
    found = [call for call in _calls(answer) if not isinstance(call.get("arguments", ""), str)]
    for call in found:
        call["arguments"] = arguments_text(call["arguments"])
    return bool(found)


def _calls(answer: Any) -> Iterator[dict[str, Any]]:
    """Yield what is called, in an answer or event of OpenAI's chats or of its responses."""
    for choice in _tables(answer, "choices"):
        for name in ("message", "delta"):
            for call in _tables(choice.get(name), "tool_calls"):
                if isinstance(call.get("function"), dict):
                    yield call["function"]
    items = [*_tables(answer, "output"), *_tables(_field(answer, "response"), "output"), _field(answer, "item")]
    for item in items:
        if _field(item, "type") == "function_call":
            yield item


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def _tables(value: Any, name: str) -> Iterator[dict[str, Any]]:
    listed = _field(value, name)
    return (each for each in (listed if isinstance(listed, list) else ()) if isinstance(each, dict))
