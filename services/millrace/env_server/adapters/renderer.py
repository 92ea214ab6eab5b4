"""Client-side tokenization with the `renderers` package: the choice of a renderer, and the spans that it leaves out.

`renderers.client.generate` posts token ids to `/inference/v1/generate` and returns a dictionary of the fields that it
knows; the engine's `policy_spans` are not among them, and of `routed_experts` it reads another form than vLLM's. So
`generate` is replaced by a function that hands the original a client of our own in place of OpenAI's, whose body it
reads both from and notes them under the request's `X-Session-ID`. That client asks with aiohttp: OpenAI's on httpx,
whose pool looks at every connection for each request, took half of a short rollout's CPU. Both generations of
`verifiers` look `generate` up by name, so one replacement serves both.

The other known incompatibility, log-prob entries without `"token": "token_id:N"`, is not patched here: Millrace's
engines send that shape.
"""

import asyncio
import contextlib
import importlib
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import aiohttp
import httpx
import orjson
import renderers.client
from openai import APIStatusError, BadRequestError, OpenAIError

from millrace.decoding import decode_json
from millrace.env_server.adapters import judges
from millrace.env_server.adapters.samples import SPANS, engine_spans
from millrace.env_server.engine_access import (
    ENGINE_LOST_MARK,
    LOST_STATUSES,
    MAX_ATTEMPTS,
    REFUSED_STATUSES,
    RETRIED_STATUSES,
    engine_access,
    retry_pause_s,
)
from millrace.env_server.library import releases
from millrace.env_server.own_sampling import completed, sent_of
from millrace.errors import CorruptObjectError
from millrace.rollouts.routed_experts import FIELD, START_FIELD, RoutedCall, from_answer

SESSION_HEADER = "X-Session-ID"
# Marks a provider error that is really a reply without usable tokens, through layers that keep only its text.
MISSING_TOKENS_MARK = "missing tokens:"
# Marks a provider error that is really a reply which cannot be read: a fault of the engine that a retry does not fix.
UNREADABLE_MARK = "unreadable reply:"
DEFAULT = "default"
_NOT_JSON = "ENGINE_ANSWER_INVALID"
# With experts an answer has hundreds of bytes for each token: more than a rollout may have is of no use.
MAX_ANSWER_BYTES = 512 << 20
# Renderers to try by the model's type, the likeliest first.
_FAMILIES = {"qwen3": ("qwen3", "prime-qwen3")}
_PROBES: tuple[list[Any], ...] = (
    [{"role": "user", "content": "one"}],
    [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ],
)
# Without these symbols in the vocabulary the qwen3 renderers cannot work, whatever the model's architecture.
_QWEN3_SYMBOLS = ('"<tool_call>"', '"</think>"', '"<tool_response>"')


class GenerateResponseError(OpenAIError):
    """The engine's reply cannot be used; an OpenAIError so that `verifiers` takes it for a provider error."""


class EngineLostReplyError(OpenAIError):
    """The engine went away; an OpenAIError so that `verifiers` takes it for a provider error."""

    def __init__(self, message: str) -> None:
        """Make the error, whose text begins with ENGINE_LOST_MARK."""
        super().__init__(f"{ENGINE_LOST_MARK} {message}")


