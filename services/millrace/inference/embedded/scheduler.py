"""Continuous batching of the embedded engine: requests join and leave between two decode steps.

One `step` admits what fits and computes prompts of newcomers (which gives their first token), or else adds one token to
every running request; between two passes over prompts the running ones get a token. Calls take turns, so that one with
hundreds of completions does not delay all others until it ends. A step never runs while a policy is applied: both
happen in the engine's thread.
"""

import logging
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from millrace.errors import InternalError
from millrace.inference.embedded.adapters import Adapters, Key
from millrace.inference.embedded.rows import RowCache, RowTable, Running, Turns
from millrace.inference.engine import FinishReason, InflightMode, PolicyIdentity, SamplingParams
from millrace.models.routing import Routers
from millrace.rollouts.parameters import kept_tokens
from millrace.rollouts.routed_experts import RoutedForm, dtype_of
from millrace.telemetry import faults
from millrace.telemetry.faults import Point

logger = logging.getLogger(__name__)

PREFILL_TOKENS = 8192
"""Padded prompt tokens per forward pass, which is one step: bounds memory and the pause of running requests."""
_RESERVED = 8
"""One of so many rows, and as much of the cache, is kept from calls that have rows: a new call gets one at once."""
_PASSED_OVER = 64
"""Looks at the queue in which requests whose adapters have a slot pass over one whose adapter has none."""
IDLE_CACHE_BYTES = 64 << 20  # cache that is kept while nothing runs
_TAIL_EXTRA_TOKENS = 8  # tokens looked at for a stop string beyond its length: one may span incomplete characters


