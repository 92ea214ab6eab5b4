"""The policy as its own teacher (opsd): it scores what it has sampled, told the demonstration of the task besides.

The replica that a rollout was played with reads a system message with the demonstration, then the tokens of the sample
as they are: nothing is rendered or tokenized a second time. What it says of the policy that computed the scores is kept
with them.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from millrace.config.sections.algo import HINT, AlgoConfig
from millrace.env_server.adapters.samples import engine_spans
from millrace.env_server.engine_access import (
    LOST_STATUSES,
    REFUSED_STATUSES,
    RETRIED_STATUSES,
    EngineAccess,
    retry_pause_s,
)
from millrace.env_server.teacher.client import TeacherLostError, TeacherRefusedError, answer_object, parse_scores
from millrace.errors import InvalidSpecError, Violation
from millrace.rollouts.requests import PlayRequest
from millrace.rollouts.types import Float32Array, Taught
from millrace.rpc.access import ClientAccess
from millrace.telemetry import waits

ALGO = "orchestrator.algo"
_MAX_TRIES = 12
"""Of one request, within half a minute: an engine that is being updated answers again."""
_ATTEMPT_S = 120.0  # one forward pass over one sample, behind others
_SHOWN_CHARS = 300
_QUIET_S = 2.0
_PROBE = "x"
_NOT_CHAT = "needs a chat template that writes a system message alone, to tell the teacher the demonstration"


class HintTooLongError(TeacherRefusedError):
    """What the teacher is to read is longer than the context of the model."""

    def __init__(self, message: str, *, is_hopeless: bool) -> None:
        """`is_hopeless`: no reply is short enough."""
        super().__init__(message, status=400)
        self.is_hopeless = is_hopeless


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """What the teacher reads first, and the longest context of its model."""

    token_ids: tuple[int, ...]
    begin_id: int | None
    """The token that begins every text, where the tokenizer has one."""
    max_model_len: int

    def skipped(self, token_ids: Sequence[int]) -> int:
        """Return how many tokens of a sample the hint has already."""
        begins = self.begin_id is not None and self.token_ids[:1] == (self.begin_id,)
        return int(begins and token_ids[0] == self.begin_id)


class SelfTeacher:
    """Asks the replicas of this deployment for the log-probs of one run's samples behind their hints.

    `check` comes first: it learns how the tokenizer begins a text.
    """

    def __init__(self, algo: AlgoConfig) -> None:
        """Call `close` in the same event loop."""
        self._template, self._demo_key = algo.template, algo.demo_key
        self._access = EngineAccess(ClientAccess.internal_from_environ(os.environ))
        self._begin_id: int | None = None

    async def close(self) -> None:
        """Drop its connections."""
        await self._access.close()

    async def check(self, part: PlayRequest) -> None:
        """Raise InvalidSpecError if the policy cannot be told anything, TeacherLostError if its replica is away."""
        try:
            await self.hint(part, _PROBE)
            bare, whole = [
                (await self._tokens(part, {"prompt": _PROBE, "add_special_tokens": adds}))["tokens"]
                for adds in (False, True)
            ]
            self._begin_id = whole[0] if len(whole) > len(bare) and whole[1 : len(bare) + 1] == bare else None
        except TeacherRefusedError as error:
            message = f"{_NOT_CHAT}: {error}"
            violation = Violation(field=f"{ALGO}.type", value="opsd", message=message, source="run config")
            remedy = "take a model with such a template, or opd with a teacher of its own"
            raise InvalidSpecError([violation], reason="HINT_NOT_RENDERED", remedy=remedy) from error

    async def hint(self, part: PlayRequest, demonstration: str) -> Hint:
        """Return the tokens that the replica makes of the hint."""
        text = self._template.replace(HINT, demonstration)
        asked = {"messages": [{"role": "system", "content": text}], "add_generation_prompt": False}
        rendered = await self._tokens(part, asked)
        room = rendered["max_model_len"]
        return Hint(token_ids=tuple(rendered["tokens"]), begin_id=self._begin_id, max_model_len=room)

    async def score(
        self, part: PlayRequest, hint: Hint, token_ids: Sequence[int], *, num_prompt: int
    ) -> tuple[Float32Array, Taught]:
        """Log-prob of each token but the first given the hint and those before it, float32 [T - 1], and whose it is.

        `num_prompt` tokens were there before the first that was sampled.
        """
        skipped = hint.skipped(token_ids)
        asked = [*hint.token_ids, *token_ids[skipped:]]
        if len(asked) >= hint.max_model_len:
            raise HintTooLongError(
                f"the demonstration ({len(hint.token_ids)} tokens) and what was sampled behind its prompt "
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
        return scores[len(hint.token_ids) - skipped :], taught

    async def _tokens(self, part: PlayRequest, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        reply = await self._ask(part, f"{part.base_url.removesuffix('/v1')}/tokenize", {"model": part.model, **asked})
        tokens, room = reply.get("tokens"), reply.get("max_model_len")
        if not isinstance(tokens, list) or not tokens or not isinstance(room, int):
            raise TeacherRefusedError(f"the replica at {part.base_url} answered without tokens")
        return reply

    async def _ask(self, part: PlayRequest, url: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """POST until it is answered. Raises TeacherLostError, TeacherRefusedError."""
        raw = orjson.dumps(body)
        reason = f"the replica at {part.base_url} to score {waits.COUNT} samples as their own teacher"
        with waits.shared(reason, waits_on=part.base_url, quiet_s=_QUIET_S):
            for attempt in range(1, _MAX_TRIES + 1):
                try:
                    status, answer = await self._post(url, raw)
                except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                    raise TeacherLostError(f"POST {url} failed: {type(error).__name__}: {error}") from error
                if status == 200:
                    return answer_object(answer, of=f"POST {url}")
                shown = answer[:_SHOWN_CHARS].decode("utf-8", "replace")
                problem = f"POST {url} answered {status}: {shown}"
                if status not in LOST_STATUSES | REFUSED_STATUSES:
                    raise TeacherRefusedError(problem, status=status)
                if attempt == _MAX_TRIES or status not in RETRIED_STATUSES:
                    raise TeacherLostError(f"{problem} ({attempt} attempts)")
                await asyncio.sleep(retry_pause_s(attempt))
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _post(self, url: str, raw: bytes) -> tuple[int, bytes]:
        headers = {"content-type": "application/json", **self._access.headers(url)}
        trust = self._access.context()
        request = self._access.session().post(
            url, data=raw, headers=headers, allow_redirects=False, ssl=True if trust is None else trust
        )
        async with asyncio.timeout(_ATTEMPT_S), request as reply:
            return reply.status, await reply.read()


def _policy(reply: Mapping[str, Any], *, of: str) -> tuple[int, int]:
    """Lineage and version of the policy that gave the scores.

    The embedded engine names it; vLLM names that of the token behind the prompt, which it computes in the same pass.
    """
    choice = reply["choices"][0]  # `parse_scores` has found it there
    told = choice.get("prompt_policy")
    spans = engine_spans({"policy_spans": [{**told, "start": 0, "end": 1}]} if isinstance(told, Mapping) else choice)
    if not spans:
        raise TeacherRefusedError(f"{of} does not say which policy gave the scores")
    return spans[0].lineage, spans[0].version
