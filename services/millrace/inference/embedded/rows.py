"""The running requests of the embedded engine as columns, a row per request: a step is a few array operations.

Rows 0..count-1 are in use, in the order of the KV cache's rows. All of this belongs to the engine's thread.
"""

from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from millrace.inference.engine import FinishReason, GenerateRequest, Generation, PolicyIdentity
from millrace.rollouts.types import PolicySpan

_NO_TOKEN = -1


@dataclass(slots=True, kw_only=True)
class Running:
    """A request from its arrival to its end.

    `seed` is drawn if the caller gave none. `limit` is in tokens, with prompt. Either `deliver` is called with the
    result or `refuse` with the error, once; `marks` are the positions in the completion where a policy version begins
    to generate.
    """

    request: GenerateRequest
    seed: int
    limit: int
    deliver: Callable[[Generation], None]
    refuse: Callable[[Exception], None]
    is_finished: bool = False
    marks: list[tuple[PolicyIdentity, int]] = field(default_factory=list)

    def mark(self, identity: PolicyIdentity, position: int) -> None:
        """Record that `identity` generates from completion position `position` on.

        It replaces a mark at the same position.
        """
        if self.marks and self.marks[-1][1] == position:
            self.marks.pop()
        if not self.marks or self.marks[-1][0] != identity:
            self.marks.append((identity, position))

    def spans(self, end: int) -> tuple[PolicySpan, ...]:
        """Return the marks as spans over a completion of `end` tokens; none if the request never ran."""
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
    ) -> None:
        """Deliver the result, empty without `tokens`. Does nothing if the request has ended already."""
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
            )
        )
        self.is_finished = True

    def fail(self, error: Exception) -> None:
        """End the request with an error. Does nothing if it has ended already."""
        if not self.is_finished:
            self.is_finished = True
            self.refuse(error)


class RowTable:
    """The columns. `tokens` int64 [rows, length] has prompt and completion, `logprobs` float32 the completion's."""

    def __init__(self) -> None:
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

    def add(self, entries: Sequence[Running], eos_token_ids: Sequence[int]) -> slice:
        """Append requests and return their rows; they also stop at `eos_token_ids`, unless they ignore those.

        An error leaves the table as it was.
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
        """Append one token per row.

        Return bool [rows], true where the row ends: by a stop token, its limit or a bad log-prob.
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
        """Return the prompt, int64, a view."""
        return self.tokens[row, : self.prompt_length[row]]

    def completion(self, row: int) -> np.ndarray:
        """Return the completion so far, int64, a view."""
        return self.tokens[row, self.prompt_length[row] : self.length[row]]

    def completion_logprobs(self, row: int) -> np.ndarray:
        """Return the completion's log-probs, a view."""
        return self.logprobs[row, self.prompt_length[row] : self.length[row]]

    def remove(self, rows: Sequence[int]) -> tuple[list[int], list[int]]:
        """Remove rows and move the last ones into the holes.

        Return (sources, targets), the moves for the caller to repeat in other tables.
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
        """Return the row of a request; None if it has none."""
        return next((row for row, entry in enumerate(self.running) if entry.request.request_id == request_id), None)

    def columns(self) -> tuple[np.ndarray, ...]:
        """Return every column, always in the same order."""
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
        )

    def _reserve(self, rows: int, length: int, stops: int) -> None:
        """Grow the columns, all or none of them, to at least these sizes.

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
            "stop_ids": grow_column(self.stop_ids, (rows, stops), fill=_NO_TOKEN),
        }
        scalars = ("length", "prompt_length", "limit", "temperature", "top_p", "top_k", "min_p", "seed")
        for name in (*scalars, "has_stop_strings", "has_penalties"):
            grown[name] = grow_column(getattr(self, name), (rows,))
        for name, column in grown.items():  # memory can run out above, so that columns would differ in length
            setattr(self, name, column)


def grow_column(old: np.ndarray, shape: tuple[int, ...], *, fill: int = 0) -> np.ndarray:
    """Return a copy of a column with a larger shape; new elements are `fill`."""
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
        """Queue a request, and a call that has no other request as the last.

        Return False if the request's id waits already.
        """
        request = entry.request
        if request.request_id in self._call_of:
            return False
        self._calls.setdefault(request.fairness_key, OrderedDict())[request.request_id] = entry
        self._call_of[request.request_id] = request.fairness_key
        return True

    def next(self, shut: Container[str] = ()) -> Running | None:
        """Return the request whose turn it is, skipping the calls in `shut`; None if there is none. It stays queued."""
        for fairness_key, entries in self._calls.items():
            if fairness_key not in shut:
                return next(iter(entries.values()))
        return None

    def take(self, entry: Running) -> Running:
        """Remove a request and return it; its call then comes last."""
        fairness_key = entry.request.fairness_key
        self.remove(entry.request.request_id)
        if fairness_key in self._calls:
            self._calls.move_to_end(fairness_key)
        return entry

    def remove(self, request_id: str) -> Running | None:
        """Remove a request and return it, the order of calls unchanged; None if it does not wait."""
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
