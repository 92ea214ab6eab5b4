"""Whether a teacher can judge a policy's tokens: asked once, before the first rollout is played for it."""

import asyncio
import logging
from pathlib import Path

from millrace.config.sections.algo import TeacherConfig
from millrace.env_server.teacher.client import TeacherClient, TeacherRefusedError, TokensDifferError
from millrace.errors import InvalidSpecError, Violation

logger = logging.getLogger(__name__)

TEACHER = "orchestrator.algo.teacher"
"""Where it stands in the config."""
_TOKENIZER_DIFFERS, _VOCABULARY_DIFFERS = "TEACHER_TOKENIZER_DIFFERS", "TEACHER_VOCABULARY_DIFFERS"
IS_ANOTHER = frozenset({_TOKENIZER_DIFFERS, _VOCABULARY_DIFFERS})
"""Reasons of refusals that mean another teacher; it may take back every other one (a key, a gateway, a route)."""
ABOUT_THE_TOKENS = frozenset({200, 400, 422})
"""Statuses of refusals that are about the tokens that were sent, and not about the key or the address."""
# Scripts, digits, blanks and marks that vocabularies cut differently. Short: some teachers have little context.
_PROBE = "The 2,048 naïve cats'  saw\n\tπ≈3.14159, Ünïcode, 日本語, def f(x): return x**2 🙂"
_MAX_SPECIAL = 16


async def check_teacher(client: TeacherClient, teacher: TeacherConfig, *, tokenizer_dir: str, seq_len: int) -> None:
    """Raise InvalidSpecError if the teacher cannot score this policy, TeacherLostError if it does not answer.

    Looked at: that it takes our key and gives `prompt_logprobs`, its longest context, that it reads a text as the same
    tokens as the policy, and that it knows the policy's highest token id.
    """
    try:
        # unregistered wait: one request while a run is opened, with the deadline of the client's session
        longest = await client.max_model_len()
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
    """The error that ends a run whose teacher cannot do its work."""
    violation = Violation(field=field, value=teacher.name, message=problem, source="run config")
    return InvalidSpecError([violation], reason=reason, remedy="correct the teacher, then submit the run again")


def _read_tokenizer(directory: Path) -> tuple[list[int], str, int]:
    """The probe's tokens, the probe with special tokens (chat templates are made of them), and the highest id."""
    from tokenizers import Tokenizer  # here: only runs with a teacher need it in this process

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    text = _PROBE + "".join(special[:_MAX_SPECIAL])
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    return token_ids, text, max(tokenizer.get_vocab(with_added_tokens=True).values())
