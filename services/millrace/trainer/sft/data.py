"""The data of a fine-tuning and its validation: rows, their samples, and which rows each step takes."""

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from millrace.config.sections.data import DatasetConfig, LossMaskConfig
from millrace.config.sections.sft import SFTConfig, SFTDataConfig, SFTValDataConfig
from millrace.config.sections.trainer import TrainerConfig
from millrace.errors import InvalidSpecError, Violation
from millrace.models.vocabulary import require_tokenizer
from millrace.policies.stops import TurnStops, turn_stops
from millrace.rollouts.types import TrainSample
from millrace.trainer.gang.agreement import agreed
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.model.pretrained import resolve_model_directory
from millrace.trainer.sft.conversation import ConversationEncoder
from millrace.trainer.sft.rendering import BadRowError, TextTokens
from millrace.trainer.sft.rows import (
    Row,
    Source,
    conversation_of,
    digest_rows,
    joined,
    load_sources,
    num_prompt_messages,
    sample_of,
    sides_of,
)

# Rows as samples: tokens, and a cross-entropy weight of 1 on those that are trained on.
#
# Without a chat template, rows are text: prompt and completion are joined and end with the end-of-sequence token.

logger = logging.getLogger(__name__)

KEY = "trainer.dataset"

_LOOKED_AT = 256  # rows that are encoded before the first step, to find mistakes
_MOST_BAD = 0.1  # share of the rows seen that may be left out because they cannot be encoded
_FEWEST_SEEN = 10  # rows, before a share is judged
_BAD_REMEDY = (
    "fix the row; where the template does not write all of it, take that out or use one that does; where it rewrites "
    "earlier turns, use one with `{% generation %}` markers, or make one row of each assistant turn"
)


