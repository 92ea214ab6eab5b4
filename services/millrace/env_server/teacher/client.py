"""Asks a teacher how likely given tokens are: `POST {base_url}/completions` with `prompt_logprobs` of token ids.

vLLM and Millrace's embedded engine answer it (a vLLM extension of OpenAI's API). Retries are those of an external
endpoint: bounded, logged, with the pause that the server asks for, and going round the URLs where there are several.
"""

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import numpy as np
import orjson

from millrace.config.sections.algo import TeacherConfig
from millrace.env_server.engine_access import EXTERNAL_MAX_ATTEMPTS, EXTERNAL_RETRIED_STATUSES, external_pause_s
from millrace.rollouts.types import Float32Array
from millrace.rpc.reach import kept_alive_socket
from millrace.telemetry import waits

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 5.0
_ATTEMPT_TIMEOUT_S = 120.0  # one forward pass over one sample, behind others
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
    """The teacher's word about this request: 4xx, or an answer without the log-probs that were asked for."""

    def __init__(self, message: str, *, status: int = 200) -> None:
        super().__init__(message)
        self.status = status


class TokensDifferError(TeacherRefusedError):
    """The answer is about other tokens than those that were meant."""


class TeacherClient:
    """One run's connection to its teacher."""

    def __init__(self, teacher: TeacherConfig, *, api_key: str) -> None:
        """Call `close` in the same event loop."""
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
        """The teacher for messages."""
        return f"teacher {self._name} at {', '.join(self._urls)}"

    async def close(self) -> None:
        """Drop its connections."""
        await self._session.close()

    async def max_model_len(self) -> int | None:
        """Longest context that the server names for the teacher; None if it names none. One try."""
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
        """Log-prob of each token but the first given those before it, float32 [T - 1], at temperature 1.

        With `text` that is sent instead, and TokensDifferError says if the teacher reads other tokens than these in it.
        """
        body = {
            "model": self._name,
            "prompt": list(token_ids) if text is None else text,
            "add_special_tokens": False,
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
        }
        reason = f"{self.describe()} to score {waits.COUNT} samples"
        with waits.shared(reason, waits_on=self._urls[0], quiet_s=_QUIET_S):
            async with self._lane:
                tries = EXTERNAL_MAX_ATTEMPTS if attempts is None else attempts
                reply = await self._try(orjson.dumps(body), first_url, tries)
        return parse_scores(reply, token_ids, of=self.describe())

    async def _try(self, body: bytes, first_url: int, attempts: int) -> Mapping[str, Any]:
        # unregistered wait: `score` around it is the registered wait
        for attempt in range(1, attempts + 1):
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
    """One try failed in a way that the next one may mend."""

    def __init__(self, message: str, *, retry_after: str | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


def answer_object(raw: bytes, *, of: str) -> Mapping[str, Any]:
    """Read the JSON object that a request was answered with. Raises TeacherRefusedError."""
    shown = raw[:_SHOWN_CHARS].decode("utf-8", "replace")
    try:
        parsed = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise TeacherRefusedError(f"{of} answered with what is not JSON ({error}): {shown}") from error
    if not isinstance(parsed, Mapping):
        raise TeacherRefusedError(f"{of} answered with no JSON object: {shown}")
    return parsed


def parse_scores(reply: Mapping[str, Any], token_ids: Sequence[int], *, of: str) -> Float32Array:
    """Read vLLM's `prompt_logprobs`: per token a table from id to `{logprob, rank, decoded_token}`, null for the first.

    Returns float32 [T - 1]. Raises TeacherRefusedError.
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
