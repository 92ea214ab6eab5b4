"""Scores rollouts with the teacher of their run, before they are appended.

It happens here and not when a batch is cut, so that what the log holds needs no teacher any more: an orchestrator that
takes a run over, or reads its log again, finds the scores in the store, bit for bit, while the teacher may be gone.
The key is read from this process's environment by its name; it goes to the teacher and nowhere else. Env workers
inherit every variable that is not withheld: in one that begins with `MILLRACE_KEY_` no environment gets to see it.

A teacher that does not answer is a wait with its name; meanwhile no groups are taken (TEACHER_UNREACHABLE), and
rollouts that finish end as ENGINE_LOST after the retries, which the orchestrator plays again without blame. The same
holds for a teacher that refuses every request (an expired key, a missing route); the refusal of one sample alone is
that rollout's failure.
"""

import asyncio
import contextlib
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from millrace.backoff import Backoff
from millrace.config.sections.algo import DISTILLING, AlgoConfig, TeacherConfig
from millrace.decoding import MAX_JSON_BYTES
from millrace.env_server.teacher.client import (
    HintTooLongError,
    SelfTeacher,
    TeacherClient,
    TeacherLostError,
    TeacherRefusedError,
    TokensDifferError,
)
from millrace.env_server.tokenizer_files import TokenizerFiles
from millrace.errors import CapacityError, InvalidSpecError, NotFoundError, UnavailableError, Violation
from millrace.internal.v1.play_pb2 import PlayGroupRequest
from millrace.rollouts.requests import is_training
from millrace.rollouts.types import (
    MAX_ERROR_MESSAGE_CHARS,
    Float32Array,
    Rollout,
    RolloutError,
    RolloutStatus,
    Sample,
    Taught,
)
from millrace.runlog.names import Names
from millrace.runlog.records.run_record import RunRecord
from millrace.runlog.records.token_logs import store_scores
from millrace.storage.base import ObjectStore
from millrace.telemetry import waits

# Whether a teacher can score a policy's tokens: checked once, before the first rollout is played for it.
TEACHER = "orchestrator.algo.teacher"
"""The teacher's table in the config."""
_TOKENIZER_DIFFERS, _VOCABULARY_DIFFERS = "TEACHER_TOKENIZER_DIFFERS", "TEACHER_VOCABULARY_DIFFERS"
IS_ANOTHER = frozenset({_TOKENIZER_DIFFERS, _VOCABULARY_DIFFERS})
"""Reasons of refusals that need another teacher; all other ones (a key, a gateway, a route) may pass."""
ABOUT_THE_TOKENS = frozenset({200, 400, 422})
"""Statuses of refusals because of the tokens that were sent, and not of the key or the address."""
# Scripts, digits, blanks and marks that vocabularies cut differently. Short: some teachers have little context.
_PROBE = "The 2,048 naïve cats'  saw\n\tπ≈3.14159, Ünïcode, 日本語, def f(x): return x**2 🙂"
_MAX_SPECIAL = 16


