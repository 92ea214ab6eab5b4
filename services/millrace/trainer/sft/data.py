"""Prompts and completions for supervised fine-tuning: reading rows, tokenizing them, and their order.

A row has `prompt` and `completion`, both text or both lists of chat messages. Text becomes one user and one assistant
message if the tokenizer has a chat template; without one, prompt and completion are joined and end with the
end-of-sequence token. Only completion tokens count in the loss.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from millrace.config.sections.sft import SFTDataConfig
from millrace.errors import InvalidSpecError, NotFoundError, Violation
from millrace.rollouts.types import TrainSample
from millrace.telemetry import logging

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]


def load_rows(config: SFTDataConfig) -> list[Row]:
    """The rows of a JSONL file, a directory of JSONL files, or a Hub dataset; at least one."""
    path = Path(config.name).expanduser()
    if path.is_dir():
        files = sorted(path.glob("*.jsonl"))
        rows = [row for file in files for row in _read_jsonl(file)]
    elif path.is_file():
        rows = list(_read_jsonl(path))
    elif path.is_absolute() or path.suffix or config.name.count("/") > 1:
        raise _not_found(config.name, f"{path.resolve()} does not exist")
    else:
        rows = _load_hub(config)
    if not rows:
        raise _not_found(config.name, "it holds no rows")
    return rows


def _read_jsonl(path: Path) -> Iterator[Row]:
    """The rows of one file; InvalidSpecError names the line that is wrong."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                _check_row(row)
            except ValueError as error:
                violation = Violation(
                    field="data.name", value=line.strip()[:80], message=str(error), source=f"{path}:{number}"
                )
                raise InvalidSpecError([violation], remedy='write lines like {"prompt": …, "completion": …}') from error
            yield row


def _check_row(row: Any) -> None:
    """ValueError unless the row has a prompt and a completion of one kind."""
    if not isinstance(row, dict):
        raise ValueError("is not a JSON object")
    kinds = {name: type(row.get(name)) for name in ("prompt", "completion")}
    if set(kinds.values()) not in ({str}, {list}):
        raise ValueError("needs `prompt` and `completion`, both text or both lists of messages")


