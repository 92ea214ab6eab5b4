"""Asks a teacher for log-probs of given tokens: another model, or the policy itself with a demonstration (opsd).

vLLM and Millrace's embedded engine answer it (a vLLM extension of OpenAI's API). Retries are those of an external
endpoint: bounded, logged, with the pause that the server asks for, and going round the URLs where there are several.
"""

import asyncio
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
import orjson

from millrace.config.sections.algo import HINT, AlgoConfig, TeacherConfig
from millrace.env_server.adapters.samples import engine_spans
from millrace.env_server.engine_access import (
    EXTERNAL_MAX_ATTEMPTS,
    EXTERNAL_RETRIED_STATUSES,
    LOST_STATUSES,
    REFUSED_STATUSES,
    RETRIED_STATUSES,
    EngineAccess,
    external_pause_s,
    retry_pause_s,
)
from millrace.errors import InvalidSpecError, Violation
from millrace.internal.v1.play_pb2 import PlayGroupRequest
from millrace.rollouts.types import Float32Array, Taught
from millrace.rpc.access import ClientAccess
from millrace.rpc.reach import kept_alive_socket
from millrace.telemetry import waits

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 5.0
_ATTEMPT_TIMEOUT_S = 120.0  # one forward pass over one sample, queued after others
_MAX_CONCURRENT = 64  # requests of one run to its teacher; a prefill of each is compute-bound on the other side
_ABOUT_THE_KEY = frozenset({401, 403})
_SHOWN_CHARS = 300
_QUIET_S = 2.0
# vLLM writes minus infinity as -9999: a finite reverse KL has no such token.
_NO_EVIDENCE = -1000.0
_MAX_LOGPROB = 1e-2  # rounding in half precision may lift 0 by that much


class TeacherLostError(Exception):
    """The teacher does not serve: nothing listens, or 429 and 5xx until the last try."""


class TeacherRefusedError(Exception):
    """The teacher refused this request: a 4xx, or an answer without the log-probs that were asked for."""

    def __init__(self, message: str, *, status: int = 200) -> None:
        """Make the error; `status` is the HTTP status of the teacher's answer, 200 for an answer without log-probs."""
        super().__init__(message)
        self.status = status


class TokensDifferError(TeacherRefusedError):
    """The answer is about other tokens than those that were sent."""