async def check_teacher(client: TeacherClient, teacher: TeacherConfig, *, tokenizer_dir: str, seq_len: int) -> None:
    """Raise InvalidSpecError if the teacher cannot score this policy, TeacherLostError if it does not answer.

    The teacher must accept the key, give `prompt_logprobs`, have a context longer than `seq_len` tokens, read a text as
    the policy's tokens, and know the policy's highest token id. `tokenizer_dir` has the policy's tokenizer; without a
    `tokenizer.json` in it only the context is checked.
    """
    try:
        # unregistered wait: one request while a run is opened, with the deadline of the client's session
        longest = await client.max_model_len()
        # Longer, because each request also asks for one token after the prompt.
        if longest is not None and longest <= seq_len:
            problem = f"has a context of {longest} tokens; it must be longer than orchestrator.seq_len, {seq_len}"
            raise refusal(f"{TEACHER}.base_url", teacher, problem)
        if not tokenizer_dir or not (Path(tokenizer_dir) / "tokenizer.json").is_file():
            logger.warning("the policy has no tokenizer.json: that the teacher's is equal is not checked")
            return
        token_ids, text, highest = await asyncio.to_thread(_read_tokenizer, Path(tokenizer_dir))
        # unregistered wait: `TeacherClient.score`, which registers its own wait
        await client.score(token_ids, text=text, attempts=1)
    except TokensDifferError as error:
        problem = f"has another tokenizer than the policy: {error}"
        raise refusal(f"{TEACHER}.name", teacher, problem, reason=_TOKENIZER_DIFFERS) from error
    except TeacherRefusedError as error:
        raise refusal(f"{TEACHER}.base_url", teacher, f"cannot score: {error}") from error
    try:
        # unregistered wait: `TeacherClient.score`, which registers its own wait
        await client.score([*token_ids[:2], highest], attempts=1)
    except TeacherRefusedError as error:
        if error.status not in ABOUT_THE_TOKENS:
            raise refusal(f"{TEACHER}.base_url", teacher, f"cannot score: {error}") from error
        problem = f"does not know token id {highest}, which the policy's tokenizer has: {error}"
        raise refusal(f"{TEACHER}.name", teacher, problem, reason=_VOCABULARY_DIFFERS) from error


def refusal(field: str, teacher: TeacherConfig, problem: str, *, reason: str = "TEACHER_REFUSED") -> InvalidSpecError:
    """Make the InvalidSpecError of a run whose teacher cannot score, with the text `problem` and the error's `reason`.

    `field` is the config's key that is wrong.
    """
    violation = Violation(field=field, value=teacher.name, message=problem, source="run config")
    return InvalidSpecError([violation], reason=reason, remedy="correct the teacher, then submit the run again")


def _read_tokenizer(directory: Path) -> tuple[list[int], str, int]:
    """Return (token ids, text, highest id) for a check of a teacher's tokenizer by the policy's, in `directory`.

    The text ends with special tokens, and the ids are its tokens; the last is the vocabulary's highest id.
    """
    from tokenizers import Tokenizer  # here: only runs with a teacher need it in this process

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    text = _PROBE + "".join(special[:_MAX_SPECIAL])
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    return token_ids, text, max(tokenizer.get_vocab(with_added_tokens=True).values())


logger = logging.getLogger(__name__)

TEACHER_VERSION = "teacher_version"
"""Metric of rollouts that the policy scored itself: the oldest version that did."""
REVERSE_KL = "teacher_reverse_kl"
"""Metric of scored rollouts: mean over sampled tokens of the policy's minus the teacher's log-prob."""
# PlayGroup must answer within its caller's deadline (5 s); a check that takes longer goes on, and the caller asks
# again.
_ANSWER_S = 2.0
_BACKOFF = Backoff(0.5, 15.0)
_NOBODY_ASKS_S = 120.0
"""A teacher that does not answer is asked no longer once so much time has passed without a request to play."""
_SCORE_S = 20.0
"""Least time for scoring a rollout; below the orchestrator's slack of 30 s after the rollout's own deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scoring:
    """A run's settings for its teacher."""

    algo: AlgoConfig
    seq_len: int


class _RunTeacher:
    """The state of one run's teacher: being checked (`opening`), then ready; checked again after it was lost."""

    def __init__(self) -> None:
        """Make the state of a teacher that is not checked yet."""
        self.opening: asyncio.Task[None] | None = None
        self.is_ready = False
        self.was_ready = False
        """Whether an earlier check passed: then a refusal counts as temporary, unless it means another teacher."""
        self.scoring: _Scoring | None = None
        self.client: TeacherClient | SelfTeacher | None = None
        self.asked_at = 0.0
        self.problem = ""


