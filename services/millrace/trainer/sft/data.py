"""What a fine-tuning learns from and is validated on: its rows, and which of them each step takes."""

import hashlib
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from millrace.config.sections.sft import SFTConfig, SFTDataConfig, SFTValDataConfig
from millrace.policies.stops import TurnStops
from millrace.rollouts.types import TrainSample
from millrace.trainer.sft.encoder import RowEncoder
from millrace.trainer.sft.order import Order, mix, take_full, take_rows
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