class TeacherClient:
    """Asks the teacher of one run, a model at its own endpoints."""

    def __init__(self, teacher: TeacherConfig, *, api_key: str) -> None:
        """Open an HTTP session for the teacher's endpoints; `close` must be called in the same event loop.

        `api_key` is sent as a bearer token; "" sends none.
        """
        self._name = teacher.name
        self._urls = teacher.base_url
        self._key_source = f"the key in {teacher.api_key_var}" if api_key else "no key, as the config names none"
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._lane = asyncio.Semaphore(_MAX_CONCURRENT)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, socket_factory=kept_alive_socket),
            timeout=aiohttp.ClientTimeout(total=_ATTEMPT_TIMEOUT_S, sock_connect=_CONNECT_TIMEOUT_S),
        )

    def describe(self) -> str:
        """Return the teacher's name and URLs, for messages."""
        return f"teacher {self._name} at {', '.join(self._urls)}"

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def max_model_len(self) -> int | None:
        """Return the context length in tokens that the teacher's first URL reports for its model; None if it reports
        none.

        Tries once. Raises TeacherLostError and TeacherRefusedError.
        """
        try:
            reply = await self._once("GET", self._urls[0], "models", None)
        except TeacherRefusedError as error:
            if error.status in (404, 405):  # a gateway without this route
                return None
            raise
        cards = reply.get("data")
        for card in cards if isinstance(cards, list) else []:
            if isinstance(card, Mapping) and card.get("id") == self._name:
                longest = card.get("max_model_len")
                return longest if isinstance(longest, int) else None
        return None

    async def score(
        self, token_ids: Sequence[int], *, text: str | None = None, first_url: int = 0, attempts: int | None = None
    ) -> Float32Array:
        """Return the log-prob of each token but the first given those before it, float32 [T - 1], at temperature 1.

        With `text`, whose tokens should be `token_ids`, the text is sent in their place, and TokensDifferError raised
        if the teacher reads other tokens in it. `first_url` is the index, modulo their number, of the URL tried first;
        each of the `attempts` (None: EXTERNAL_MAX_ATTEMPTS) takes the next one. Raises TeacherLostError and
        TeacherRefusedError.
        """
        body = {
            "model": self._name,
            "prompt": list(token_ids) if text is None else text,
            "add_special_tokens": False,
            # vLLM samples one token at least.
            "max_tokens": 1,
            "temperature": 0.0,
            # The log-probs of the given tokens, and of no others beside them.
            "prompt_logprobs": 0,
        }
        reason = f"{self.describe()} to score {waits.COUNT} samples"
        with waits.shared(reason, waits_on=self._urls[0], quiet_s=_QUIET_S):
            async with self._lane:
                tries = EXTERNAL_MAX_ATTEMPTS if attempts is None else attempts
                reply = await self._try(orjson.dumps(body), first_url, tries)
        return parse_scores(reply, token_ids, of=self.describe())

    async def _try(self, body: bytes, first_url: int, attempts: int) -> Mapping[str, Any]:
        """Post a request body until a URL answers, at most `attempts` times, and return the answer's object.

        Each attempt takes the next URL from the index `first_url` on. Raises TeacherLostError after the last, and
        TeacherRefusedError at once.
        """
        # unregistered wait: `score` around it is the registered wait
        for attempt in range(1, attempts + 1):
            # A retry goes to the next URL: the one that failed is the least likely to answer.
            url = self._urls[(first_url + attempt - 1) % len(self._urls)]
            try:
                return await self._once("POST", url, "completions", body)
            except _PassingError as error:
                if attempt == attempts:
                    raise TeacherLostError(f"{error} ({attempts} attempts)") from error
                pause_s = external_pause_s(attempt, error.retry_after)
                fields = {"problem": str(error), "attempt": attempt, "pause_s": round(pause_s, 1)}
                logger.warning("the teacher did not score a sample, trying again", extra=fields)
            await asyncio.sleep(pause_s)
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _once(self, method: str, base_url: str, path: str, body: bytes | None) -> Mapping[str, Any]:
        """Make one HTTP request to `path` below `base_url`, and return the answer's JSON object; a body of None is not
        sent.

        Raises _PassingError if another try may succeed, else TeacherRefusedError.
        """
        url = f"{base_url}/{path}"
        try:
            # A redirect would carry the key and the tokens to a server that the config does not name.
            request = self._session.request(method, url, data=body, headers=self._headers, allow_redirects=False)
            async with request as reply:
                raw = await reply.read()
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise _PassingError(f"{method} {url} failed: {type(error).__name__}: {error}") from error
        shown = raw[:_SHOWN_CHARS].decode("utf-8", "replace")
        if reply.status in EXTERNAL_RETRIED_STATUSES:
            message = f"{method} {url} answered {reply.status}: {shown}"
            raise _PassingError(message, retry_after=reply.headers.get("Retry-After"))
        if reply.status != 200:
            sent = f" (it was sent {self._key_source})" if reply.status in _ABOUT_THE_KEY else ""
            raise TeacherRefusedError(f"{method} {url} answered {reply.status}{sent}: {shown}", status=reply.status)
        return answer_object(raw, of=f"{method} {url}")


class _PassingError(TeacherLostError):
    """One try failed; the next one may succeed."""

    def __init__(self, message: str, *, retry_after: str | None = None) -> None:
        """Make the error; `retry_after` is the text of the answer's header `Retry-After`, None without one."""
        super().__init__(message)
        self.retry_after = retry_after


def answer_object(raw: bytes, *, of: str) -> Mapping[str, Any]:
    """Return the JSON object in an answer's body; raise TeacherRefusedError, which names the request `of`, if it is
    none.
    """
    shown = raw[:_SHOWN_CHARS].decode("utf-8", "replace")
    try:
        parsed = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise TeacherRefusedError(f"{of} answered with what is not JSON ({error}): {shown}") from error
    if not isinstance(parsed, Mapping):
        raise TeacherRefusedError(f"{of} answered with no JSON object: {shown}")
    return parsed


def parse_scores(reply: Mapping[str, Any], token_ids: Sequence[int], *, of: str) -> Float32Array:
    """Return the log-prob of each token but the first from an answer's `prompt_logprobs`, float32 [T - 1].

    `prompt_logprobs` is of vLLM's form: for each token a table from id to `{logprob, rank, decoded_token}`, null for
    the first. `of` names the teacher in messages. Raises TokensDifferError if the answer is about other tokens than
    `token_ids`, and TeacherRefusedError if log-probs are missing or one cannot be used.
    """
    choices = reply.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], Mapping) else {}
    rows = choice.get("prompt_logprobs")
    if not isinstance(rows, list):
        raise TeacherRefusedError(
            f"{of} answered without prompt_logprobs; serve it with vLLM or with Millrace's embedded engine"
        )
    if len(rows) != len(token_ids):
        raise TokensDifferError(f"{of} gave log-probs of {len(rows)} tokens, not of {len(token_ids)}")
    scores = np.zeros(len(token_ids) - 1, np.float32)
    for index, (token, row) in enumerate(zip(token_ids[1:], rows[1:], strict=True)):
        entry = row.get(str(token)) if isinstance(row, Mapping) else None
        if not isinstance(entry, Mapping):
            raise TokensDifferError(f"{of} gave no log-prob of token {token} at place {index + 1}")
        value = entry.get("logprob")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise TeacherRefusedError(f"{of} gave {value!r} as log-prob of token {token} at place {index + 1}")
        if not _NO_EVIDENCE < value <= _MAX_LOGPROB:
            raise TeacherRefusedError(f"{of} gives token {token} at place {index + 1} a log-prob of {value}")
        scores[index] = value
    return scores


