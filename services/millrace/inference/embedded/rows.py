"""The running requests of the embedded engine as columns, a row per request, and their KV cache.

A step is a few array operations. Rows 0..count-1 are in use, in the order of the KV cache's rows. All of this belongs
to the engine's thread.
"""

from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers.cache_utils import Cache

from millrace.inference.engine import FinishReason, GenerateRequest, Generation, PolicyIdentity
from millrace.rollouts.types import PolicySpan, RoutedArray

_NO_TOKEN = -1


@dataclass(slots=True, kw_only=True)
class Running:
    """A request of the embedded engine from its arrival to its end.

    `seed` is drawn if the caller gave none. `limit` is the most tokens, prompt included. `adapter` is the adapter that
    generates, which may become a newer version of the request's. Either `deliver` is called
    with the result or `refuse` with the error, once; `marks` are the positions in the completion where a policy version
    begins to generate.
    """

    request: GenerateRequest
    seed: int
    limit: int
    deliver: Callable[[Generation], None]
    refuse: Callable[[Exception], None]
    adapter: PolicyIdentity | None = None
    is_finished: bool = False
    marks: list[tuple[PolicyIdentity, int]] = field(default_factory=list)

    def mark(self, identity: PolicyIdentity, position: int) -> None:
        """Record that the policy `identity` generates from index `position` of the completion on.

        The record replaces an earlier one of the same position, and is left out if the policy generates already.
        """
        if self.marks and self.marks[-1][1] == position:
            self.marks.pop()
        if not self.marks or self.marks[-1][0] != identity:
            self.marks.append((identity, position))

    def spans(self, end: int) -> tuple[PolicySpan, ...]:
        """Return which policy generated which tokens of a completion of `end` tokens; () if the request never ran."""
        if not self.marks:
            return ()  # it never ran
        ends = [*(start for _, start in self.marks[1:]), end]
        return tuple(
            PolicySpan(lineage=identity.lineage, version=identity.version, start=start, end=stop)
            for (identity, start), stop in zip(self.marks, ends, strict=True)
            if start < stop
        )

    def finish(
        self,
        reason: FinishReason,
        *,
        tokens: np.ndarray | None = None,
        logprobs: np.ndarray | None = None,
        stop_reason: int | str | None = None,
        routed_experts: RoutedArray | None = None,
    ) -> None:
        """Deliver the result of the request: `tokens` [T] and `logprobs` [T], or an empty completion without them.

        `stop_reason` is the stop token or stop string that ended it, and `routed_experts` are those of all tokens but
        the last, if they are recorded. Does nothing if the request has ended already.
        """
        if self.is_finished:
            return
        ids = np.zeros(0, np.int32) if tokens is None else tokens.astype(np.int32)
        self.deliver(
            Generation(
                token_ids=ids,
                logprobs=np.zeros(0, np.float32) if logprobs is None else logprobs.copy(),
                policy_spans=self.spans(len(ids)),
                finish_reason=reason,
                stop_reason=stop_reason,
                routed_experts=None if routed_experts is None else routed_experts.copy(),
            )
        )
        self.is_finished = True

    def fail(self, error: Exception) -> None:
        """Deliver an error in place of the request's result. Does nothing if the request has ended already."""
        if not self.is_finished:
            self.is_finished = True
            self.refuse(error)


