"""What a fine-tuning learns from and is validated on: its rows, and which of them each step takes."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from millrace.config.sections.sft import SFTConfig, SFTDataConfig, SFTValDataConfig
from millrace.policies.stops import TurnStops
from millrace.rollouts.types import TrainSample
from millrace.trainer.sft.encoder import RowEncoder
from millrace.trainer.sft.rows import Source, digest_rows, joined, load_sources


class FineTuningData:
    """The rows that are trained on, and what each step takes of them."""

    def __init__(self, config: SFTConfig, tokenizer: object, *, stops: TurnStops) -> None:
        data = config.data
        sources = load_sources(data)
        mixed = _mixed(sources, data)
        self._sizes = [len(source.rows) for source in sources]
        self.train = joined(sources)
        self._val = None if config.val is None else config.val.data
        self._validated = [] if self._val is None else load_sources(self._val, key="val.data")
        self._order = Order(mixed, batch_size=data.batch_size, shuffle=data.shuffle, seed=data.seed)
        self._is_full = data.pack_function == "cat"
        self._max_steps = config.max_steps
        self._tokenizer, self._stops, self._data = tokenizer, stops, data
        self._encoder = self._new_encoder(data, key="data")
        self._take = (
            partial(take_full, count=data.batch_size, seq_len=data.seq_len)
            if self._is_full
            else partial(take_rows, count=data.batch_size)
        )
        taken = self._order.first_pass(max_steps=None if self._is_full else config.max_steps)
        self._encoder.require_completion((self.train.rows[index], self.train.place(index)) for index in taken)

    @property
    def identity(self) -> dict[str, Any]:
        """What training on other data than these rows, under this template, would differ in."""
        template = getattr(self._tokenizer, "chat_template", None)
        return {
            "the rows of each source": self._sizes,
            "the SHA-256 of the rows": digest_rows(self.train.rows),
            "the SHA-256 of the chat template": hashlib.sha256(json.dumps(template).encode()).hexdigest(),
        }

    @property
    def num_steps(self) -> int | None:
        """Steps of the run: `max_steps`, or those of one pass; None if that is known only when it is over."""
        return self._max_steps or (None if self._is_full else self._order.steps_per_pass)

    def expect_steps(self, step: int, following: int) -> int:
        """Steps of the run; where they are not known, as many as at the pace of those up to `step`."""
        return self.num_steps or max(round(self._order.rows_per_pass * (step + 1) / following), step + 1)

    def is_over(self, step: int, position: int) -> bool:
        """Return whether all steps were made, or, if no number was asked for, one pass over the rows."""
        return position >= self._order.rows_per_pass if self._max_steps is None else step >= self._max_steps

    def take(self, position: int) -> tuple[list[TrainSample], int]:
        """Return the samples of the step that begins at a position, and the position behind it."""
        return self._take(self._order, self._encode, position)

    def validation_samples(self) -> list[TrainSample]:
        """Return the samples of the validation set, each row once or mixed; InvalidSpecError if there are none."""
        assert self._val is not None
        rows, encoder = joined(self._validated), self._new_encoder(self._val, key="val.data")
        encoder.require_completion((row, rows.place(index)) for index, row in enumerate(rows.rows))
        taken = _mixed(self._validated, self._val) if self._val.is_mixed else range(len(rows.rows))
        samples = [encoder.encode(rows.rows[index], place=rows.place(index)) for index in taken]
        encoder.warn_of_losses()
        return [sample for sample in samples if sample is not None]

    def warn_of_losses(self, position: int, following: int, *, is_first: bool) -> None:
        """Log what became of the rows, early and when every one was seen."""
        if is_first or position < self._order.rows_per_pass <= following:
            self._encoder.warn_of_losses()

    def _new_encoder(self, data: SFTDataConfig | SFTValDataConfig, *, key: str) -> RowEncoder:
        loss_mask = data.loss_mask or self._data.loss_mask
        return RowEncoder(self._tokenizer, seq_len=data.seq_len, loss_mask=loss_mask, stops=self._stops, key=key)

    def _encode(self, index: int) -> TrainSample | None:
        return self._encoder.encode(self.train.rows[index], place=self.train.place(index))


def _mixed(sources: Sequence[Source], data: SFTDataConfig | SFTValDataConfig) -> np.ndarray:
    """Return the rows of one pass over sources, as indices into all rows."""
    return mix(
        [len(source.rows) for source in sources],
        probabilities=data.probabilities,
        stop_at_first=data.stopping_strategy == "first_exhausted",
        seed=data.seed,
    )


# Which rows each step takes: a pure function of the data, the config and a position in the passes over the rows.


def mix(sizes: Sequence[int], *, probabilities: Sequence[float] | None, stop_at_first: bool, seed: int) -> np.ndarray:
    """The rows of one pass over several sources, as indices into the sources one after the other.

    Sources take turns, or are drawn with their probabilities, until the rows of the first one, or of all of them, were
    taken; a source whose rows were all taken begins again. One source is taken once, in order.
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
    return np.tile(np.arange(len(sizes)), min(sizes) if stop_at_first else max(sizes))