# The policy as its own teacher (opsd): it scores its own samples with the task's demonstration added to the prompt.
#
# The replica that a rollout was played with reads a system message with the demonstration, then the tokens of the
# sample as they are: nothing is rendered or tokenized a second time. The policy that computed the scores, as the
# replica reports it, is kept with them.

ALGO = "orchestrator.algo"
_MAX_TRIES = 12
"""Tries of one request, within half a minute: an engine that is being updated answers again by then."""
_ATTEMPT_S = 120.0  # one forward pass over one sample, queued after others
_SELF_TEACHER_SHOWN_CHARS = 300
_SELF_TEACHER_QUIET_S = 2.0
_PROBE = "x"
_NOT_CHAT = "needs a chat template that writes a system message alone, to tell the teacher the demonstration"


class HintTooLongError(TeacherRefusedError):
    """The tokens for the teacher are more than the context of the model."""

    def __init__(self, message: str, *, is_hopeless: bool) -> None:
        """Make the error; `is_hopeless` is whether even an empty reply would not fit."""
        super().__init__(message, status=400)
        self.is_hopeless = is_hopeless


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """The tokens that the teacher reads first, and the longest context of its model."""

    token_ids: tuple[int, ...]
    begin_id: int | None
    """The token that begins every text, where the tokenizer has one."""
    max_model_len: int

    def skipped(self, token_ids: Sequence[int]) -> int:
        """Return how many tokens at the beginning of a sample are left out after the hint: 1 or 0.

        One token is left out if it is the one that begins every text, and the hint has begun with it already.
        """
        begins = self.begin_id is not None and self.token_ids[:1] == (self.begin_id,)
        return int(begins and token_ids[0] == self.begin_id)


