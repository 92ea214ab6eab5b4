"""Rows as samples: tokens, and a cross-entropy weight of 1 on those that are trained on.

Without a chat template, rows are text: prompt and completion are joined and end with the end-of-sequence token.
"""

import logging
from collections.abc import Iterable
from typing import Any

import numpy as np

from millrace.config.sections.sft import LossMaskConfig
from millrace.errors import InvalidSpecError, Violation
from millrace.policies.stops import TurnStops, turn_stops
from millrace.rollouts.types import TrainSample
from millrace.trainer.sft.conversation import ConversationEncoder
from millrace.trainer.sft.rendering import BadRowError, TextTokens
from millrace.trainer.sft.rows import Row, conversation_of

logger = logging.getLogger(__name__)

_LOOKED_AT = 256  # rows that are looked at before the first step
_MOST_BAD = 0.1  # share of the rows seen that may be left out because they cannot be encoded
_FEWEST_SEEN = 10  # rows, before a share is judged
_BAD_REMEDY = (
    "mend the row; where the template does not write all of it, take that out or use one that does; where it rewrites "
    "earlier turns, use one with `{% generation %}` markers, or make one row of each assistant turn"
)


class RowEncoder:
    """Turns rows into samples.

    Counts what became of the rows: `num_rows` seen, `num_dropped` without a trained token left, `num_cut` others longer
    than `seq_len`, `num_bad` that could not be encoded; `longest` is in tokens, before cutting.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        seq_len: int,
        loss_mask: LossMaskConfig | None = None,
        stops: TurnStops | None = None,
        key: str = "data",
    ) -> None:
        """Encode with a tokenizer and its chat template; `stops` are known to the tokenizer if left out.

        `key` is the table of the config that names the rows, for messages.
        """
        self._key = key
        self._tokenizer = tokenizer
        self._stops = stops or turn_stops(tokenizer)
        self._seq_len = seq_len
        self._loss_mask = loss_mask or LossMaskConfig()
        self._conversations = ConversationEncoder(tokenizer, self._loss_mask, stops=self._stops)
        self._first_bad: Violation | None = None
        self._count_from_zero()

    def encode(self, row: Row, *, place: str = "") -> TrainSample | None:
        """The sample of a row, cut at `seq_len`; None if no trained token is left, or the row cannot be used.

        InvalidSpecError names the first of the latter once they are more than a tenth of the rows seen.
        """
        self.num_rows += 1
        try:
            token_ids, trained = self._encode(row)
        except BadRowError as error:
            self._note_bad(Violation(field=f"{self._key}.name", message=str(error), source=place or None))
            return None
        if self._conversations.lost and self._conversations.num_poor == 1:
            what = {"row": place, "lost": self._conversations.lost}
            logger.warning("the chat template leaves out context of a row", extra=what)
        end = max((at + 1 for at, flag in enumerate(trained) if flag), default=0)
        self.longest = max(self.longest, end)
        length = min(end, self._seq_len)
        weights = np.array(trained[:length], np.float32)
        weights[:1] = 0.0  # nothing precedes the first token, so it has no log-prob
        if not weights.any():
            self.num_dropped += 1
            return None
        self.num_cut += length < end
        zeros = np.zeros(length, np.float32)
        return TrainSample(
            token_ids=np.array(token_ids[:length], np.int32),
            loss_mask=np.zeros(length, np.uint8),
            inference_logprobs=zeros,
            advantages=zeros,
            ce_weights=weights,
            ordinal=0,
            member=0,
            attempt=0,
            env="sft",
            reward=0.0,
            temperature=1.0,
            min_version=0,
            max_version=0,
            lineage=0,
        )

    def require_completion(self, rows: Iterable[tuple[Row, str]]) -> None:
        """InvalidSpecError unless one of the rows, each with its place, keeps a trained token, and few cannot be used.

        Reads a few hundred of them, and further only to the first one that keeps a token.
        """
        is_found = False
        for row, place in rows:
            is_found |= self.encode(row, place=place) is not None
            if is_found and self.num_rows >= _LOOKED_AT:
                break
        self._require_few_bad()
        if is_found:
            self._count_from_zero()
            return
        if self._first_bad is not None:
            raise InvalidSpecError([self._first_bad], remedy=_BAD_REMEDY)
        if self.longest > self._seq_len:
            problem = Violation(
                field=f"{self._key}.seq_len",
                value=str(self._seq_len),
                message=f"leaves no completion token in any of {self.num_rows} rows, so there is nothing to train on; "
                f"the longest row has {self.longest} tokens",
            )
            raise InvalidSpecError([problem], remedy=f"set {self._key}.seq_len to {self.longest} to cut no row")
        problem = Violation(field=f"{self._key}.name", message=f"none of {self.num_rows} rows has a completion token")
        raise InvalidSpecError(
            [problem], remedy=f"give the rows completions, or train on other roles ({self._key}.loss_mask)"
        )

    def warn_of_losses(self) -> None:
        """Log how many rows were cut, dropped, left out, shown no tools or marked by the template so far, if any."""
        if self.num_cut or self.num_dropped:
            logger.warning(
                f"rows were cut at {self._key}.seq_len, or dropped because no completion token was left",
                extra={
                    "rows": self.num_rows,
                    "cut": self.num_cut,
                    "dropped": self.num_dropped,
                    "seq_len": self._seq_len,
                    "longest": self.longest,
                },
            )
        if self.num_bad:
            logger.warning("rows cannot be used", extra={"rows": self.num_rows, "left_out": self.num_bad})
        if self._conversations.num_poor:
            logger.warning(
                "the chat template leaves out context of rows",
                extra={"rows": self.num_rows, "poorer": self._conversations.num_poor},
            )
        if self._conversations.num_without_tools:
            logger.warning(
                "the chat template does not write which tools there are",
                extra={"rows": self.num_rows, "without_tools": self._conversations.num_without_tools},
            )
        if self._conversations.num_marked:
            logger.warning(
                "the chat template rewrites earlier turns; its generation markers say what is trained on",
                extra={"rows": self.num_rows, "rewritten": self._conversations.num_marked},
            )

    def _encode(self, row: Row) -> tuple[list[int], list[bool]]:
        if self._tokenizer.chat_template is not None:
            return self._conversations.encode(conversation_of(row))
        prompt, completion = row.get("prompt"), row.get("completion")
        if not isinstance(prompt, str) or not isinstance(completion, str) or row.get("messages") is not None:
            raise InvalidSpecError(
                [
                    Violation(
                        field=f"{self._key}.name", message="has chat messages, but the tokenizer has no chat template"
                    )
                ],
                remedy="give the tokenizer a chat template, or use text",
            )
        return self._encode_text(prompt, completion)

    def _encode_text(self, prompt: str, completion: str) -> tuple[list[int], list[bool]]:
        """Tokens of the joined text, with what the tokenizer puts before a text, and one stop behind it."""
        tokens = TextTokens(self._tokenizer, prompt + completion)
        bound = tokens.behind_prompt(len(prompt))
        if completion.strip() and bound == len(tokens.token_ids):
            raise BadRowError(
                f"the tokenizer knows nothing of the completion {completion[:40]!r}: it has no token of its own"
            )
        token_ids, mask = tokens.token_ids, self._loss_mask
        stops = self._stops.token_ids
        stop = next((at for at in range(bound, len(token_ids)) if token_ids[at] in stops), None)
        if stop is None and self._tokenizer.eos_token_id is not None:
            stop = len(token_ids)
            token_ids.append(self._tokenizer.eos_token_id)
        if stop is not None and self._tokenizer.decode(token_ids[stop + 1 :], skip_special_tokens=True).strip():
            word = self._tokenizer.decode(token_ids[stop])
            raise BadRowError(
                f"the completion has {word!r}, which ends it, within its text: no engine would go on behind it"
            )
        token_ids = token_ids[: len(token_ids) if stop is None else stop + 1]
        lead = self._lead(prompt + completion)
        trained = [mask.user] * (len(lead) + bound) + [mask.assistant] * (len(token_ids) - bound)
        return lead + token_ids, trained

    def _lead(self, text: str) -> list[int]:
        """What the tokenizer puts before a text that does not begin so itself: often a token that begins every text."""
        token_ids = list(self._tokenizer(text)["input_ids"])
        plain = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        count = next((at for at in range(len(token_ids) + 1) if token_ids[at : at + len(plain)] == plain), 0)
        return [] if plain[:count] == token_ids[:count] else token_ids[:count]

    def _note_bad(self, problem: Violation) -> None:
        """Count a row that cannot be used, and refuse the data if they are many."""
        self.num_bad += 1
        if self._first_bad is None:
            self._first_bad = problem
            logger.warning("a row cannot be used and is left out", extra={"row": problem.source, "why": str(problem)})
        if self.num_rows >= _FEWEST_SEEN:
            self._require_few_bad()

    def _require_few_bad(self) -> None:
        if self._first_bad is not None and self.num_bad > _MOST_BAD * self.num_rows:
            problem = Violation(
                field=self._first_bad.field,
                message=f"{self._first_bad.message} ({self.num_bad} of {self.num_rows} rows cannot be used)",
                source=self._first_bad.source,
            )
            raise InvalidSpecError([problem], remedy=_BAD_REMEDY)

    def _count_from_zero(self) -> None:
        self.num_rows = self.num_cut = self.num_dropped = self.num_bad = self.longest = 0
        self._conversations.num_marked = self._conversations.num_without_tools = self._conversations.num_poor = 0
