"""Which policy made which token of an answer: vLLM's spans, added to the bodies and streams of its own handlers.

A streamed choice has its spans in its last chunk, the one with the finish reason; token ids and log-probs come with the
chunks, as vLLM sends them, and joined are those of the answer in one piece: the spans' indexes count over them.
"""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from millrace.errors import UnavailableError
from millrace.inference.vllm.gate import Calls

_DATA = "data: "


def add_spans(body: dict[str, Any], calls: Calls) -> None:
    """Add `policy_spans` to every choice of a whole answer, `body`, in place.

    The choices are those of the engine's `calls`, in order. Raises UnavailableError if they do not correspond.
    """
    outputs = [found[index] for found in calls.outputs for index in sorted(found)]
    if len(outputs) != len(body["choices"]):
        raise UnavailableError("a choice has no end", reason="GENERATION_ABORTED", remedy="retry")
    for choice, output in zip(body["choices"], outputs, strict=True):
        choice["policy_spans"] = spans_of(output)
        if choice.get("token_ids") is not None and len(choice["token_ids"]) != len(output.token_ids):
            raise UnavailableError("a choice is not that of its spans", reason="GENERATION_ABORTED", remedy="retry")


def add_last_spans(chunk: dict[str, Any], calls: Calls, *, per_call: int) -> None:
    """Add `policy_spans` to every choice that ends in this chunk of a stream, in place.

    The choices are those of the engine's `calls`, `per_call` of each.
    """
    for choice in chunk.get("choices") or []:
        if choice.get("finish_reason") is not None:
            number, index = divmod(choice["index"], per_call)
            choice["policy_spans"] = spans_of(calls.outputs[number][index])


def name_tokens(body: dict[str, Any]) -> None:
    """Set the names of tokens in the log-probs of `/inference/v1/generate` to `token_id:N`, in place.

    Entries without a `token_id`, in answers that are asked for as text, keep the tokens' texts.
    """
    for choice in body.get("choices") or []:
        for entry in (choice.get("logprobs") or {}).get("content") or []:
            if "token_id" in entry:
                entry["token"] = f"token_id:{entry['token_id']}"


async def rewritten(events: AsyncGenerator[str, None], change: Callable[[dict[str, Any]], None]) -> AsyncIterator[str]:
    """Yield vLLM's server-sent events, the JSON object of each changed in place by `change`.

    Other events, such as [DONE], pass unchanged.
    """
    async with aclosing(events):
        async for event in events:
            text = event.strip().removeprefix(_DATA)
            if not event.startswith(_DATA) or not text.startswith("{"):
                yield event
                continue
            chunk = json.loads(text)
            change(chunk)
            yield f"{_DATA}{json.dumps(chunk, separators=(',', ':'), ensure_ascii=False)}\n\n"


def spans_of(output: Any) -> list[dict[str, int]]:
    """Return which policy generated which tokens of a finished choice, [start, end) in order; [] if vLLM reports
    none.
    """
    return [_span(span) for span in output.weight_versions or ()]


def _span(span: Any) -> dict[str, int]:
    """Return one of vLLM's spans, whose version is `LINEAGE-VERSION`, as a JSON object."""
    lineage, _, version = str(span.version).partition("-")
    return {"lineage": int(lineage), "version": int(version), "start": span.start, "end": span.end}