def _draws(sizes: Sequence[int], probabilities: Sequence[float], stop_at_first: bool, seed: int) -> np.ndarray:
    """Sources drawn until the first one, or the last one, has given all its rows."""
    rng = np.random.default_rng([seed, len(sizes)])
    shares = np.array(probabilities) / sum(probabilities)
    drawn = np.empty(0, np.int64)
    while True:
        drawn = np.concatenate([drawn, rng.choice(len(sizes), size=sum(sizes), p=shares)])
        given = [np.flatnonzero(drawn == source) for source in range(len(sizes))]
        ends = [int(at[size - 1]) + 1 for at, size in zip(given, sizes, strict=True) if len(at) >= size]
        if ends and (stop_at_first or len(ends) == len(sizes)):
            return drawn[: min(ends) if stop_at_first else max(ends)]


class Order:
    """Passes over the rows one after the other, each in an order of its own if they are shuffled."""

    def __init__(self, rows: int | Sequence[int] | np.ndarray, *, batch_size: int, shuffle: bool, seed: int) -> None:
        """`rows` is their number, or the row indices of a pass."""
        self._rows = np.arange(rows) if isinstance(rows, int) else np.asarray(rows)
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._pass = lru_cache(maxsize=2)(self._make_pass)

    @property
    def rows_per_pass(self) -> int:
        """Rows of one pass."""
        return len(self._rows)

    @property
    def steps_per_pass(self) -> int:
        """Steps of `batch_size` rows until every row was taken once."""
        return -(-len(self._rows) // self._batch_size)

    def row_at(self, position: int) -> int:
        """The row at a position, counted over all passes."""
        number, place = divmod(position, len(self._rows))
        return int(self._pass(number)[place])

    def first_pass(self, *, max_steps: int | None) -> Iterator[int]:
        """Row indices of the first pass in order, as far as `max_steps` steps of `batch_size` rows reach."""
        end = None if max_steps is None else max_steps * self._batch_size
        return (int(index) for index in self._pass(0)[:end])

    def rows_of(self, step: int) -> list[int]:
        """Row indices of a step of `batch_size` rows; it may reach into the next pass."""
        first = step * self._batch_size
        return [self.row_at(position) for position in range(first, first + self._batch_size)]

    def _make_pass(self, number: int) -> np.ndarray:
        if not self._shuffle:
            return self._rows
        return self._rows[np.random.default_rng([self._seed, number]).permutation(len(self._rows))]


Encode = Callable[[int], TrainSample | None]
"""The sample of a row index, if it has one."""


def take_rows(order: Order, encode: Encode, position: int, *, count: int) -> tuple[list[TrainSample], int]:
    """The samples of `count` rows from a position on, and the position behind them.

    Where none of the rows has a sample, the next `count` are taken, so that a step learns from something. At least one
    row of a pass has a sample.
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
    """As many samples from a position on as fit whole into `count` rows of `seq_len` tokens, and the position behind.

    Each goes into the first row that has room; the first sample that fits into none begins the next step.
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
