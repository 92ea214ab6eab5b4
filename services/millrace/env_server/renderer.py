"""Client-side tokenization with the `renderers` package: which renderer, and what it forgets.

`renderers.client.generate` posts token ids to `/inference/v1/generate` and returns a dictionary of the fields that it
knows; the engine's `policy_spans` are not among them. Of the ways to keep them (a patched parser, a custom transport, a
wrapped client) the wrapped client is the narrowest: `generate` is replaced by a function that hands the original a
client whose `post` remembers the body, reads the spans from it and notes them under the request's `X-Session-ID`.
Both generations of `verifiers` look `generate` up by name, so one replacement serves both.

The other known incompatibility, log-prob entries without `"token": "token_id:N"`, is not patched here: Millrace's
engines send that shape.
"""

import json
from pathlib import Path
from typing import Any

import renderers.client
from openai import OpenAIError

from millrace.env_server.samples import parse_spans
from millrace.env_server.span_log import SPANS

SESSION_HEADER = "X-Session-ID"
# Marks a provider error that is really a reply without usable tokens, through layers that keep only its text.
MISSING_TOKENS_MARK = "missing tokens:"
# Without these symbols in the vocabulary the qwen3 renderer cannot work, whatever the model's architecture.
_QWEN3_SYMBOLS = ('"<tool_call>"', '"</think>"', '"<tool_response>"')


class GenerateResponseError(OpenAIError):
    """The engine's reply cannot be used; an OpenAIError so that `verifiers` takes it for a provider error."""


class _RememberingClient:
    """An AsyncOpenAI that keeps the body of its last POST; one per call."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.body = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def post(self, *args: Any, **kwargs: Any) -> Any:
        """Post, and keep the body."""
        reply = await self._client.post(*args, **kwargs)
        self.body = reply.content
        return reply


_stock_generate = renderers.client.generate


async def generate_with_spans(*, client: Any, **kwargs: Any) -> dict[str, Any]:
    """`renderers.client.generate`, with the engine's policy spans noted and its reply errors typed."""
    remembering: Any = _RememberingClient(client)
    try:
        result = await _stock_generate(client=remembering, **kwargs)
    except renderers.client.MalformedGenerateResponseError as error:
        raise GenerateResponseError(f"{MISSING_TOKENS_MARK} {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if not remembering.body:
            raise  # nothing was posted yet: not the reply's fault
        shown = remembering.body[:300].decode("utf-8", "replace")
        raise GenerateResponseError(f"unreadable reply: {type(error).__name__}: {error}: {shown}") from error
    session_id = (kwargs.get("extra_headers") or {}).get(SESSION_HEADER)
    if session_id:
        choice = (json.loads(remembering.body).get("choices") or [{}])[0]
        SPANS.note(session_id, result.get("completion_ids") or (), parse_spans(choice.get("policy_spans")))
    return result


def install_span_capture() -> None:
    """Put `generate_with_spans` in place of the original, everywhere it is looked up. Idempotent."""
    renderers.client.generate = generate_with_spans
    from verifiers.legacy.clients import renderer_client

    renderer_client.generate = generate_with_spans


def renderer_config(name: str, tokenizer_dir: str) -> Any:
    """The typed config of a renderer by name; an empty name chooses by the policy's files.

    `qwen3` needs a Qwen3 model whose vocabulary has Qwen3's symbols (a tiny byte-level model has not); everything else
    gets the default renderer, which applies the tokenizer's chat template and parses no tool calls.
    """
    from pydantic import TypeAdapter
    from renderers import RendererConfig

    chosen = name or choose_renderer(Path(tokenizer_dir))
    return TypeAdapter(RendererConfig).validate_python({"name": chosen})


def choose_renderer(tokenizer_dir: Path) -> str:
    """`qwen3` or `default`, from config.json and tokenizer.json."""
    config, tokenizer = tokenizer_dir / "config.json", tokenizer_dir / "tokenizer.json"
    if not config.is_file() or not tokenizer.is_file():
        return "default"
    model_type = json.loads(config.read_text()).get("model_type")
    text = tokenizer.read_text()
    return "qwen3" if model_type == "qwen3" and all(symbol in text for symbol in _QWEN3_SYMBOLS) else "default"