class GenerateClient:
    """Implements what `renderers.client.generate` calls of an AsyncOpenAI: `base_url`, `get` and `post`.

    One per call.
    """

    def __init__(self, base_url: str, *, session_id: str = "") -> None:
        """Make a client for one call of `generate` at the engine's base URL, in the rollout `session_id`."""
        self.base_url = base_url
        self._session_id = session_id
        self.content = b""
        """Body of the last answer to a `post`."""
        self.sent: Mapping[str, Any] | None = None
        """The last `post`'s request without its prompt."""
        self._routed: dict[str, Any] = {}
        self._num_prompt = 0
        self._prompt_start: object = None

    async def get(self, path: str, **_: object) -> Any:
        """Return the JSON value that the engine answers at `path` below the base URL.

        Raises OpenAIError for a status other than 2xx, CorruptObjectError for what is not JSON, and aiohttp's errors.
        """
        url = self.base_url.rstrip("/") + path
        status, raw = await self._ask("GET", url)
        if not _is_good(status):
            raise _status_error("GET", url, status, raw)
        return decode_json(raw, what=f"the answer of {url}", reason=_NOT_JSON)

    async def post(
        self, url: str, *, body: Mapping[str, Any], options: Mapping[str, Any] | None = None, **_: object
    ) -> Self:
        """Post a body to the engine at `url`, a whole URL, and return this client.

        The answer's body is then in `content`, and the request's parameters are in `sent`. Sampling parameters that are
        missing in the body are set, and experts are asked for from the first token on that earlier calls of the rollout
        did not record. Tries again, a bounded number of times, if the engine refuses the request before it begins to
        generate. Raises OpenAIError; of `options` only `headers` are used.
        """
        prompt_ids, sampling = body.get("token_ids") or (), completed(body.get("sampling_params") or {})
        if num_known := SPANS.num_routed(self._session_id, prompt_ids):
            sampling = {START_FIELD: num_known, **sampling}
        body = {**body, "sampling_params": sampling}
        self.sent = sent_of(body)
        self._num_prompt, self._prompt_start = len(prompt_ids), sampling.get(START_FIELD)
        raw, headers = orjson.dumps(body), (options or {}).get("headers") or {}
        # unregistered wait: in an environment worker, all of whose rollouts are one wait of the env-server
        for attempt in range(1, MAX_ATTEMPTS + 1):
            is_last = attempt == MAX_ATTEMPTS
            try:
                status, self.content = await self._ask("POST", url, raw, headers)
            except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                # Refused is worth a try; what broke off in the middle may have cost the engine minutes.
                if is_last or not isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
                    why = f"{self.base_url}: {type(error).__name__}: {error}"
                    raise EngineLostReplyError(why) from error
            else:
                if _is_good(status):
                    self._take_experts()
                    return self
                problem = _status_error("POST", url, status, self.content)
                if (is_last and status in LOST_STATUSES) or _is_lost_at_once(status):
                    raise EngineLostReplyError(str(problem)) from problem
                if status not in RETRIED_STATUSES:
                    raise problem
            await asyncio.sleep(retry_pause_s(attempt))
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _take_experts(self) -> None:
        """Take the experts out of the answer in `content`, as `renderers` expects another form; other fields stay.

        Raises GenerateResponseError for an answer of more than MAX_ANSWER_BYTES.
        """
        if f'"{FIELD}"'.encode() not in self.content:
            return
        if len(self.content) > MAX_ANSWER_BYTES:
            raise GenerateResponseError(
                f"{UNREADABLE_MARK} the answer has {len(self.content)} bytes, most of them experts of tokens, and at "
                f"most {MAX_ANSWER_BYTES} are read; lower `orchestrator.seq_len`, or leave "
                "`inference.return_routed_experts` out"
            )
        try:
            answer = decode_json(self.content, what="the engine's answer", reason=_NOT_JSON, max_bytes=MAX_ANSWER_BYTES)
        except CorruptObjectError:
            return  # the original reads it next, and says what is wrong with it
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if isinstance(choices, list) and choices and isinstance(choices[0], dict):
            self._routed = {FIELD: choices[0].pop(FIELD, None)}
            self.content = orjson.dumps(answer)

    def routed(self, num_sampled: int) -> RoutedCall | None:
        """Return the experts of the last answer's prompt and `num_sampled` tokens; None if the engine records none.

        Raises CorruptObjectError for what are not the experts of these tokens.
        """
        return from_answer(self._routed, num_tokens=self._num_prompt + num_sampled, start=self._prompt_start)

    async def _ask(
        self, method: str, url: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Make one HTTP request with the engine's access token and return (status, body); an empty body is not sent."""
        access = engine_access()
        sent = {"content-type": "application/json", **(headers or {}), **access.headers(url)}
        trust = access.context()
        # A redirect would carry the token and the prompt to a server that the config does not name.
        async with access.session().request(
            method, url, data=body or None, headers=sent, allow_redirects=False, ssl=True if trust is None else trust
        ) as reply:
            return reply.status, await reply.read()


def _is_good(status: int) -> bool:
    return 200 <= status < 300


def _is_lost_at_once(status: int) -> bool:
    """Return whether an answer of that HTTP status means that the engine is gone or refuses us, without another try."""
    return status in (LOST_STATUSES - RETRIED_STATUSES) | REFUSED_STATUSES


def _status_error(method: str, url: str, status: int, raw: bytes) -> APIStatusError:
    """Return the error that OpenAI's client raises for an answer of this status with the body `raw`.

    `verifiers` reads its class, status and text.
    """
    response: Any = httpx.Response(status, content=raw, request=httpx.Request(method, url))
    text: object = response.text
    with contextlib.suppress(CorruptObjectError):
        parsed = decode_json(raw, what=f"the answer of {url}", reason=_NOT_JSON)
        text = parsed.get("error", parsed) if isinstance(parsed, dict) else parsed
    message = text.get("message") if isinstance(text, dict) else None
    message = f"Error code: {status}" + (f" - {message}" if isinstance(message, str) and message else "")
    kind = BadRequestError if status == 400 else APIStatusError
    return kind(message, response=response, body=text)


_stock_generate = renderers.client.generate


async def generate_with_spans(*, client: Any, **kwargs: Any) -> dict[str, Any]:
    """Do what `renderers.client.generate` does, but post with our own `GenerateClient`; of `client` only the base URL
    is used.

    Notes the engine's policy spans in SPANS under the request's session id; for a request that the engine refuses, an
    entry without tokens. Raises GenerateResponseError for a reply without usable tokens or one that cannot be read.
    """
    session_id = (kwargs.get("extra_headers") or {}).get(SESSION_HEADER)
    lean: Any = GenerateClient(str(client.base_url), session_id=session_id or "")
    try:
        result = await _stock_generate(client=lean, **kwargs)
    except APIStatusError:
        if session_id and not judges.is_scoring():
            SPANS.note(session_id, (), (), lean.sent)
        raise
    except renderers.client.MalformedGenerateResponseError as error:
        raise GenerateResponseError(f"{MISSING_TOKENS_MARK} {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if not lean.content:
            raise  # nothing was answered yet: not the reply's fault
        shown = lean.content[:300].decode("utf-8", "replace")
        raise GenerateResponseError(f"{UNREADABLE_MARK} {type(error).__name__}: {error}: {shown}") from error
    if session_id:
        choice, ids = (orjson.loads(lean.content).get("choices") or [{}])[0], result.get("completion_ids") or ()
        try:
            routed = lean.routed(len(ids))
        except CorruptObjectError as error:
            raise GenerateResponseError(f"{UNREADABLE_MARK} {error}") from error
        prompt_ids = result.get("prompt_ids") or ()
        SPANS.note(session_id, ids, engine_spans(choice), lean.sent, routed, prompt_ids=prompt_ids)
    return result


def install_span_capture() -> None:
    """Put `generate_with_spans` in place of the original, everywhere it is looked up. Idempotent."""
    renderers.client.generate = generate_with_spans
    if releases.problem_of("v0", releases.installed()):
        return  # it has v1 alone
    from millrace.env_server.library.v0 import RENDERER_CLIENT

    # The module looks `generate` up in its own names.
    importlib.import_module(RENDERER_CLIENT).generate = generate_with_spans  # type: ignore[attr-defined]


@lru_cache(maxsize=64)  # every rollout asks, and building the type's schema costs milliseconds
def renderer_config(name: str, tokenizer_dir: str) -> Any:
    """Return the config of the renderer `name`; "" chooses one by the policy's files in `tokenizer_dir`
    (`choose_renderer`).

    The renderer `default` applies the tokenizer's chat template, parses no tool calls, and renders the whole
    conversation anew in every turn. Results are cached.
    """
    from pydantic import TypeAdapter
    from renderers import RendererConfig

    chosen = name or choose_renderer(Path(tokenizer_dir))
    return TypeAdapter(RendererConfig).validate_python({"name": chosen})


@lru_cache(maxsize=64)
def choose_renderer(tokenizer_dir: Path) -> str:
    """Return the name of the model family's own renderer if it writes the same as the policy's chat template, else
    `default`.

    `tokenizer_dir` has the policy's config and tokenizer. A family's renderer extends the tokens of earlier turns
    exactly, but it has its format built in: a policy whose template was changed, or whose vocabulary lacks the family's
    symbols (a tiny byte-level model), must not be sampled with it.
    """
    config, tokenizer = tokenizer_dir / "config.json", tokenizer_dir / "tokenizer.json"
    if not config.is_file() or not tokenizer.is_file():
        return DEFAULT
    names = _FAMILIES.get(json.loads(config.read_text()).get("model_type"), ())
    text = tokenizer.read_text()
    if not names or not all(symbol in text for symbol in _QWEN3_SYMBOLS):
        return DEFAULT
    return next((name for name in names if _writes_like_template(name, tokenizer_dir)), DEFAULT)


def _writes_like_template(name: str, tokenizer_dir: Path) -> bool:
    """Return whether the renderer `name` and the tokenizer's chat template give equal token ids for two short
    conversations, of one turn and of two.
    """
    from renderers import create_renderer
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir, local_files_only=True)
    renderer = create_renderer(tokenizer, renderer_config(name, str(tokenizer_dir)))
    for messages in _PROBES:
        expected = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
        if list(renderer.render_ids(messages, add_generation_prompt=True)) != list(expected):
            return False
    return True