def _load_hub(config: SFTDataConfig) -> list[Row]:
    """The rows of a Hub dataset's split, read with `datasets` if that is installed."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise _not_found(
            config.name, "it is no local file, and a Hub dataset needs the package `datasets`, which is not installed"
        ) from error
    try:
        rows: list[Row] = [dict(row) for row in load_dataset(config.name, split=config.split)]
    except (OSError, ValueError) as error:
        raise _not_found(config.name, f"the Hub did not give split {config.split!r}: {error}") from error
    for number, row in enumerate(rows):
        try:
            _check_row(row)
        except ValueError as error:
            source = f"{config.name}, split {config.split}, row {number}"
            violation = Violation(field="data.name", value=str(row)[:80], message=str(error), source=source)
            raise InvalidSpecError([violation]) from error
    return rows


def _not_found(name: str, problem: str) -> NotFoundError:
    return NotFoundError(
        f"data {name!r} cannot be read: {problem}",
        reason="DATA_NOT_FOUND",
        remedy="set data.name to a JSONL file, a directory of JSONL files, or the id of a Hub dataset",
        metadata={"data": name},
    )


class RowEncoder:
    """Turns rows into samples whose cross-entropy weight is 1 on completion tokens and 0 elsewhere.

    Counts what became of the rows: `num_rows` encoded, `num_dropped` without a completion token left, `num_cut` others
    longer than `seq_len`; `longest` is in tokens, before cutting.
    """

    def __init__(self, tokenizer: Any, *, seq_len: int) -> None:
        self._tokenizer = tokenizer
        self._seq_len = seq_len
        self._has_warned = False
        self._count_from_zero()

    def encode(self, row: Row) -> TrainSample | None:
        """The sample of a row, cut at `seq_len`; None if no completion token is left."""
        prompt_ids, token_ids = self._token_ids(row)
        start = _common_prefix(prompt_ids, token_ids)
        if start < len(prompt_ids) and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the chat template renders prompts differently when a completion follows; the loss begins where the "
                "two renderings part",
                extra={"prompt_tokens": len(prompt_ids), "common": start},
            )
        full_length = len(token_ids)
        self.num_rows += 1
        self.longest = max(self.longest, full_length)
        token_ids = token_ids[: self._seq_len]
        length = len(token_ids)
        weights = np.zeros(length, np.float32)
        weights[max(start, 1) :] = 1.0
        if not weights.any():
            self.num_dropped += 1
            return None
        self.num_cut += length < full_length
        zeros = np.zeros(length, np.float32)
        return TrainSample(
            token_ids=np.array(token_ids, np.int32),
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

    def require_completion(self, rows: Iterable[Row]) -> None:
        """InvalidSpecError unless one of the rows keeps a completion token; reads no further than to the first."""
        if any(self.encode(row) is not None for row in rows):
            self._count_from_zero()
            return
        if self.longest > self._seq_len:
            problem = Violation(
                field="data.seq_len",
                value=str(self._seq_len),
                message=f"leaves no completion token in any of {self.num_rows} rows, so there is nothing to train on; "
                f"the longest row has {self.longest} tokens",
            )
            raise InvalidSpecError([problem], remedy=f"set data.seq_len to {self.longest} to cut no row")
        problem = Violation(field="data.name", message=f"none of {self.num_rows} rows has a completion token")
        raise InvalidSpecError([problem], remedy="give the rows completions")

    def warn_of_losses(self) -> None:
        """Log how many rows were cut or dropped so far, if any were."""
        if self.num_cut or self.num_dropped:
            logger.warning(
                "rows were cut at data.seq_len, or dropped because no completion token was left",
                extra={
                    "rows": self.num_rows,
                    "cut": self.num_cut,
                    "dropped": self.num_dropped,
                    "seq_len": self._seq_len,
                    "longest": self.longest,
                },
            )

    def _count_from_zero(self) -> None:
        self.num_rows = self.num_cut = self.num_dropped = self.longest = 0

    def _token_ids(self, row: Row) -> tuple[list[int], list[int]]:
        """Tokens of the prompt, up to where the policy speaks, and of the whole row, up to its last stop token."""
        prompt, completion = row["prompt"], row["completion"]
        eos: int | None = self._tokenizer.eos_token_id
        if self._tokenizer.chat_template is None:
            if not isinstance(prompt, str):
                raise InvalidSpecError(
                    [Violation(field="data.name", message="has chat messages, but the tokenizer has no chat template")],
                    remedy="give the tokenizer a chat template, or use text",
                )
            prompt_ids = self._tokenizer(prompt)["input_ids"]
            completion_ids = self._tokenizer(completion, add_special_tokens=False)["input_ids"]
            return prompt_ids, prompt_ids + completion_ids + ([] if eos is None else [eos])
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        reply = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else list(completion)
        prompt_ids = self._render(messages, add_generation_prompt=True)
        token_ids = self._render(messages + reply, add_generation_prompt=False)
        if eos is not None and eos in token_ids[len(prompt_ids) :]:
            # Templates end a turn with a line break behind the stop token; the policy never samples that.
            token_ids = token_ids[: len(token_ids) - token_ids[::-1].index(eos)]
        return prompt_ids, token_ids

    def _render(self, messages: list[Any], *, add_generation_prompt: bool) -> list[int]:
        return list(
            self._tokenizer.apply_chat_template(
                messages, tokenize=True, add_generation_prompt=add_generation_prompt, return_dict=False
            )
        )


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many leading tokens are equal."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))


class Order:
    """Which rows each step takes: passes over the data one after the other, a pure function of the step."""

    def __init__(self, num_rows: int, *, batch_size: int, shuffle: bool, seed: int) -> None:
        self._num_rows = num_rows
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed

    @property
    def steps_per_pass(self) -> int:
        """Steps until every row was taken once."""
        return -(-self._num_rows // self._batch_size)

    def first_pass(self, *, max_steps: int) -> Iterator[int]:
        """Row indices that `max_steps` steps take, each once, in the order of the first pass."""
        return (int(index) for index in self._pass(0)[: max_steps * self._batch_size])

    def rows_of(self, step: int) -> list[int]:
        """Row indices of a step; a step may reach into the next pass."""
        first = step * self._batch_size
        positions = range(first, first + self._batch_size)
        passes = {position // self._num_rows for position in positions}
        orders = {number: self._pass(number) for number in passes}
        return [int(orders[position // self._num_rows][position % self._num_rows]) for position in positions]

    def _pass(self, number: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(self._num_rows)
        return np.random.default_rng([self._seed, number]).permutation(self._num_rows)