class Teachers:
    """The teachers of the runs that this env-server plays for."""

    def __init__(
        self,
        store: ObjectStore,
        tokenizers: TokenizerFiles,
        *,
        prefix: str,
        key_problem: Callable[[str], str],
    ) -> None:
        """Make the teachers of runs, none at first.

        Runs are read and scores are kept in `store` below `prefix`. `tokenizers` fetches the policies' tokenizers.
        `key_problem` gets the name of a variable and returns why this process has no key in the variable, or "".
        """
        self._store = store
        self._tokenizers = tokenizers
        self._prefix = prefix
        self._key_problem = key_problem
        self._runs: dict[str, _RunTeacher] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def require_ready(self, request: PlayGroupRequest) -> None:
        """Return if the run of the request needs no teacher, or its teacher has passed the check; else check the
        teacher.

        Raises CapacityError (TEACHER_UNREACHABLE) if the check, which then goes on, takes longer than a moment,
        UnavailableError if it was given up because the teacher did not answer, and InvalidSpecError if the teacher
        cannot do its work.
        """
        if not is_training(request):
            return
        run = self._runs.setdefault(request.run_uid, _RunTeacher())
        run.asked_at = time.monotonic()
        if run.is_ready:
            return
        if run.opening is None:
            run.opening = asyncio.create_task(self._open(request, run), name=f"teacher of {request.run_uid}")
        opening = run.opening
        if not run.problem:  # else it is known not to answer: say so at once
            await asyncio.wait({opening}, timeout=_ANSWER_S)
        if not opening.done():
            # No UnavailableError: this env-server is well, and may play for evaluations and for others.
            raise CapacityError(
                f"the run's teacher is not ready: {run.problem or 'it is being checked'}",
                reason="TEACHER_UNREACHABLE",
                remedy="start it, or wait until it answers",
            )
        if run.opening is opening:
            run.opening = None  # what went wrong is tried again when somebody asks again
        opening.result()

    async def score(self, part: PlayGroupRequest, rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
        """Have the run's teacher score the rollouts of `part`, store the scores, and return the rollouts with metrics
        of them.

        A rollout that cannot be scored is returned as a failure. Rollouts of runs without a teacher are returned as
        they are.
        """
        run = self._runs.get(part.run_uid)
        if not is_training(part) or run is None or run.scoring is None or run.client is None:
            return rollouts
        names, seq_len = Names(self._prefix, part.run_uid), run.scoring.seq_len
        if isinstance(run.client, SelfTeacher):
            scorer = _SelfScorer(self._store, names, run.client, part, seq_len=seq_len)
        else:
            scorer = _TeacherScorer(self._store, names, run.client, seq_len=seq_len)
        timeout_s = part.rollout_timeout_seconds
        results = await asyncio.gather(*(scorer.score(rollout, timeout_s=timeout_s) for rollout in rollouts))
        if scorer.is_lost and run.is_ready:
            # It is checked again, as if for the first time: it may come back as another one.
            run.is_ready, run.opening = False, None
        return results

    def forget(self, run_uid: str) -> None:
        """Remove the teacher of a run that is over and close its client, unless the teacher is still being checked."""
        run = self._runs.get(run_uid)
        if run is None or (run.opening is not None and not run.opening.done()):
            return
        del self._runs[run_uid]
        if run.client is not None:
            closing = asyncio.create_task(run.client.close(), name=f"close the teacher of {run_uid}")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Stop all checks of teachers and close all clients."""
        await asyncio.gather(*self._closing)
        for run in self._runs.values():
            if run.opening is not None:
                run.opening.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):  # the caller has had its answer
                    await run.opening
            if run.client is not None:
                # unregistered wait: an HTTP session, which closes at once
                await run.client.close()

    async def _open(self, request: PlayGroupRequest, run: _RunTeacher) -> None:
        """Read which teacher the run has, check the teacher until it answers, and mark the run as ready.

        A run without a teacher is ready at once. Raises InvalidSpecError if the teacher cannot do its work.
        """
        with waits.of_run(request.run_uid):
            if run.scoring is None:
                run.scoring = await asyncio.to_thread(self._read_scoring, request.run_uid)
            if run.scoring is not None and run.scoring.algo.teacher is None:
                await self._check_policy(request, run, run.scoring)
            elif run.scoring is not None:
                await self._await_teacher(request, run, run.scoring)
            run.is_ready, run.was_ready, run.problem = True, True, ""

    async def _check_policy(self, request: PlayGroupRequest, run: _RunTeacher, scoring: _Scoring) -> None:
        """Check the request's replica as the run's own teacher.

        Raises CapacityError if the replica is away, as another may be asked next, and InvalidSpecError if it cannot
        score.
        """
        client = run.client if isinstance(run.client, SelfTeacher) else SelfTeacher(scoring.algo)
        run.client = client
        try:
            # unregistered wait: `SelfTeacher.check`, which registers its own wait
            await client.check(request)
        except TeacherLostError as error:
            raise CapacityError(str(error), reason="TEACHER_UNREACHABLE", remedy="ask again") from error

    async def _await_teacher(self, request: PlayGroupRequest, run: _RunTeacher, scoring: _Scoring) -> None:
        """Check the run's teacher again and again until it answers.

        Raises InvalidSpecError if it cannot do its work or the variable for its key is wrong, and UnavailableError if
        it does not answer and nobody has asked for it lately.
        """
        teacher = scoring.algo.teacher
        assert teacher is not None, "the caller has looked"
        variable = teacher.api_key_var or ""
        if problem := self._key_problem(variable):
            raise refusal(f"{TEACHER}.api_key_var", teacher, f"{variable} {problem}", reason="TEACHER_KEY_MISSING")
        client = run.client if isinstance(run.client, TeacherClient) else None
        if client is None:
            client = run.client = TeacherClient(teacher, api_key=os.environ[variable] if variable else "")
        tokenizer_dir = await self._tokenizers.directory(request.tokenizer_manifest_key)
        num_failed = 0
        with waits.waiting(f"{client.describe()} to answer", waits_on=teacher.base_url[0]) as wait:
            while True:
                try:
                    await check_teacher(client, teacher, tokenizer_dir=tokenizer_dir, seq_len=scoring.seq_len)
                    return
                except TeacherLostError as error:
                    run.problem = str(error)
                except InvalidSpecError as error:
                    if not run.was_ready or error.reason in IS_ANOTHER:
                        raise
                    run.problem = error.violations[0].message
                wait.update(reason=f"{client.describe()} to answer: {run.problem}")
                logger.warning("the teacher does not answer", extra={"problem": run.problem})
                if time.monotonic() - run.asked_at > _NOBODY_ASKS_S:
                    raise UnavailableError(f"the run's teacher did not answer: {run.problem}", reason="TEACHER_LOST")
                num_failed += 1
                await asyncio.sleep(_BACKOFF.after(num_failed))

    def _read_scoring(self, run_uid: str) -> _Scoring | None:
        """Read from `run.json` how the run is scored (blocking).

        None if it has no teacher, or was deleted.
        """
        try:
            data = self._store.get(Names(self._prefix, run_uid).run_json, max_bytes=MAX_JSON_BYTES)
        except NotFoundError:  # deleted: what is played for it is nobody's any more
            return None
        record = RunRecord.parse(data, where=f"run.json of run {run_uid}")
        orchestrator = (record.config or {}).get("orchestrator", {})
        if orchestrator.get("algo", {}).get("type") not in DISTILLING:
            return None
        algo = AlgoConfig.model_validate(orchestrator["algo"])
        return _Scoring(algo=algo, seq_len=int(orchestrator["seq_len"]))


class _Scorer(ABC):
    """Scores the rollouts of one play."""

    def __init__(self, store: ObjectStore, names: Names, *, seq_len: int) -> None:
        """Take the run's names in `store`, where scores are kept, and `seq_len`, the most tokens of a sample in a
        batch.
        """
        self._store = store
        self._names = names
        self._seq_len = seq_len
        self.is_lost = False
        """Whether the teacher has to be checked again."""

    @abstractmethod
    async def _scored(self, rollout: Rollout) -> tuple[list[Float32Array], list[Taught | None]]:
        """Return each sample's scores, the teacher's log-probs (float32 [T]), and for each how the policy made them.

        Tokens that are not scored have their `inference_logprobs`, which give no credit. How they were made is None if
        another model made them, or no token is scored. Raises TeacherLostError and TeacherRefusedError.
        """

    @abstractmethod
    async def _failure(self, rollout: Rollout, error: TeacherLostError | TeacherRefusedError | TimeoutError) -> Rollout:
        """Return the rollout, which could not be scored because of `error`, as a failure; its status depends on the
        error.
        """

    async def score(self, rollout: Rollout, *, timeout_s: float) -> Rollout:
        """Score an OK rollout and store its scores; return it with metrics of them, or as a failure.

        The time is what is left of `timeout_s` after the rollout's own seconds, but at least `_SCORE_S`. Rollouts that
        are not OK are returned as they are.
        """
        if rollout.status is not RolloutStatus.OK:
            return rollout
        budget_s = max(_SCORE_S, timeout_s - rollout.seconds)
        try:
            async with asyncio.timeout(budget_s):
                scores, taught = await self._scored(rollout)
            # Stored before the rollout is appended: a reader of the log finds the scores of every rollout in it.
            await asyncio.to_thread(store_scores, self._store, self._names, rollout, scores, taught)
        except TimeoutError:
            return await self._failure(rollout, TimeoutError(f"did not score it within {budget_s:g} s"))
        except (TeacherLostError, TeacherRefusedError) as error:
            return await self._failure(rollout, error)
        except (UnavailableError, CapacityError) as error:
            return _failed(rollout, RolloutStatus.ENGINE_LOST, "ScoresNotStored", str(error))
        metrics = {**rollout.metrics, REVERSE_KL: _reverse_kl(rollout, scores)}
        if versions := [each.version for each in taught if each is not None]:
            metrics[TEACHER_VERSION] = float(min(versions))
        return replace(rollout, metrics=metrics)

    def _places(self, sample: Sample) -> NDArray[np.intp]:
        """Return the indices of the sample's tokens to score: the sampled ones before seq_len, after which no batch has
        any.

        Raises TeacherRefusedError if the first token is one, as nothing precedes it.
        """
        places = np.flatnonzero((sample.loss_mask == 1)[: self._seq_len])
        if len(places) and places[0] == 0:
            raise TeacherRefusedError("the sample begins with a sampled token: nobody can score what nothing precedes")
        return places


class _TeacherScorer(_Scorer):
    """Scores with another model."""

    def __init__(self, store: ObjectStore, names: Names, client: TeacherClient, *, seq_len: int) -> None:
        """Take the client of the run's teacher; scores are kept under the run's names in `store`.

        `seq_len` is the most tokens of a sample in a batch; tokens after it are not scored.
        """
        super().__init__(store, names, seq_len=seq_len)
        self._client = client

    async def _scored(self, rollout: Rollout) -> tuple[list[Float32Array], list[Taught | None]]:
        """Return the scores of each sample by the teacher, float32 [T], and None for each."""
        scores = [await self._score_sample(sample, rollout) for sample in rollout.samples]
        return scores, [None] * len(scores)

    async def _failure(self, rollout: Rollout, error: TeacherLostError | TeacherRefusedError | TimeoutError) -> Rollout:
        """Return the rollout as a failure: ENGINE_LOST if the teacher does not answer or refuses everything, else
        MODEL_ERROR.
        """
        if isinstance(error, TimeoutError):
            return self._lost(rollout, "TeacherLost", f"{self._client.describe()} {error}")
        if isinstance(error, TeacherLostError):
            return self._lost(rollout, "TeacherLost", str(error))
        if await self._refuses_all(error, rollout):
            return self._lost(rollout, "TeacherRefused", str(error))
        return _failed(rollout, RolloutStatus.MODEL_ERROR, "TeacherRefused", str(error))

    async def _refuses_all(self, error: TeacherRefusedError, rollout: Rollout) -> bool:
        """Return whether the teacher, which has refused this rollout with `error`, refuses even a request of two
        tokens.

        False at once for a status about the tokens.
        """
        if error.status in ABOUT_THE_TOKENS:
            return False
        tokens = rollout.samples[0].token_ids[:2].tolist()
        try:
            async with asyncio.timeout(_SCORE_S):
                await self._client.score(tokens, first_url=rollout.ordinal, attempts=1)
        except (TeacherRefusedError, TeacherLostError, TimeoutError):
            return True
        return False

    async def _score_sample(self, sample: Sample, rollout: Rollout) -> Float32Array:
        """Return a sample's scores, float32 [T].

        Tokens that are not scored, such as those after seq_len, have the policy's own log-probs, which give no credit.
        """
        scores, places = sample.inference_logprobs.copy(), self._places(sample)
        if not len(places):
            return scores
        end = int(places[-1]) + 1
        found = await self._client.score(sample.token_ids[:end].tolist(), first_url=rollout.ordinal)
        # `found` begins with the score of the second token.
        scores[places] = found[places - 1]
        return scores

    def _lost(self, rollout: Rollout, error_type: str, problem: str) -> Rollout:
        """Return the rollout as ENGINE_LOST, and note that the teacher has to be checked again."""
        self.is_lost = True
        return _failed(rollout, RolloutStatus.ENGINE_LOST, error_type, problem)


class _SelfScorer(_Scorer):
    """Scores with the policy itself, with the task's demonstration in its prompt."""

    def __init__(
        self, store: ObjectStore, names: Names, client: SelfTeacher, part: PlayGroupRequest, *, seq_len: int
    ) -> None:
        """Take the client that asks the replica of `part`; scores are kept under the run's names in `store`.

        `seq_len` is the most tokens of a sample in a batch; tokens after it are not scored.
        """
        super().__init__(store, names, seq_len=seq_len)
        self._client, self._part = client, part

    async def _scored(self, rollout: Rollout) -> tuple[list[Float32Array], list[Taught | None]]:
        """Return the scores of each sample by the policy after the task's demonstration, float32 [T], and how they were
        made.

        Tokens that are not scored have the log-probs with which they were sampled, which give no credit. How they were
        made is None for a sample of which no token is scored.
        """
        scores: list[Float32Array] = []
        taught: list[Taught | None] = []
        hint = await self._client.hint(self._part, rollout.demonstration)
        for sample in rollout.samples:
            column, places, source = sample.inference_logprobs.copy(), self._places(sample), None
            if len(places):
                # What comes after the last of these tokens changes no score.
                tokens = sample.token_ids[: int(places[-1]) + 1].tolist()
                found, source = await self._client.score(self._part, hint, tokens, num_prompt=int(places[0]))
                # The first token has no score, so that `found[i]` is of token `i + 1`.
                column[places] = found[places - 1]
            scores.append(column)
            taught.append(source)
        return scores, taught

    async def _failure(self, rollout: Rollout, error: TeacherLostError | TeacherRefusedError | TimeoutError) -> Rollout:
        """Return the rollout as a failure: ENGINE_LOST if the replica is away, as the next play gets another one.

        A hint that is too long is PROMPT_TOO_LONG if no reply would fit, else MODEL_ERROR, as is a refusal.
        """
        if isinstance(error, HintTooLongError):
            status = RolloutStatus.PROMPT_TOO_LONG if error.is_hopeless else RolloutStatus.MODEL_ERROR
            return _failed(rollout, status, "HintTooLong", str(error))
        if isinstance(error, TeacherRefusedError):
            return _failed(rollout, RolloutStatus.MODEL_ERROR, "TeacherRefused", str(error))
        problem = f"the replica at {self._part.base_url} {error}" if isinstance(error, TimeoutError) else str(error)
        return _failed(rollout, RolloutStatus.ENGINE_LOST, "TeacherLost", problem)


def _reverse_kl(rollout: Rollout, scores: Sequence[Float32Array]) -> float:
    """Return the mean over the rollout's sampled tokens of the policy's log-prob minus the teacher's; 0 without
    samples.
    """
    gaps = [(s.inference_logprobs - t)[s.loss_mask == 1] for s, t in zip(rollout.samples, scores, strict=True)]
    return float(np.concatenate(gaps).mean()) if gaps else 0.0


def _failed(rollout: Rollout, status: RolloutStatus, error_type: str, problem: str) -> Rollout:
    """Return the rollout as a failure of that status, without samples and reward."""
    error = RolloutError(type=error_type, message=problem[:MAX_ERROR_MESSAGE_CHARS])
    return replace(rollout, status=status, error=error, samples=(), reward=0.0)