class SelfTeacher:
    """Asks the replicas of this deployment for the log-probs of one run's samples after their hints.

    `check` must be called first, because it finds out how the tokenizer begins a text.
    """

    def __init__(self, algo: AlgoConfig) -> None:
        """Take the algorithm's hint template and open access to engines; `close` must be called in the same event
        loop.
        """
        self._template, self._demo_key = algo.template, algo.demo_key
        self._access = EngineAccess(ClientAccess.internal_from_environ(os.environ))
        self._begin_id: int | None = None

    async def close(self) -> None:
        """Close the connections to the engines."""
        await self._access.close()

    async def check(self, part: PlayGroupRequest) -> None:
        """Render a hint at the replica of the request `part`, and find out with which token the tokenizer begins texts,
        for later hints.

        Raises InvalidSpecError if the chat template takes no system message alone, TeacherLostError if the replica is
        away.
        """
        try:
            await self.hint(part, _PROBE)
            bare, whole = [
                (await self._tokens(part, {"prompt": _PROBE, "add_special_tokens": adds}))["tokens"]
                for adds in (False, True)
            ]
            # A tokenizer may add a token at the end, too; only one at the beginning would be there twice.
            self._begin_id = whole[0] if len(whole) > len(bare) and whole[1 : len(bare) + 1] == bare else None
        except TeacherRefusedError as error:
            message = f"{_NOT_CHAT}: {error}"
            violation = Violation(field=f"{ALGO}.type", value="opsd", message=message, source="run config")
            remedy = "take a model with such a template, or opd with a teacher of its own"
            raise InvalidSpecError([violation], reason="HINT_NOT_RENDERED", remedy=remedy) from error

    async def hint(self, part: PlayGroupRequest, demonstration: str) -> Hint:
        """Return the tokens of a system message with this demonstration, as the replica of the request `part` renders
        it.

        Raises TeacherLostError and TeacherRefusedError.
        """
        text = self._template.replace(HINT, demonstration)
        asked = {"messages": [{"role": "system", "content": text}], "add_generation_prompt": False}
        rendered = await self._tokens(part, asked)
        room = rendered["max_model_len"]
        return Hint(token_ids=tuple(rendered["tokens"]), begin_id=self._begin_id, max_model_len=room)

    async def score(
        self, part: PlayGroupRequest, hint: Hint, token_ids: Sequence[int], *, num_prompt: int
    ) -> tuple[Float32Array, Taught]:
        """Return the log-prob of each token but the first given the hint and earlier tokens, float32 [T - 1], and by
        which policy and hint it was made.

        The replica of `part` computes it. `num_prompt` is the number of tokens before the first sampled one. Raises
        HintTooLongError if the tokens do not fit, TeacherLostError and TeacherRefusedError.
        """
        skipped = hint.skipped(token_ids)
        asked = [*hint.token_ids, *token_ids[skipped:]]
        # One place is left for the token that the request asks for.
        if len(asked) >= hint.max_model_len:
            raise HintTooLongError(
                f"the demonstration ({len(hint.token_ids)} tokens) and what was sampled after its prompt "
                f"({len(token_ids)}) do not fit into the context of {hint.max_model_len} tokens: shorten what "
                f"`{ALGO}.demo_key` ({self._demo_key}) holds, lower `orchestrator.sampling.max_tokens`, or serve a "
                "longer context",
                is_hopeless=len(hint.token_ids) + num_prompt - skipped >= hint.max_model_len - 1,
            )
        body = {
            "model": part.model,
            "prompt": asked,
            "add_special_tokens": False,
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
        }
        reply = await self._ask(part, f"{part.base_url}/completions", body)
        scores = parse_scores(reply, asked, of=f"the replica at {part.base_url}")
        lineage, version = _policy(reply, of=f"the replica at {part.base_url}")
        taught = Taught(lineage=lineage, version=version, hint_ids=hint.token_ids, skipped=skipped)
        # The first of these scores is of the sample's second token, given the hint and the first.
        return scores[len(hint.token_ids) - skipped :], taught

    async def _tokens(self, part: PlayGroupRequest, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the answer of the replica of the request `part` to a request to tokenize: `tokens` and
        `max_model_len`.

        `asked` has the prompt or messages. Raises TeacherLostError and TeacherRefusedError.
        """
        reply = await self._ask(part, f"{part.base_url.removesuffix('/v1')}/tokenize", {"model": part.model, **asked})
        tokens, room = reply.get("tokens"), reply.get("max_model_len")
        if not isinstance(tokens, list) or not tokens or not isinstance(room, int):
            raise TeacherRefusedError(f"the replica at {part.base_url} answered without tokens")
        return reply

    async def _ask(self, part: PlayGroupRequest, url: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Post a request until the replica at `url` answers with 200, and return the answer's JSON object.

        `part` names the replica for messages. The request is repeated only while the engine is busy or updated. Raises
        TeacherLostError or TeacherRefusedError.
        """
        raw = orjson.dumps(body)
        reason = f"the replica at {part.base_url} to score {waits.COUNT} samples as their own teacher"
        with waits.shared(reason, waits_on=part.base_url, quiet_s=_SELF_TEACHER_QUIET_S):
            for attempt in range(1, _MAX_TRIES + 1):
                try:
                    status, answer = await self._post(url, raw)
                except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                    raise TeacherLostError(f"POST {url} failed: {type(error).__name__}: {error}") from error
                if status == 200:
                    return answer_object(answer, of=f"POST {url}")
                shown = answer[:_SELF_TEACHER_SHOWN_CHARS].decode("utf-8", "replace")
                problem = f"POST {url} answered {status}: {shown}"
                if status not in LOST_STATUSES | REFUSED_STATUSES:
                    raise TeacherRefusedError(problem, status=status)
                if attempt == _MAX_TRIES or status not in RETRIED_STATUSES:
                    raise TeacherLostError(f"{problem} ({attempt} attempts)")
                await asyncio.sleep(retry_pause_s(attempt))
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _post(self, url: str, raw: bytes) -> tuple[int, bytes]:
        """Post once to an engine of ours, with its token, and return (HTTP status, body)."""
        headers = {"content-type": "application/json", **self._access.headers(url)}
        trust = self._access.context()
        request = self._access.session().post(
            url, data=raw, headers=headers, allow_redirects=False, ssl=True if trust is None else trust
        )
        async with asyncio.timeout(_ATTEMPT_S), request as reply:
            return reply.status, await reply.read()


def _policy(reply: Mapping[str, Any], *, of: str) -> tuple[int, int]:
    """Return (lineage, version) of the policy that gave the scores, by the replica's answer.

    Raises TeacherRefusedError, which names the replica `of`, if the answer has none. The embedded engine names it; vLLM
    names that of the token after the prompt, which it computes in the same pass.
    """
    choice = reply["choices"][0]  # `parse_scores` has found it there
    policy = choice.get("prompt_policy")
    spans = engine_spans(
        {"policy_spans": [{**policy, "start": 0, "end": 1}]} if isinstance(policy, Mapping) else choice
    )
    if not spans:
        raise TeacherRefusedError(f"{of} does not say which policy gave the scores")
    return spans[0].lineage, spans[0].version