class RowEncoder:
    """Turns rows into samples, and counts them.

    `num_rows` were seen, `num_dropped` have no trained token left, `num_cut` of the others are longer than `seq_len`,
    `num_bad` could not be encoded; `longest` is the most tokens of a row, before cutting.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        seq_len: int,
        loss_mask: LossMaskConfig | None = None,
        stops: TurnStops | None = None,
        key: str = "data",
        length_key: str | None = None,
    ) -> None:
        """Take a tokenizer with its chat template, and `stops`, by default those that the tokenizer knows.

        Samples are cut at `seq_len` tokens; `loss_mask` says which roles are trained on. `key` is the config's table of
        the rows, and `length_key` the key of `seq_len`; both are for messages.
        """
        self._key = key
        self._length_key = length_key or f"{key}.seq_len"
        self._tokenizer = tokenizer
        self._stops = stops or turn_stops(tokenizer)
        self._seq_len = seq_len
        self._loss_mask = loss_mask or LossMaskConfig()
        self._conversations = ConversationEncoder(tokenizer, self._loss_mask, stops=self._stops)
        self._first_bad: Violation | None = None
        self._count_from_zero()

    def encode(self, row: Row, *, place: str = "") -> TrainSample | None:
        """Encode a row as a sample, cut at `seq_len`; of a preference pair the sample with the chosen response.

        Return None if no trained token is left or the row cannot be used. Counts and raises as `encode_whole`.
        """
        samples = self.encode_whole(row, place=place)
        return None if samples is None else samples[0]

    def encode_whole(self, row: Row, *, place: str = "") -> list[TrainSample] | None:
        """Encode a row as its sample, or a preference pair as its two, chosen and rejected; each is cut at `seq_len`.

        Return None if one has no trained token left or the row cannot be used. Counts the row, and logs the first
        unusable one. Raises InvalidSpecError once more than a tenth of the rows seen are unusable. `place` is the row's
        place in its file, for messages.
        """
        self.num_rows += 1
        try:
            if "chosen" in row:
                encoded = [self._encode(side, is_response=True) for side in sides_of(row)]
            else:
                encoded = [self._encode(row)]
        except BadRowError as error:
            self._note_bad(Violation(field=f"{self._key}.name", message=str(error), source=place or None))
            return None
        if self._conversations.lost and self._conversations.num_poor == 1:
            what = {"row": place, "lost": self._conversations.lost}
            logger.warning("the chat template leaves out context of a row", extra=what)
        # Nothing is learned from tokens after the last trained one.
        ends = [max((at + 1 for at, flag in enumerate(trained) if flag), default=0) for _, trained in encoded]
        self.longest = max(self.longest, *ends)
        samples = [sample_of(*each, length=min(end, self._seq_len)) for each, end in zip(encoded, ends, strict=True)]
        if not all(sample.ce_weights is not None and sample.ce_weights.any() for sample in samples):
            self.num_dropped += 1
            return None
        self.num_cut += any(end > self._seq_len for end in ends)
        return samples

    def require_completion(self, rows: Iterable[tuple[Row, str]]) -> None:
        """Raise InvalidSpecError unless one of the rows keeps a trained token and few rows are unusable.

        `rows` are (row, place). Encodes `_LOOKED_AT` of them, and more only up to the first one that keeps a token.
        Resets the counts.
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
                field=self._length_key,
                value=str(self._seq_len),
                message=f"leaves no completion token in any of {self.num_rows} rows, so there is nothing to train on; "
                f"the longest row has {self.longest} tokens",
            )
            raise InvalidSpecError([problem], remedy=f"set {self._length_key} to {self.longest} to cut no row")
        problem = Violation(field=f"{self._key}.name", message=f"none of {self.num_rows} rows has a completion token")
        raise InvalidSpecError(
            [problem], remedy=f"give the rows completions, or train on other roles ({self._key}.loss_mask)"
        )

    def warn_of_losses(self) -> None:
        """Log a warning for each kind of loss of rows so far: cut, dropped, unusable, or changed by the template."""
        if self.num_cut or self.num_dropped:
            logger.warning(
                f"rows were cut at {self._length_key}, or dropped because no completion token was left",
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

    def _encode(self, row: Row, *, is_response: bool = False) -> tuple[list[int], list[bool]]:
        """Return the row's token ids, and which are trained on; raise BadRowError if it cannot be used.

        With `is_response` the row has a `prompt`, of which no message is trained on. Raises InvalidSpecError if the row
        has messages and the tokenizer no chat template.
        """
        if self._tokenizer.chat_template is not None:
            num_prompt = num_prompt_messages(row) if is_response else 0
            return self._conversations.encode(conversation_of(row), num_prompt=num_prompt)
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
        """Return the token ids of prompt and completion joined, and which are trained on.

        They begin with the tokenizer's first tokens, and end with one stop. Raises BadRowError if the completion has no
        token of its own, or a stop within its text.
        """
        tokens = TextTokens(self._tokenizer, prompt + completion)
        bound = tokens.begin_with_prompt(len(prompt))
        if completion.strip() and bound == len(tokens.token_ids):
            raise BadRowError(
                f"the tokenizer knows nothing of the completion {completion[:40]!r}: it has no token of its own"
            )
        token_ids, mask = tokens.token_ids, self._loss_mask
        stops = self._stops.token_ids
        stop = next((at for at in range(bound, len(token_ids)) if token_ids[at] in stops), None)
        # A text does not end by itself, and the policy has to learn to end.
        if stop is None and self._tokenizer.eos_token_id is not None:
            stop = len(token_ids)
            token_ids.append(self._tokenizer.eos_token_id)
        if stop is not None and self._tokenizer.decode(token_ids[stop + 1 :], skip_special_tokens=True).strip():
            word = self._tokenizer.decode(token_ids[stop])
            raise BadRowError(
                f"the completion has {word!r}, which ends it, within its text: no engine would continue after it"
            )
        token_ids = token_ids[: len(token_ids) if stop is None else stop + 1]
        lead = self._lead(prompt + completion)
        trained = [mask.user] * (len(lead) + bound) + [mask.assistant] * (len(token_ids) - bound)
        return lead + token_ids, trained

    def _lead(self, text: str) -> list[int]:
        """Return the special tokens that the tokenizer puts before `text`, often one that begins every text."""
        token_ids = list(self._tokenizer(text)["input_ids"])
        plain = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        # The plain tokens begin after the special ones that were put before them.
        count = next((at for at in range(len(token_ids) + 1) if token_ids[at : at + len(plain)] == plain), 0)
        return [] if plain[:count] == token_ids[:count] else token_ids[:count]

    def _note_bad(self, problem: Violation) -> None:
        """Count a row that cannot be used, log the first one, and raise InvalidSpecError if there are too many."""
        self.num_bad += 1
        if self._first_bad is None:
            self._first_bad = problem
            logger.warning("a row cannot be used and is left out", extra={"row": problem.source, "why": str(problem)})
        if self.num_rows >= _FEWEST_SEEN:
            self._require_few_bad()

    def _require_few_bad(self) -> None:
        """Raise InvalidSpecError if more than a tenth of the rows seen cannot be used."""
        if self._first_bad is not None and self.num_bad > _MOST_BAD * self.num_rows:
            problem = Violation(
                field=self._first_bad.field,
                message=f"{self._first_bad.message} ({self.num_bad} of {self.num_rows} rows cannot be used)",
                source=self._first_bad.source,
            )
            raise InvalidSpecError([problem], remedy=_BAD_REMEDY)

    def _count_from_zero(self) -> None:
        """Reset the counts of rows."""
        self.num_rows = self.num_cut = self.num_dropped = self.num_bad = self.longest = 0
        self._conversations.num_marked = self._conversations.num_without_tools = self._conversations.num_poor = 0


class FineTuningData:
    """The rows that are trained on, and the samples of each step."""

    def __init__(self, config: SFTConfig, tokenizer: object, *, stops: TurnStops) -> None:
        """Load the rows of training and validation, and encode some; `stops` are the tokens that end a turn.

        Raises InvalidSpecError (DATA_INVALID) if they cannot be trained on, or NotFoundError (DATA_NOT_FOUND).
        """
        data = config.data
        is_paired = config.dpo is not None
        sources = load_sources(data, is_paired=is_paired)
        mixed = _mixed(sources, data)
        self._sizes = [len(source.rows) for source in sources]
        self.train = joined(sources)
        self._val = None if config.val is None else config.val.data
        self._validated = [] if self._val is None else load_sources(self._val, key="val.data", is_paired=is_paired)
        self._order = Order(mixed, batch_size=data.batch_size, shuffle=data.shuffle, seed=data.seed)
        self._is_full = data.pack_function == "cat"
        self._max_steps = config.max_steps
        self._tokenizer, self._stops, self._data = tokenizer, stops, data
        self._encoder = self._new_encoder(data, key="data")
        taken = self._order.first_pass(max_steps=None if self._is_full else config.max_steps)
        self._encoder.require_completion((self.train.rows[index], self.train.place(index)) for index in taken)

    @property
    def identity(self) -> dict[str, Any]:
        """Return sizes and hashes, by words for messages, that identify the rows and the chat template."""
        template = getattr(self._tokenizer, "chat_template", None)
        return {
            "the rows of each source": self._sizes,
            "the SHA-256 of the rows": digest_rows(self.train.rows),
            "the SHA-256 of the chat template": hashlib.sha256(json.dumps(template).encode()).hexdigest(),
        }

    @property
    def num_steps(self) -> int | None:
        """Return the number of optimizer steps: `max_steps`, or those of one pass.

        None if it is known only at the end.
        """
        return self._max_steps or (None if self._is_full else self._order.steps_per_pass)

    def expect_steps(self, step: int, following: int) -> int:
        """Return the number of optimizer steps, estimated if it is unknown.

        `following` is the position in the rows after step `step`.
        """
        return self.num_steps or max(round(self._order.rows_per_pass * (step + 1) / following), step + 1)

    def is_over(self, step: int, position: int) -> bool:
        """Return whether training ends before step `step`, whose rows begin at `position`.

        It ends at `max_steps`, or, without it, after one pass over the rows.
        """
        return position >= self._order.rows_per_pass if self._max_steps is None else step >= self._max_steps

    def take(self, position: int) -> tuple[list[TrainSample], int]:
        """Return the samples of the step whose rows begin at `position`, and the position of the next step's rows.

        Positions count rows over all passes. Of a preference pair the chosen sample is followed by the rejected one.
        """
        if self._is_full:
            count, seq_len = self._data.batch_size, self._data.seq_len
            return take_full(self._order, self._encode, position, count=count, seq_len=seq_len)
        taken, following = take_rows(self._order, self._encode_whole, position, count=self._data.batch_size)
        return [sample for samples in taken for sample in samples], following

    def validation_samples(self) -> list[TrainSample]:
        """Encode the validation set, and return its samples: each row once, or mixed as the config says.

        Call it only if the config has one. Raises InvalidSpecError if no row has a trained token, or too many are
        unusable.
        """
        assert self._val is not None
        rows, encoder = joined(self._validated), self._new_encoder(self._val, key="val.data")
        encoder.require_completion((row, rows.place(index)) for index, row in enumerate(rows.rows))
        taken = _mixed(self._validated, self._val) if self._val.is_mixed else range(len(rows.rows))
        found = [encoder.encode_whole(rows.rows[index], place=rows.place(index)) for index in taken]
        encoder.warn_of_losses()
        return [sample for samples in found if samples is not None for sample in samples]

    def warn_of_losses(self, position: int, following: int, *, is_first: bool) -> None:
        """Log how many rows were cut or left out so far, if this is the first step or the one that ends the first pass.

        The step takes the rows from `position` to `following`.
        """
        if is_first or position < self._order.rows_per_pass <= following:
            self._encoder.warn_of_losses()

    def _new_encoder(self, data: SFTDataConfig | SFTValDataConfig, *, key: str) -> RowEncoder:
        """Make an encoder for the rows of a table of the config; `key` is the table's name."""
        loss_mask = data.loss_mask or self._data.loss_mask
        return RowEncoder(self._tokenizer, seq_len=data.seq_len, loss_mask=loss_mask, stops=self._stops, key=key)

    def _encode(self, index: int) -> TrainSample | None:
        """Encode the training row with this index; None if it has no trained token or cannot be used."""
        return self._encoder.encode(self.train.rows[index], place=self.train.place(index))

    def _encode_whole(self, index: int) -> list[TrainSample] | None:
        """Encode the training row with this index as its samples; None if it has no trained token or is unusable."""
        return self._encoder.encode_whole(self.train.rows[index], place=self.train.place(index))


class DatasetRows:
    """The rows of a dataset that the steps of an RL run learn in addition to rollouts (`[trainer.dataset]`).

    Which rows a step has is a pure function of the step, the config and the rows.
    """

    def __init__(self, config: DatasetConfig, tokenizer: object, *, seq_len: int, stops: TurnStops) -> None:
        """Load the rows that steps learn beside rollouts, and encode some; `seq_len` is the longest sample in tokens.

        `stops` are the tokens that end a turn. Raises InvalidSpecError (DATA_INVALID) if they cannot be learned, or
        NotFoundError (DATA_NOT_FOUND).
        """
        sources = load_sources(config, key=KEY)
        self._rows = joined(sources)
        self._order = Order(
            _mixed(sources, config), batch_size=config.rows_per_step, shuffle=config.shuffle, seed=config.seed
        )
        self._encoder = RowEncoder(
            tokenizer,
            seq_len=seq_len,
            loss_mask=config.loss_mask,
            stops=stops,
            key=KEY,
            length_key="trainer.model.seq_len",
        )
        self._weight = np.float32(config.weight)
        self._is_reported = False
        taken = self._order.first_pass(max_steps=None)
        self._encoder.require_completion((self._rows.rows[index], self._rows.place(index)) for index in taken)
        parts = [digest_rows(self._rows.rows), getattr(tokenizer, "chat_template", None)]
        self.digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        """SHA-256 (hex) of the rows, in order, and of the chat template."""

    def samples(self, step: int) -> list[TrainSample]:
        """Return the samples of the rows of step `step` (from 0), without rows that have no trained token.

        Log losses once a pass. Raises InvalidSpecError (DATA_INVALID) once more than a tenth of the rows seen cannot be
        encoded.
        """
        rows = self._order.rows_of(step)
        found = [self._encoder.encode(self._rows.rows[row], place=self._rows.place(row)) for row in rows]
        if not self._is_reported or step % max(self._order.steps_per_pass, 1) == 0:
            self._is_reported = True
            self._encoder.warn_of_losses()
        return [
            replace(each, ce_weights=each.ce_weights * self._weight)
            for each in found
            if each is not None and each.ce_weights is not None
        ]


def open_dataset(config: TrainerConfig, directory: Path, *, gang: Gang) -> DatasetRows | None:
    """Load the rows of `[trainer.dataset]` for the model in `directory`; None if the config has none. Collective.

    Raises what `DatasetRows` raises, and InvalidSpecError if ranks have different rows.
    """
    if config.dataset is None:
        return None
    with agreed(gang):
        name = config.tokenizer.name
        source = directory if name is None else resolve_model_directory(name)
        tokenizer = require_tokenizer(source, model=directory, needs_template=False)  # rows of text need none
        stops = turn_stops(tokenizer, directory)
        dataset = DatasetRows(config.dataset, tokenizer, seq_len=config.model.seq_len, stops=stops)
    require_one_dataset(dataset, gang=gang)
    return dataset


def require_one_dataset(dataset: DatasetRows, *, gang: Gang) -> None:
    """Raise InvalidSpecError at every rank unless all have the same digest. Collective in a gang.

    Ranks that plan with different rows would wait for each other for ever.
    """
    digests = gang.agree(lambda: dataset.digest)
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        message = f"holds other rows, or the tokenizer another chat template, at the ranks {others} than at rank 0"
        raise InvalidSpecError(
            [Violation(field="trainer.dataset.name", message=message)],
            reason="DATA_INVALID",
            remedy="give every machine of the trainer the same files",
        )


def _mixed(sources: Sequence[Source], data: SFTDataConfig | SFTValDataConfig | DatasetConfig) -> np.ndarray:
    """Return the rows of one pass over sources, as indices into all rows, mixed as the data config says (see `mix`).

    Without probabilities sources take turns; a single one is taken in order.
    """
    return mix(
        [len(source.rows) for source in sources],
        probabilities=data.probabilities,
        stop_at_first=data.stopping_strategy == "first_exhausted",
        seed=data.seed,
    )


# Which rows each step takes: a pure function of the data, the config and a position in the passes over the rows.


def mix(sizes: Sequence[int], *, probabilities: Sequence[float] | None, stop_at_first: bool, seed: int) -> np.ndarray:
    """Return the rows of one pass over several sources of `sizes` rows, as indices into the concatenated sources.

    Sources take turns, or are drawn with `probabilities` (by `seed`), until all rows of one source (`stop_at_first`) or
    of every source were taken; a source whose rows were all taken begins again. A single source is taken once, in
    order.
    """
    if len(sizes) == 1:
        return np.arange(sizes[0])
    sources = (
        _turns(sizes, stop_at_first) if probabilities is None else _draws(sizes, probabilities, stop_at_first, seed)
    )
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    mixed = np.empty(len(sources), np.int64)
    for source, size in enumerate(sizes):
        places = np.flatnonzero(sources == source)
        mixed[places] = starts[source] + np.arange(len(places)) % size
    return mixed


def _turns(sizes: Sequence[int], stop_at_first: bool) -> np.ndarray:
    """Return the source of each row of a pass in which sources of `sizes` rows take turns, till one or all end."""
    return np.tile(np.arange(len(sizes)), min(sizes) if stop_at_first else max(sizes))


def _draws(sizes: Sequence[int], probabilities: Sequence[float], stop_at_first: bool, seed: int) -> np.ndarray:
    """Return the source of each row, drawn until the first source, or the last one, has given all its `sizes` rows."""
    rng = np.random.default_rng([seed, len(sizes)])
    shares = np.array(probabilities) / sum(probabilities)
    drawn = np.empty(0, np.int64)
    while True:
        # In blocks from one generator, so that a pass depends on the seed and the sizes only.
        drawn = np.concatenate([drawn, rng.choice(len(sizes), size=sum(sizes), p=shares)])
        given = [np.flatnonzero(drawn == source) for source in range(len(sizes))]
        ends = [int(at[size - 1]) + 1 for at, size in zip(given, sizes, strict=True) if len(at) >= size]
        if ends and (stop_at_first or len(ends) == len(sizes)):
            return drawn[: min(ends) if stop_at_first else max(ends)]


class Order:
    """Successive passes over the rows, each in a different order if they are shuffled."""

    def __init__(self, rows: int | Sequence[int] | np.ndarray, *, batch_size: int, shuffle: bool, seed: int) -> None:
        """Take `rows`: the number of rows, or the row indices of a pass in order. A step takes `batch_size` rows."""
        self._rows = np.arange(rows) if isinstance(rows, int) else np.asarray(rows)
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        # Two, because a step may reach from one pass into the next.
        self._pass = lru_cache(maxsize=2)(self._make_pass)

    @property
    def rows_per_pass(self) -> int:
        """Return the number of rows of one pass."""
        return len(self._rows)

    @property
    def steps_per_pass(self) -> int:
        """Return the number of steps of `batch_size` rows until every row was taken once."""
        return -(-len(self._rows) // self._batch_size)

    def row_at(self, position: int) -> int:
        """Return the index of the row at a position, which counts rows over all passes."""
        number, place = divmod(position, len(self._rows))
        return int(self._pass(number)[place])

    def first_pass(self, *, max_steps: int | None) -> Iterator[int]:
        """Yield the row indices of the first pass in order, at most those of `max_steps` steps; None: all."""
        end = None if max_steps is None else max_steps * self._batch_size
        return (int(index) for index in self._pass(0)[:end])

    def rows_of(self, step: int) -> list[int]:
        """Return the row indices of step `step` (from 0), which may reach into the next pass."""
        first = step * self._batch_size
        return [self.row_at(position) for position in range(first, first + self._batch_size)]

    def _make_pass(self, number: int) -> np.ndarray:
        """Return the row indices of pass `number` in order."""
        if not self._shuffle:
            return self._rows
        return self._rows[np.random.default_rng([self._seed, number]).permutation(len(self._rows))]


Encode = Callable[[int], TrainSample | None]
"""The sample of a row index, if it has one."""


Item = TypeVar("Item")


def take_rows(
    order: Order, encode: Callable[[int], Item | None], position: int, *, count: int
) -> tuple[list[Item], int]:
    """Return the samples of `count` rows from `position` on, and the position after them.

    `encode` returns what a row index has, a sample for example, or None. If none of these rows has one, the next
    `count` rows are taken, for one pass at most.
    """
    end = position + order.rows_per_pass
    while True:
        rows = [order.row_at(at) for at in range(position, position + count)]
        samples = [sample for row in rows if (sample := encode(row)) is not None]
        position += count
        if samples or position >= end:
            return samples, position


def take_full(
    order: Order, encode: Encode, position: int, *, count: int, seq_len: int
) -> tuple[list[TrainSample], int]:
    """Return as many samples from `position` on as fit into `count` rows of `seq_len` tokens, and the position after.

    `encode` returns the sample of a row index, or None. Each sample goes into the first row that has room; the first
    one that fits into none begins the next step.
    """
    room = np.full(count, seq_len)
    samples: list[TrainSample] = []
    end = position + max(order.rows_per_pass, count * seq_len)  # more rows than can fit: rows without a sample end it
    while position < end:
        sample = encode(order.row_at(position))
        if sample is not None:
            fits = np.flatnonzero(room >= sample.num_tokens)
            if not len(fits):
                break
            room[fits[0]] -= sample.num_tokens
            samples.append(sample)
        position += 1
    return samples, position