class Decoder(Protocol):
    """Turns tokens into text; a transformers tokenizer is one."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str | list[str]:
        """Return the text of these tokens, without special tokens if they are to be skipped."""
        ...


class Scheduler:
    """Runs the requests of one model.

    `kv_tokens` bounds the KV cache as if every admitted request used up its limit. Without a `decoder` no stop strings
    are found.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        identity: PolicyIdentity,
        eos_token_ids: tuple[int, ...],
        decoder: Decoder | None,
        max_num_seqs: int,
        kv_tokens: int,
        routers: Routers | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        """Take the model, whose weights are those of the policy `identity`, with an empty KV cache of at most
        `kv_tokens`.

        At most `max_num_seqs` requests run. A completion ends with one of
        `eos_token_ids`, unless its request ignores them. Without a `decoder` no stop strings are found. Results have
        the experts of their tokens if the model's `routers` are given. `adapters` are those of the model that requests
        may name.
        """
        self.model = model
        self.identity = identity
        self.num_generated_tokens = 0
        self.num_finished = 0
        self._eos_token_ids = eos_token_ids
        self._decoder = decoder
        self._max_num_seqs = max_num_seqs
        self._kv_tokens = kv_tokens
        self._routers = routers
        self._adapters = adapters
        self._max_adapters = 0 if adapters is None else adapters.max_at_once
        self._num_passed_over = 0
        self._rows = self._new_rows()
        self._cache = RowCache()
        self._waiting = Turns()
        self._is_decode_due = False

    @property
    def num_running(self) -> int:
        """Return the number of requests that generate."""
        return self._rows.count

    @property
    def num_waiting(self) -> int:
        """Return the number of requests that wait to begin."""
        return len(self._waiting)

    @property
    def routed(self) -> RoutedForm | None:
        """Return what the experts of tokens in results look like; None if they are not recorded."""
        return None if self._routers is None else self._routers.shape.form

    def _new_rows(self) -> RowTable:
        """Return an empty table of rows, with a column for experts if these are recorded."""
        if self._routers is None:
            return RowTable()
        shape = self._routers.shape
        return RowTable(np.zeros((0, 0, len(shape.layers), shape.top_k), dtype_of(shape.num_experts)))

    def submit(self, entry: Running) -> None:
        """Queue a request; one whose id waits already ends with an InternalError."""
        if not self._waiting.push(entry):
            entry.fail(InternalError(f"request {entry.request.request_id!r} waits already", reason="REQUEST_REPEATED"))

    def abort(self, request_id: str) -> None:
        """End the request with that id with ABORT and the tokens that it has; an unknown id is ignored."""
        if (row := self._rows.find(request_id)) is not None:
            self._retire([row], FinishReason.ABORT)
            return
        if (entry := self._waiting.remove(request_id)) is not None:
            entry.finish(FinishReason.ABORT)

    def abort_all(self) -> None:
        """End every request with ABORT, without tokens, and free the cache; never raise, whatever a failed step
        left.
        """
        entries = [*self._rows.running, *self._waiting.all()]
        self.num_finished += len(self._rows.running)
        self._rows, self._waiting = self._new_rows(), Turns()
        self._cache.release()
        for entry in entries:
            try:
                entry.finish(FinishReason.ABORT)
            except Exception as error:  # the other requests must be ended as well
                logger.exception("a request could not be aborted", extra={"request": entry.request.request_id})
                entry.fail(error)

    def step(self) -> bool:
        """Run one step, over prompts or adding a token to each running request; return False if there was nothing
        to do.
        """
        # A prefill follows a prefill only where nothing runs: running requests get a token in between.
        is_decode_due, self._is_decode_due = self._is_decode_due and bool(self._rows.count), False
        if not is_decode_due and (admitted := self._admit()):
            self._prefill_new(admitted)
            self._is_decode_due = True
            return True
        if self._rows.count:
            self._decode()
            faults.reach(Point.INFERENCE_MID_DECODE, version=self.identity.version)
            return True
        return False

    def end_adapter(self, adapter: PolicyIdentity) -> None:
        """End with ABORT every request that an adapter generates or shall generate, because it is taken away."""
        self._retire(
            [row for row, entry in enumerate(self._rows.running) if entry.adapter == adapter], FinishReason.ABORT
        )
        for entry in [entry for entry in self._waiting.all() if entry.adapter == adapter]:
            self._waiting.take(entry).finish(FinishReason.ABORT)

    def move_adapter(self, old: PolicyIdentity, new: PolicyIdentity, mode: InflightMode) -> None:
        """Have the requests of an adapter go on with its newer version `new`, which the model has.

        With mode RECOMPUTE the KV caches of those that run are computed again with it.
        """
        for entry in self._waiting.all():
            if entry.adapter == old:
                entry.adapter = new
        for row, entry in enumerate(self._rows.running):
            if entry.adapter == old:
                entry.adapter = new
                entry.mark(new, len(self._rows.completion(row)))
                if mode is InflightMode.RECOMPUTE:
                    # The last token is not in the cache yet: the next decode step feeds it.
                    rows = slice(row, row + 1)
                    self._forward_prompts(rows, self._rows.length[rows] - 1, is_again=True)

    def set_identity(self, identity: PolicyIdentity, mode: InflightMode) -> None:
        """Attribute tokens of requests without an adapter to the policy `identity`, whose weights the model has, from
        now on.

        With mode RECOMPUTE the KV caches of running requests are computed again with these weights.
        """
        self.identity = identity
        for row, entry in enumerate(self._rows.running):
            if entry.adapter is None:
                entry.mark(identity, len(self._rows.completion(row)))
        if mode is InflightMode.RECOMPUTE and self._rows.count:
            # The last token of each row is not in the cache yet: the next decode step feeds it.
            known = self._rows.length[: self._rows.count] - 1
            # Recorded experts stay: they are those that the later tokens were sampled with.
            for rows in _chunks(0, known):
                self._forward_prompts(rows, known[rows], is_again=True)

    def _admit(self) -> list[Running]:
        """Take waiting requests out of the queue by turns and return them, as many as rows, cache and one pass allow.

        If nothing runs, a first request always fits.
        """
        if not self._rows.count and self._cache.size_bytes > IDLE_CACHE_BYTES:
            self._cache.release()  # one long request must not make every later row that long
        admitted: list[Running] = []
        running = (
            Counter(entry.request.fairness_key for entry in self._rows.running) if self._waiting else Counter[str]()
        )
        # The cache is one dense block: a longer row makes every row longer.
        longest = int(self._rows.limit[: self._rows.count].max(initial=0))
        longest_prompt = 0
        shut: set[str] = set()
        adapters = {entry.adapter for entry in self._rows.running} - {None}
        is_passed_over = False
        while (entry := self._waiting.next(shut)) is not None:
            fairness_key = entry.request.fairness_key
            if entry.adapter is not None and len(adapters | {entry.adapter}) > self._max_adapters:
                is_passed_over = True
                if self._num_passed_over >= _PASSED_OVER:
                    break  # so that the adapters that generate run out of requests, and one has its turn
                shut.add(fairness_key)
                continue
            if not self._fits(len(admitted), max(longest, entry.limit), has_rows=running[fairness_key] > 0):
                if not running[fairness_key]:
                    break  # its turn comes when rows end; admitting a later one that fits would delay it further
                shut.add(fairness_key)
                continue
            longest_prompt = max(longest_prompt, len(entry.request.prompt_token_ids))
            # The pass is padded to its longest prompt, so that one counts for each row.
            if admitted and (len(admitted) + 1) * longest_prompt > PREFILL_TOKENS:
                break
            longest = max(longest, entry.limit)
            running[fairness_key] += 1
            if entry.adapter is not None and entry.adapter not in adapters:
                adapters.add(entry.adapter)
                self._num_passed_over = 0
            admitted.append(self._waiting.take(entry))
        # Not set to 0 by a look that ends, for lack of rows, before the request without a slot.
        self._num_passed_over += is_passed_over
        return admitted

    def _fits(self, num_admitted: int, longest: int, *, has_rows: bool) -> bool:
        """Return whether rows and cache have room for one more request beside `num_admitted` ones that have no rows
        yet.

        A call that has rows already (`has_rows`) gets less. `longest` is the longest limit in tokens of all requests,
        the new one included.
        """
        rows, tokens = self._max_num_seqs, self._kv_tokens
        if has_rows:
            rows, tokens = rows - rows // _RESERVED, tokens - tokens // _RESERVED
        count = self._rows.count + num_admitted
        return count < rows and (not count or (count + 1) * longest <= tokens)

    def _prefill_new(self, admitted: list[Running]) -> None:
        """Give the requests rows, compute their prompts, and sample the first token of each."""
        # Similar lengths side by side waste the least padding.
        admitted.sort(key=lambda entry: len(entry.request.prompt_token_ids))
        new = self._add(admitted)
        if new.start == new.stop:
            return
        lengths = self._rows.length[new].copy()
        ended: list[int] = []
        for rows in _chunks(new.start, lengths):
            logits = self._forward_prompts(rows, lengths[rows.start - new.start : rows.stop - new.start])
            ended += self._append(rows, logits)
        self._retire(ended)

    def _add(self, admitted: list[Running]) -> slice:
        """Give the requests rows and return the rows as a slice; one that the table cannot take ends with an error."""
        first = self._rows.count
        for entry in admitted:
            entry.mark(entry.adapter or self.identity, 0)
        try:
            return self._rows.add(admitted, self._eos_token_ids)
        except Exception:  # nobody waits for these requests any more: whatever it is must reach their callers
            logger.exception("requests could not be admitted together; trying each", extra={"requests": len(admitted)})
        for entry in admitted:
            try:
                self._rows.add([entry], self._eos_token_ids)
            except Exception as error:  # noqa: BLE001 - as above: the caller gets it
                problem = f"the request could not be admitted: {type(error).__name__}: {error}"
                entry.fail(InternalError(problem, reason="REQUEST_NOT_ADMITTED", remedy="check its parameters"))
        return slice(first, self._rows.count)

    def _forward_prompts(self, rows: slice, lengths: np.ndarray, *, is_again: bool = False) -> torch.Tensor:
        """Compute the first `lengths` tokens of contiguous rows into the cache; return logits [N, V] of each row's last
        one.

        Rows are padded on the right: no real token attends to a later one, and the padding's entries in the cache are
        masked until they are overwritten. Rows with the same tokens and adapter, such as a group's, are computed once.
        Experts are recorded, unless the tokens are computed again (`is_again`); the result has no meaning then.
        """
        longest = int(lengths.max())
        tokens = self._rows.tokens[rows, :longest]
        keys = [entry.adapter for entry in self._rows.running[rows]]
        firsts, prompt_of = _distinct(tokens, lengths, keys)
        is_shared = len(firsts) < len(lengths)
        self._cache.reserve(rows.stop, longest)
        self._cache.begin_prefill(rows.start, torch.from_numpy(prompt_of) if is_shared else None)
        # Logits of the last positions alone, each length once: those of all positions would fill the memory.
        keep, position = np.unique(lengths - 1, return_inverse=True)
        logits, experts = self._forward(
            [keys[first] for first in firsts],
            is_recorded=not is_again,
            input_ids=torch.from_numpy(tokens[firsts] if is_shared else tokens),
            attention_mask=None,  # plain causal attention, which needs no [T, T] mask in memory
            position_ids=torch.arange(longest).expand(len(firsts), longest),
            past_key_values=self._cache,
            logits_to_keep=1 if is_again else torch.from_numpy(keep),
        )
        if experts is not None:
            # [contents, T, layers, top_k] → [rows, T, layers, top_k]
            self._rows.experts[rows, :longest] = experts[prompt_of]
        # [contents, lengths, V] → [rows, V]
        return logits if is_again else logits[torch.from_numpy(prompt_of), torch.from_numpy(position)]

    def _forward(
        self, adapters: Sequence[Key], *, is_recorded: bool = True, **inputs: Any
    ) -> tuple[torch.Tensor, np.ndarray | None]:
        """Run the model, with the adapter of each row; return its logits, and the experts of its input [B, T, layers,
        top_k] if they are recorded.
        """
        if self._adapters is not None:
            self._adapters.select(adapters)
        if self._routers is None or not is_recorded:
            return self.model(use_cache=True, **inputs).logits, None
        with self._routers.recording() as recorded:
            logits = self.model(use_cache=True, **inputs).logits
        experts = recorded()
        return logits, experts.reshape(*inputs["input_ids"].shape, *experts.shape[1:])

    def _decode(self) -> None:
        """Compute one forward pass over the last token of every row, sample the next one of each, and end rows that
        stop.
        """
        count = self._rows.count
        # The last token of each row is the input: it is not in the cache yet.
        positions = self._rows.length[:count] - 1
        span = int(positions.max()) + 1
        self._cache.reserve(count, span)
        index = torch.from_numpy(positions)
        self._cache.begin_decode(index, span)
        logits, experts = self._forward(
            [entry.adapter for entry in self._rows.running],
            input_ids=torch.from_numpy(self._rows.tokens[np.arange(count), positions])[:, None],
            # [B, 1, 1, span]: beyond its own length a row of the cache has values of earlier requests.
            attention_mask=(torch.arange(span) <= index[:, None])[:, None, None],
            position_ids=index[:, None],
            past_key_values=self._cache,
        )
        if experts is not None:
            self._rows.experts[np.arange(count), positions] = experts[:, 0]
        self._retire(self._append(slice(0, count), logits[:, -1]))

    def _append(self, rows: slice, logits: torch.Tensor) -> list[int]:
        """Sample one token per row from `logits` [N, V] and add it to the table; return the rows that end with it."""
        table = self._rows
        tokens, logprobs = sample(
            self._penalised(rows, logits),
            temperatures_B=table.temperature[rows],
            top_p_B=table.top_p[rows],
            top_k_B=table.top_k[rows],
            min_p_B=table.min_p[rows],
            # The counter is the place in the completion: the same seed gives the same tokens in any batch.
            uniforms_B=uniforms(table.seed[rows], table.length[rows] - table.prompt_length[rows]),
        )
        ends = table.append(rows, tokens.numpy(), logprobs.numpy())
        self.num_generated_tokens += rows.stop - rows.start
        # Stop strings need the text, which is slow to make: only rows that have any are looked at.
        if table.has_stop_strings[rows].any():
            for row in range(rows.start, rows.stop):
                if table.has_stop_strings[row] and self._stop_string(row) is not None:
                    ends[row - rows.start] = True
        return (np.flatnonzero(ends) + rows.start).tolist() if ends.any() else []

    def _penalised(self, rows: slice, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, V] with the penalties of those rows applied that have any."""
        table = self._rows
        if not table.has_penalties[rows].any():
            return logits
        logits = logits.float().clone()
        for row in np.flatnonzero(table.has_penalties[rows]) + rows.start:
            logits[row - rows.start] = penalised(
                logits[row - rows.start],
                table.running[row].request.sampling,
                prompt=table.prompt(row),
                completion=table.completion(row),
                stop_ids=table.stop_ids[row],
            )
        return logits

    def _stop_string(self, row: int) -> str | None:
        """Return the stop string that the row's last token completes in the completion's text; None if there is
        none.
        """
        if not self._rows.has_stop_strings[row] or self._decoder is None:
            return None
        sampling, completion = self._rows.running[row].request.sampling, self._rows.completion(row)
        if sampling.min_tokens and len(completion) <= sampling.min_tokens:  # as vLLM counts
            return None
        stops = sampling.stop
        window = max(len(stop.encode()) for stop in stops) + _TAIL_EXTRA_TOKENS  # a token is at least one byte
        ids, skips = completion[-window:].tolist(), sampling.skip_special_tokens
        tail = self._decoder.decode(ids, skip_special_tokens=skips)
        # A stop string that was ignored because the reply was too short does not end it later.
        before = self._decoder.decode(ids[:-1], skip_special_tokens=skips) if sampling.min_tokens else ""
        return next((stop for stop in stops if tail.count(stop) > before.count(stop)), None)

    def _retire(self, rows: list[int], reason: FinishReason | None = None) -> None:
        """End these rows and deliver their results; then move other rows into the holes, in table and cache.

        `reason` is why they end; with None it is found out for each.
        """
        if not rows:
            return
        poisoned: list[int] = []
        for row in rows:
            logprobs = self._rows.completion_logprobs(row)
            why, stop_reason = (reason, None) if reason else self._ending(row)
            if why is FinishReason.ERROR:
                poisoned.append(row)
            self._rows.running[row].finish(
                why,
                tokens=self._rows.completion(row),
                logprobs=logprobs,
                stop_reason=stop_reason,
                routed_experts=self._rows.routed_experts(row),
            )
        self.num_finished += len(rows)
        if poisoned:
            logger.error("the model gave values that are not finite", extra={"requests": len(poisoned)})
            self._cache.clear_rows(poisoned)
        # Only now, because results are read from rows that others move into.
        sources, targets = self._rows.remove(rows)
        if sources:
            self._cache.move(sources, targets, int(self._rows.length[targets].max()))

    def _ending(self, row: int) -> tuple[FinishReason, int | str | None]:
        """Return why a row ended, by its last token, and the stop token or stop string if one ended it."""
        if not np.isfinite(self._rows.completion_logprobs(row)[-1]):
            return FinishReason.ERROR, None
        sampling = self._rows.running[row].request.sampling
        token = int(self._rows.completion(row)[-1])
        if token in sampling.stop_token_ids:
            return FinishReason.STOP, token
        if token in self._eos_token_ids and not sampling.ignore_eos:
            return FinishReason.STOP, None
        if (stop := self._stop_string(row)) is not None:
            return FinishReason.STOP, stop
        return FinishReason.LENGTH, None


def _distinct(tokens: np.ndarray, lengths: np.ndarray, keys: Sequence[Key]) -> tuple[np.ndarray, np.ndarray]:
    """Find rows of `tokens` [N, T] that are equal up to their lengths, and have the same adapter of `keys` [N].

    Returns the first row of each content, and for each row the number of its content.
    """
    numbers: dict[tuple[Key, bytes], int] = {}
    firsts: list[int] = []
    of_row = np.empty(len(lengths), np.int64)
    for row, length in enumerate(lengths.tolist()):
        number = of_row[row] = numbers.setdefault((keys[row], tokens[row, :length].tobytes()), len(firsts))
        if number == len(firsts):
            firsts.append(row)
    return np.array(firsts, np.int64), of_row


def _chunks(first: int, lengths: np.ndarray) -> list[slice]:
    """Return slices of contiguous rows, each of at most PREFILL_TOKENS with its padding.

    `lengths` are the tokens of the rows from `first` on. A longer prompt is a slice of its own.
    """
    chunks: list[slice] = []
    start, longest = 0, 0
    for index, length in enumerate(lengths.tolist()):
        if index > start and (index + 1 - start) * max(longest, length) > PREFILL_TOKENS:
            chunks.append(slice(first + start, first + index))
            start, longest = index, 0
        longest = max(longest, length)
    chunks.append(slice(first + start, first + len(lengths)))
    return chunks


# Sampling for a whole batch at once, with log-probs of exactly the distribution that was sampled.
#
# One uniform number per request and token decides, by inversion of the cumulative distribution. The number is a hash
# of (seed of the request, index of the token), so a seeded request gives the same tokens whatever else is in the
# batch, and no random state has to move when requests join and leave.

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_UNIFORM_BITS = np.uint64(48)  # u <= 1 - 2**-48, so u * total < total holds in float64 after rounding, too


def uniforms(seeds: NDArray[np.uint64], counters: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return a number in [0, 1) per row, a hash of its seed and counter: SplitMix64's finaliser (Steele, Lea, Flood
    2014).
    """
    with np.errstate(over="ignore"):
        # Counter + 1, because the finaliser maps 0 to 0: with seed 0 the first number would always be 0.
        x = seeds + (counters.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return (x >> (np.uint64(64) - _UNIFORM_BITS)).astype(np.float64) * 2.0**-48


def penalised(
    logits_V: torch.Tensor,
    sampling: SamplingParams,
    *,
    prompt: NDArray[np.int64],
    completion: NDArray[np.int64],
    stop_ids: NDArray[np.int64],
) -> torch.Tensor:
    """Return one row's logits after its penalties, float32 [V], in vLLM's order.

    `prompt` and `completion` are the row's tokens. `stop_ids` are not sampled before `min_tokens`; they may be padded
    with -1.
    """
    logits_V = logits_V.float().clone()
    if sampling.repetition_penalty != 1:
        seen = torch.from_numpy(np.unique(np.concatenate([prompt, completion])))
        values = logits_V[seen]
        penalty = sampling.repetition_penalty
        # Keskar et al., arXiv:1909.05858.
        logits_V[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if sampling.frequency_penalty or sampling.presence_penalty:
        ids, counts = np.unique(completion, return_counts=True)
        taken = sampling.frequency_penalty * counts + sampling.presence_penalty
        logits_V[torch.from_numpy(ids)] -= torch.from_numpy(taken.astype(np.float32))
    if len(completion) < sampling.min_tokens:
        known = (stop_ids >= 0) & (stop_ids < len(logits_V))  # callers may name tokens that the model does not have
        logits_V[torch.from_numpy(stop_ids[known])] = -math.inf
    return logits_V


def sample(
    logits_BV: torch.Tensor,
    *,
    temperatures_B: NDArray[np.float32],
    top_p_B: NDArray[np.float32],
    top_k_B: NDArray[np.int32],
    min_p_B: NDArray[np.float32],
    uniforms_B: NDArray[np.float64],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return next tokens int64 [B] and their log-probs float32 [B]; `uniforms_B` in [0, 1) decides which token it is.

    Log-probs are those of log_softmax(logits / temperature) in float32, renormalised over the tokens that `top_p_B`,
    `top_k_B` and `min_p_B` keep; a row's bound is off at 1, 0 and 0. Rows of temperature 0 take the most likely token
    and its log-prob at temperature 1, without truncation.
    """
    logits_BV = logits_BV.float()
    is_greedy = temperatures_B == 0
    # A division by 1 changes nothing, and costs a pass over all logits.
    if not (temperatures_B == 1).all():
        divisors = torch.from_numpy(np.where(is_greedy, np.float32(1), temperatures_B))
        logits_BV = logits_BV / divisors[:, None]
    logprobs_BV = torch.log_softmax(logits_BV, dim=-1)
    if ((top_p_B < 1) | (top_k_B > 0) | (min_p_B > 0)).any():
        kept_BV = kept_tokens(
            logprobs_BV,  # greedy rows stay as they are
            top_p=torch.from_numpy(np.where(is_greedy, np.float32(1), top_p_B)),
            top_k=torch.from_numpy(np.where(is_greedy, 0, top_k_B)),
            min_p=torch.from_numpy(np.where(is_greedy, np.float32(0), min_p_B)),
        )
        logprobs_BV = torch.log_softmax(logprobs_BV.masked_fill(~kept_BV, float("-inf")), dim=-1)
    if is_greedy.all():
        tokens_B = logits_BV.argmax(dim=-1)  # of the logits: rounding in log_softmax can make ties of near ones
    else:
        # In float64: a sum in float32 over a large vocabulary loses the small probabilities.
        cumulative_BV = logprobs_BV.exp().cumsum(dim=-1, dtype=torch.float64)
        thresholds_B = torch.from_numpy(uniforms_B)[:, None] * cumulative_BV[:, -1:]
        # The first index above the threshold has a probability above 0: the sum grows there.
        tokens_B = torch.searchsorted(cumulative_BV, thresholds_B, right=True)[:, 0]
        tokens_B.clamp_(max=logits_BV.shape[-1] - 1)  # only rows with NaN get here; their log-prob shows it
        if is_greedy.any():
            tokens_B = torch.where(torch.from_numpy(is_greedy), logits_BV.argmax(dim=-1), tokens_B)
    return tokens_B, logprobs_BV.gather(1, tokens_B[:, None])[:, 0]