class RowTable:
    """The running requests as columns, a row per request.

    `tokens` int64 [rows, length] has prompt and completion, `logprobs` float32 those of the completion's tokens.
    `experts` [rows, length, layers, top_k] has the experts of each token that was computed, if they are recorded.
    """

    def __init__(self, experts: np.ndarray | None = None) -> None:
        """Make a table without rows; columns grow as requests are added.

        `experts` is an empty array of the form of the column of experts; None: they are not recorded.
        """
        self.count = 0
        self.running: list[Running] = []
        self.tokens = np.zeros((0, 0), np.int64)
        self.logprobs = np.zeros((0, 0), np.float32)
        self.length = np.zeros(0, np.int64)
        self.prompt_length = np.zeros(0, np.int64)
        self.limit = np.zeros(0, np.int64)
        self.temperature = np.zeros(0, np.float32)
        self.top_p = np.zeros(0, np.float32)
        self.top_k = np.zeros(0, np.int32)
        self.min_p = np.zeros(0, np.float32)
        self.seed = np.zeros(0, np.uint64)
        self.stop_ids = np.zeros((0, 1), np.int64)
        self.has_stop_strings = np.zeros(0, np.bool_)
        self.has_penalties = np.zeros(0, np.bool_)
        self.experts = np.zeros((0, 0, 0, 0), np.uint8) if experts is None else experts

    def add(self, entries: Sequence[Running], eos_token_ids: Sequence[int]) -> slice:
        """Append a row for each request and return the rows as a slice.

        The requests also stop at `eos_token_ids`, unless they ignore those. An error leaves the table as it was.
        """
        first, count = self.count, self.count + len(entries)
        stops = [
            tuple(
                dict.fromkeys(
                    (*e.request.sampling.stop_token_ids, *(() if e.request.sampling.ignore_eos else eos_token_ids))
                )
            )
            for e in entries
        ]
        self._reserve(count, max(e.limit for e in entries), max(map(len, stops)))
        for row, (entry, stop) in enumerate(zip(entries, stops, strict=True), start=first):
            prompt, sampling = entry.request.prompt_token_ids, entry.request.sampling
            self.tokens[row, : len(prompt)] = prompt
            self.length[row] = self.prompt_length[row] = len(prompt)
            self.limit[row] = entry.limit
            self.temperature[row] = sampling.temperature
            self.top_p[row] = sampling.top_p
            self.top_k[row] = sampling.top_k
            self.min_p[row] = sampling.min_p
            self.seed[row] = entry.seed
            self.stop_ids[row] = _NO_TOKEN
            self.stop_ids[row, : len(stop)] = stop
            self.has_stop_strings[row] = bool(sampling.stop)
            self.has_penalties[row] = sampling.has_penalties
        self.running.extend(entries)
        self.count = count  # only now: rows beyond the count are nobody's, so a half-written one is harmless
        return slice(first, count)

    def append(self, rows: slice, tokens: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
        """Append one sampled token with its log-prob to each of the rows; `tokens` and `logprobs` are [rows].

        Returns bool [rows], true where the row ends: by a stop token, its limit or a log-prob that is not finite.
        """
        length = self.length[rows]
        index = np.arange(rows.start, rows.stop)
        self.tokens[index, length] = tokens
        self.logprobs[index, length] = logprobs
        self.length[rows] += 1
        ends = (tokens[:, None] == self.stop_ids[rows]).any(axis=1)
        ends |= self.length[rows] >= self.limit[rows]
        ends |= ~np.isfinite(logprobs)
        return ends

    def prompt(self, row: int) -> np.ndarray:
        """Return the row's prompt tokens, int64; a view."""
        return self.tokens[row, : self.prompt_length[row]]

    def completion(self, row: int) -> np.ndarray:
        """Return the row's tokens sampled so far, int64; a view."""
        return self.tokens[row, self.prompt_length[row] : self.length[row]]

    def completion_logprobs(self, row: int) -> np.ndarray:
        """Return the log-probs of the row's sampled tokens, float32; a view."""
        return self.logprobs[row, self.prompt_length[row] : self.length[row]]

    def routed_experts(self, row: int) -> RoutedArray | None:
        """Return the experts of the row's tokens but the last, a view; None if they are not recorded."""
        return self.experts[row, : self.length[row] - 1] if self.experts.shape[2] else None

    def remove(self, rows: Sequence[int]) -> tuple[list[int], list[int]]:
        """Remove rows and move the last rows into the holes.

        Returns (sources, targets), the moves, for the caller to repeat in other tables.
        """
        gone = set(rows)
        count = self.count - len(gone)
        targets = sorted(row for row in gone if row < count)
        # Rows from the end move into the holes, so that only as many rows move as were dropped.
        sources = [row for row in range(count, self.count) if row not in gone]
        for column in self.columns():
            column[targets] = column[sources]
        for source, target in zip(sources, targets, strict=True):
            self.running[target] = self.running[source]
        del self.running[count:]
        self.count = count
        return sources, targets

    def find(self, request_id: str) -> int | None:
        """Return the row of the request with that id; None if it does not run."""
        return next((row for row, entry in enumerate(self.running) if entry.request.request_id == request_id), None)

    def columns(self) -> tuple[np.ndarray, ...]:
        """Return all columns of the table, always in the same order."""
        return (
            self.tokens,
            self.logprobs,
            self.length,
            self.prompt_length,
            self.limit,
            self.temperature,
            self.top_p,
            self.top_k,
            self.min_p,
            self.seed,
            self.stop_ids,
            self.has_stop_strings,
            self.has_penalties,
            self.experts,
        )

    def _reserve(self, rows: int, length: int, stops: int) -> None:
        """Grow the columns, all or none of them, to at least this many rows, tokens per row, and stop ids per row.

        Contents stay, and new stop ids match no token.
        """
        have_rows, have_length = self.tokens.shape
        have_stops = self.stop_ids.shape[1]
        if rows <= have_rows and length <= have_length and stops <= have_stops:
            return
        rows = have_rows if rows <= have_rows else max(rows, 2 * have_rows, 8)
        length, stops = max(length, have_length), max(stops, have_stops)
        grown = {
            "tokens": grow_column(self.tokens, (rows, length)),
            "logprobs": grow_column(self.logprobs, (rows, length)),
            "experts": grow_column(self.experts, (rows, length, *self.experts.shape[2:])),
            "stop_ids": grow_column(self.stop_ids, (rows, stops), fill=_NO_TOKEN),
        }
        scalars = ("length", "prompt_length", "limit", "temperature", "top_p", "top_k", "min_p", "seed")
        for name in (*scalars, "has_stop_strings", "has_penalties"):
            grown[name] = grow_column(getattr(self, name), (rows,))
        for name, column in grown.items():  # memory can run out above, so that columns would differ in length
            setattr(self, name, column)


def grow_column(old: np.ndarray, shape: tuple[int, ...], *, fill: int = 0) -> np.ndarray:
    """Return a copy of a column with a larger shape, in which the new elements are `fill`."""
    new = np.full(shape, fill, old.dtype)
    new[tuple(slice(size) for size in old.shape)] = old
    return new


# The requests that wait for a row. Calls take turns, so that one with hundreds of requests does not delay all others.
#
# All of this belongs to the engine's thread.


class Turns:
    """Waiting requests by call (`fairness_key`), calls in the order of their turns, within a call in order of
    arrival.
    """

    def __init__(self) -> None:
        self._calls: OrderedDict[str, OrderedDict[str, Running]] = OrderedDict()
        self._call_of: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._call_of)

    def push(self, entry: Running) -> bool:
        """Queue a request after the others of its call, which are those with its `fairness_key`.

        A call that had no request waiting gets the last turn. Returns False, and queues nothing, if a request with the
        same id waits already.
        """
        request = entry.request
        if request.request_id in self._call_of:
            return False
        self._calls.setdefault(request.fairness_key, OrderedDict())[request.request_id] = entry
        self._call_of[request.request_id] = request.fairness_key
        return True

    def next(self, shut: Container[str] = ()) -> Running | None:
        """Return the first request of the call whose turn it is; it stays queued. None if there is none.

        Calls in `shut` are skipped.
        """
        for fairness_key, entries in self._calls.items():
            if fairness_key not in shut:
                return next(iter(entries.values()))
        return None

    def take(self, entry: Running) -> Running:
        """Remove a waiting request from the queue and return it; its call then comes last."""
        fairness_key = entry.request.fairness_key
        self.remove(entry.request.request_id)
        if fairness_key in self._calls:
            self._calls.move_to_end(fairness_key)
        return entry

    def remove(self, request_id: str) -> Running | None:
        """Remove the waiting request with that id and return it, the order of calls unchanged; None if it does not
        wait.
        """
        fairness_key = self._call_of.pop(request_id, None)
        if fairness_key is None:
            return None
        entry = self._calls[fairness_key].pop(request_id)
        if not self._calls[fairness_key]:
            del self._calls[fairness_key]
        return entry

    def all(self) -> Iterator[Running]:
        """Yield every waiting request, call by call."""
        for entries in self._calls.values():
            yield from entries.values()


# The KV cache of the embedded engine: one row per running request, in one dense block per layer.
#
# Row i of the cache is row i of the decode batch, so a decode step reads the leading rows as a view and gathers
# nothing. When a request leaves, the scheduler moves the last row into the hole. The block grows by doubling, in rows
# and in length, up to what the scheduler admits.

# The block grows in steps of so many rows and tokens, because each growth copies it.
_ROW_STEP = 8
_LENGTH_STEP = 64


class RowCache(Cache):
    """Keys and values, per layer [rows, heads, length, head_dim], with the interface of a cache of transformers.

    `begin_prefill` or `begin_decode` sets where the next forward pass writes. Positions beyond a request's length have
    old values, which callers mask.
    """

    def __init__(self) -> None:
        """Make an empty cache, which allocates memory when rows are reserved and a layer first stores into it."""
        super().__init__(layers=[])
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._rows = 0
        self._length = 0
        self._first_row = 0
        self._copies: torch.Tensor | None = None
        self._positions: torch.Tensor | None = None
        self._row_index: torch.Tensor | None = None
        self._span = 0

    @property
    def capacity(self) -> tuple[int, int]:
        """Return for how many rows, and tokens per row, memory is allocated."""
        return self._rows, self._length

    @property
    def size_bytes(self) -> int:
        """Return the bytes of the cache's allocated memory."""
        return sum(block.nbytes for block in (*self._keys, *self._values))

    def reserve(self, rows: int, length: int) -> None:
        """Allocate memory for at least `rows` requests of `length` tokens; contents stay."""
        if rows <= self._rows and length <= self._length:
            return
        if rows > self._rows:
            # Doubled, but for at most 64 rows more than are needed: while it grows, both blocks are in memory.
            self._rows = max(rows, min(2 * self._rows, rows + 64), _ROW_STEP)
        if length > self._length:
            self._length = -(-length // _LENGTH_STEP) * _LENGTH_STEP
        for blocks in (self._keys, self._values):
            for layer, old in enumerate(blocks):
                blocks[layer] = _grown(old, self._rows, self._length)

    def release(self) -> None:
        """Free all memory of the cache; its contents are lost."""
        self._keys.clear()
        self._values.clear()
        self._rows = self._length = 0

    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copy keys and values of the first `length` tokens of rows `sources` to rows `targets`, which must be
        others.
        """
        for block in (*self._keys, *self._values):
            block[targets, :, :length] = block[sources, :, :length]

    def clear_rows(self, rows: list[int]) -> None:
        """Set keys and values of these rows to 0: a masked position contributes 0 x value, which must not be 0 x
        NaN.
        """
        for block in (*self._keys, *self._values):
            block[rows] = 0

    def begin_prefill(self, first_row: int, copies: torch.Tensor | None = None) -> None:
        """Have the next pass write whole prompts, from position 0, into the rows from `first_row` on.

        `copies` int64 [rows] has for each row its prompt in the pass, where rows share one; None if each has its own.
        """
        self._first_row = first_row
        self._copies = copies
        self._positions = None

    def begin_decode(self, positions: torch.Tensor, span: int) -> None:
        """Have the next forward pass write one token per row, at `positions` int64 [B], and attend to positions
        below `span`.
        """
        self._positions = positions
        self._row_index = torch.arange(len(positions))
        self._span = span

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a layer's new keys and values [B, heads, T, head_dim] and return those to attend to.

        The model's attention calls this for each layer; where to store was set by `begin_prefill` or `begin_decode`.
        """
        # Layers are called in order, and the first call of each one creates its block.
        if layer_idx == len(self._keys):
            for blocks, new in ((self._keys, key_states), (self._values, value_states)):
                _, heads, _, head_dim = new.shape
                # Zeros, because a masked position contributes 0 times its value, and fresh memory may have a nan.
                blocks.append(torch.zeros(self._rows, heads, self._length, head_dim, dtype=new.dtype))
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        # A prefill attends to its own tokens only, so it may return them without a copy out of the cache.
        if self._positions is None:
            count, _, length, _ = key_states.shape
            copies = self._copies
            rows = slice(self._first_row, self._first_row + (count if copies is None else len(copies)))
            # Rows that share a prompt get a copy of its keys and values each.
            keys[rows, :, :length] = key_states if copies is None else key_states[copies]
            values[rows, :, :length] = value_states if copies is None else value_states[copies]
            return key_states, value_states
        index = self._row_index
        # A decode step writes one position per row; index arrays pair rows with positions.
        keys[index, :, self._positions] = key_states[:, :, 0]
        values[index, :, self._positions] = value_states[:, :, 0]
        count = len(self._positions)
        return keys[:count, :, : self._span], values[:count, :, : self._span]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens before the first one of the next pass, equal for all layers.

        Models ask only if they get no positions, and the scheduler gives them.
        """
        return 0 if self._positions is None else self._span - 1

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the position of the next pass's first token, for the mask of a prefill (a decode has its own)."""
        return self.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return (number of keys, offset of the first one) for the mask of a prefill of `query_length` tokens, in any
        layer.
        """
        return self.get_seq_length(layer_idx) + query_length, 0


def _grown(old: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    """Return a block [rows, heads, length, head_dim] that begins with the old one's contents, and is 0 elsewhere."""
    new = torch.zeros(rows, old.shape[1], length, old.shape[3], dtype=old.dtype)
    new[: old.shape[0], :, : old.shape[2]] = old
    return new
