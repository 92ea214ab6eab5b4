"""Continuous batching of the embedded engine: requests join and leave between two decode steps.

One `step` admits what fits and computes prompts of newcomers (which gives their first token), or else adds one token to
every running request; between two passes over prompts the running ones get a token. Calls take turns, so that one with
hundreds of completions does not delay all others until it ends. A step never runs while a policy is applied: both
happen in the engine's thread.
"""

import logging
import math
from collections import Counter
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import Cache

from millrace.errors import InternalError
from millrace.inference.embedded.rows import RowTable, Running, Turns
from millrace.inference.engine import FinishReason, InflightMode, PolicyIdentity, SamplingParams
from millrace.rollouts.truncation import kept_tokens
from millrace.telemetry import faults
from millrace.telemetry.faults import Point

logger = logging.getLogger(__name__)

PREFILL_TOKENS = 8192
"""Padded prompt tokens per forward pass, which is one step: bounds memory and the pause of running requests."""
_RESERVED = 8
"""One of so many rows, and as much of the cache, is kept from calls that have rows: a new call gets one at once."""
IDLE_CACHE_BYTES = 64 << 20  # cache that is kept while nothing runs
_TAIL_EXTRA_TOKENS = 8  # tokens looked at for a stop string beyond its length: one may span incomplete characters


class Decoder(Protocol):
    """Turns tokens into text; a transformers tokenizer is one."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str | list[str]:
        """Return the text of these tokens."""
        ...


class Scheduler:
    """Runs the requests of one model. `kv_bytes` bounds the KV cache as if every admitted request used up its limit.

    `token_bytes` is the cache's size per token.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        identity: PolicyIdentity,
        eos_token_ids: tuple[int, ...],
        decoder: Decoder | None,
        max_num_seqs: int,
        kv_bytes: int,
        token_bytes: int,
    ) -> None:
        self.model = model
        self.identity = identity
        self.num_generated_tokens = 0
        self.num_finished = 0
        self._eos_token_ids = eos_token_ids
        self._decoder = decoder
        self._max_num_seqs = max_num_seqs
        self._kv_tokens = kv_bytes // token_bytes
        self._rows = RowTable()
        self._cache = RowCache()
        self._waiting = Turns()
        self._is_decode_due = False

    @property
    def num_running(self) -> int:
        """Return the number of requests that generate."""
        return self._rows.count

    @property
    def num_waiting(self) -> int:
        """Return the number of requests that wait for a row."""
        return len(self._waiting)

    def submit(self, entry: Running) -> None:
        """Queue a request; one whose id waits already is ended with an InternalError."""
        if not self._waiting.push(entry):
            entry.fail(InternalError(f"request {entry.request.request_id!r} waits already", reason="REQUEST_REPEATED"))

    def abort(self, request_id: str) -> None:
        """End a request with ABORT and the tokens that it has; unknown ids are ignored."""
        if (row := self._rows.find(request_id)) is not None:
            self._retire([row], FinishReason.ABORT)
            return
        if (entry := self._waiting.remove(request_id)) is not None:
            entry.finish(FinishReason.ABORT)

    def abort_all(self) -> None:
        """End every request with ABORT, without tokens, and free the cache.

        Raises nothing, whatever a failed step left in table and cache.
        """
        entries = [*self._rows.running, *self._waiting.all()]
        self.num_finished += len(self._rows.running)
        self._rows, self._waiting = RowTable(), Turns()
        self._cache.release()
        for entry in entries:
            try:
                entry.finish(FinishReason.ABORT)
            except Exception as error:  # the other requests must be ended as well
                logger.exception("a request could not be aborted", extra={"request": entry.request.request_id})
                entry.fail(error)

    def step(self) -> bool:
        """Run one step, a prefill or a decode; return False if there was nothing to do."""
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

    def set_identity(self, identity: PolicyIdentity, mode: InflightMode) -> None:
        """Attribute tokens to `identity` from now on, whose weights the model has.

        With RECOMPUTE compute caches again.
        """
        self.identity = identity
        for row, entry in enumerate(self._rows.running):
            entry.mark(identity, len(self._rows.completion(row)))
        if mode is InflightMode.RECOMPUTE and self._rows.count:
            # The last token of each row is not in the cache yet: the next decode step feeds it.
            known = self._rows.length[: self._rows.count] - 1
            for rows in _chunks(0, known):
                self._forward_prompts(rows, known[rows], wants_logits=False)

    def _admit(self) -> list[Running]:
        """Take waiting requests out of the queue by turns and return them, as many as rows, cache and one pass allow.

        A first request always fits an empty table.
        """
        if not self._rows.count and self._cache.size_bytes > IDLE_CACHE_BYTES:
            self._cache.release()  # one long request must not make every later row that long
        admitted: list[Running] = []
        running = (
            Counter(entry.request.fairness_key for entry in self._rows.running) if self._waiting else Counter[str]()
        )
        longest = int(self._rows.limit[: self._rows.count].max(initial=0))
        longest_prompt = 0
        shut: set[str] = set()
        while (entry := self._waiting.next(shut)) is not None:
            fairness_key = entry.request.fairness_key
            if not self._fits(len(admitted), max(longest, entry.limit), has_rows=running[fairness_key] > 0):
                if not running[fairness_key]:
                    break  # its turn comes when rows end; admitting a later one that fits would delay it further
                shut.add(fairness_key)
                continue
            longest_prompt = max(longest_prompt, len(entry.request.prompt_token_ids))
            if admitted and (len(admitted) + 1) * longest_prompt > PREFILL_TOKENS:
                break
            longest = max(longest, entry.limit)
            running[fairness_key] += 1
            admitted.append(self._waiting.take(entry))
        return admitted

    def _fits(self, num_admitted: int, longest: int, *, has_rows: bool) -> bool:
        """Return whether rows and cache have room for one more request.

        A call that has rows already (`has_rows`) gets less. `longest` is the longest limit of all requests, the new one
        included.
        """
        rows, tokens = self._max_num_seqs, self._kv_tokens
        if has_rows:
            rows, tokens = rows - rows // _RESERVED, tokens - tokens // _RESERVED
        count = self._rows.count + num_admitted
        return count < rows and (not count or (count + 1) * longest <= tokens)

    def _prefill_new(self, admitted: list[Running]) -> None:
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
        """Give requests rows and return the rows; a request that the table cannot take ends with an error."""
        first = self._rows.count
        for entry in admitted:
            entry.mark(self.identity, 0)
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

    def _forward_prompts(self, rows: slice, lengths: np.ndarray, *, wants_logits: bool = True) -> torch.Tensor:
        """Compute the first `lengths` tokens of contiguous rows into the cache.

        Return logits [N, V] of each row's last one. Rows are padded on the right: no real token attends to a later one,
        and the padding's entries in the cache are masked until they are overwritten. Rows with the same tokens, such as
        a group's, are computed once. Without `wants_logits` the result has no meaning.
        """
        longest = int(lengths.max())
        tokens = self._rows.tokens[rows, :longest]
        firsts, prompt_of = _distinct(tokens, lengths)
        is_shared = len(firsts) < len(lengths)
        self._cache.reserve(rows.stop, longest)
        self._cache.begin_prefill(rows.start, torch.from_numpy(prompt_of) if is_shared else None)
        keep, position = np.unique(lengths - 1, return_inverse=True)
        logits = self.model(
            input_ids=torch.from_numpy(tokens[firsts] if is_shared else tokens),
            attention_mask=None,  # plain causal attention, which needs no [T, T] mask in memory
            position_ids=torch.arange(longest).expand(len(firsts), longest),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=torch.from_numpy(keep) if wants_logits else 1,
        ).logits
        return logits[torch.from_numpy(prompt_of), torch.from_numpy(position)] if wants_logits else logits

    def _decode(self) -> None:
        count = self._rows.count
        positions = self._rows.length[:count] - 1
        span = int(positions.max()) + 1
        self._cache.reserve(count, span)
        index = torch.from_numpy(positions)
        self._cache.begin_decode(index, span)
        logits = self.model(
            input_ids=torch.from_numpy(self._rows.tokens[np.arange(count), positions])[:, None],
            attention_mask=(torch.arange(span) <= index[:, None])[:, None, None],
            position_ids=index[:, None],
            past_key_values=self._cache,
            use_cache=True,
        ).logits[:, -1]
        self._retire(self._append(slice(0, count), logits))

    def _append(self, rows: slice, logits: torch.Tensor) -> list[int]:
        """Sample one token per row from `logits` and add it to the table; return the rows that end with it."""
        table = self._rows
        tokens, logprobs = sample(
            self._penalised(rows, logits),
            temperatures_B=table.temperature[rows],
            limits_B=Limits(top_p=table.top_p[rows], top_k=table.top_k[rows], min_p=table.min_p[rows]),
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
        """Return the logits with penalties applied to the rows that have any."""
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
        """Return the stop string that the completion's last token completes, or None."""
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
        """End rows and deliver their results, with `reason` or by the cause of their end.

        Fill the holes in table and cache.
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
                why, tokens=self._rows.completion(row), logprobs=logprobs, stop_reason=stop_reason
            )
        self.num_finished += len(rows)
        if poisoned:
            logger.error("the model gave values that are not finite", extra={"requests": len(poisoned)})
            self._cache.clear_rows(poisoned)
        sources, targets = self._rows.remove(rows)
        if sources:
            self._cache.move(sources, targets, int(self._rows.length[targets].max()))

    def _ending(self, row: int) -> tuple[FinishReason, int | str | None]:
        """Return why a row ended, from its last token, with the stop token or string if one ended it."""
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


def _distinct(tokens: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find equal rows of tokens, each up to its length: return the first row of each content, and each row's content
    number.
    """
    numbers: dict[bytes, int] = {}
    firsts: list[int] = []
    of_row = np.empty(len(lengths), np.int64)
    for row, length in enumerate(lengths.tolist()):
        number = of_row[row] = numbers.setdefault(tokens[row, :length].tobytes(), len(firsts))
        if number == len(firsts):
            firsts.append(row)
    return np.array(firsts, np.int64), of_row


def _chunks(first: int, lengths: np.ndarray) -> list[slice]:
    """Return slices of contiguous rows whose padded size is at most PREFILL_TOKENS.

    A longer prompt is a slice of its own. `lengths` are those of the rows from `first` on.
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
    """Return one number in [0, 1) per row, a hash of (seed, counter).

    The hash is the finaliser of SplitMix64 (Steele, Lea, Flood 2014).
    """
    with np.errstate(over="ignore"):
        x = seeds + (counters.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return (x >> (np.uint64(64) - _UNIFORM_BITS)).astype(np.float64) * 2.0**-48


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Limits:
    """Truncation of the distribution, per row: `top_p` 1, `top_k` 0 and `min_p` 0 are off."""

    top_p: NDArray[np.float32]
    top_k: NDArray[np.int32]
    min_p: NDArray[np.float32]


def penalised(
    logits_V: torch.Tensor,
    sampling: SamplingParams,
    *,
    prompt: NDArray[np.int64],
    completion: NDArray[np.int64],
    stop_ids: NDArray[np.int64],
) -> torch.Tensor:
    """Return a row's logits after its penalties, float32 [V], in vLLM's order.

    `stop_ids` are not sampled before `min_tokens`; they may be padded with -1.
    """
    logits_V = logits_V.float().clone()
    if sampling.repetition_penalty != 1:
        seen = torch.from_numpy(np.unique(np.concatenate([prompt, completion])))
        values = logits_V[seen]
        penalty = sampling.repetition_penalty
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
    limits_B: Limits,
    uniforms_B: NDArray[np.float64],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return next tokens int64 [B] and their log-probs float32 [B]; `uniforms_B` in [0, 1) decides each.

    Log-probs are those of log_softmax(logits / temperature) in float32, renormalised over the tokens that the limits
    keep. Rows of temperature 0 take the most likely token and its log-prob at temperature 1, without limits.
    """
    logits_BV = logits_BV.float()
    is_greedy = temperatures_B == 0
    if not (temperatures_B == 1).all():
        divisors = torch.from_numpy(np.where(is_greedy, np.float32(1), temperatures_B))
        logits_BV = logits_BV / divisors[:, None]
    logprobs_BV = torch.log_softmax(logits_BV, dim=-1)
    if ((limits_B.top_p < 1) | (limits_B.top_k > 0) | (limits_B.min_p > 0)).any():
        logprobs_BV = _truncate(logprobs_BV, limits_B, is_greedy)
    if is_greedy.all():
        tokens_B = logits_BV.argmax(dim=-1)  # of the logits: rounding in log_softmax can make ties of near ones
    else:
        cumulative_BV = logprobs_BV.exp().cumsum(dim=-1, dtype=torch.float64)
        thresholds_B = torch.from_numpy(uniforms_B)[:, None] * cumulative_BV[:, -1:]
        # The first index above the threshold has a probability above 0: the sum grows there.
        tokens_B = torch.searchsorted(cumulative_BV, thresholds_B, right=True)[:, 0]
        tokens_B.clamp_(max=logits_BV.shape[-1] - 1)  # only rows with NaN get here; their log-prob shows it
        if is_greedy.any():
            tokens_B = torch.where(torch.from_numpy(is_greedy), logits_BV.argmax(dim=-1), tokens_B)
    return tokens_B, logprobs_BV.gather(1, tokens_B[:, None])[:, 0]


def _truncate(logprobs_BV: torch.Tensor, limits_B: Limits, is_greedy_B: NDArray[np.bool_]) -> torch.Tensor:
    """Return log-probs renormalised over the tokens that the limits leave; greedy rows stay whole."""
    kept_BV = kept_tokens(
        logprobs_BV,
        top_p=torch.from_numpy(np.where(is_greedy_B, np.float32(1), limits_B.top_p)),
        top_k=torch.from_numpy(np.where(is_greedy_B, 0, limits_B.top_k)),
        min_p=torch.from_numpy(np.where(is_greedy_B, np.float32(0), limits_B.min_p)),
    )
    return torch.log_softmax(logprobs_BV.masked_fill(~kept_BV, float("-inf")), dim=-1)


# The KV cache of the embedded engine: one row per running request, in one dense block per layer.
#
# Row i of the cache is row i of the decode batch, so a decode step reads the leading rows as a view and gathers
# nothing. When a request leaves, the scheduler moves the last row into the hole. The block grows by doubling, in rows
# and in length, up to what the scheduler admits.

_ROW_STEP = 8
_LENGTH_STEP = 64


class RowCache(Cache):
    """Keys and values, per layer [rows, heads, length, head_dim], with the interface of a cache of transformers.

    `begin_prefill` or `begin_decode` sets where the next forward pass writes. Positions beyond a request's length have
    old values, which callers mask.
    """

    def __init__(self) -> None:
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
        """Return the allocated rows and length."""
        return self._rows, self._length

    @property
    def size_bytes(self) -> int:
        """Return the allocated bytes."""
        return sum(block.nbytes for block in (*self._keys, *self._values))

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` requests of `length` tokens; contents stay."""
        if rows <= self._rows and length <= self._length:
            return
        if rows > self._rows:
            self._rows = max(rows, min(2 * self._rows, rows + 64), _ROW_STEP)
        if length > self._length:
            self._length = -(-length // _LENGTH_STEP) * _LENGTH_STEP
        for blocks in (self._keys, self._values):
            for layer, old in enumerate(blocks):
                blocks[layer] = _grown(old, self._rows, self._length)

    def release(self) -> None:
        """Free the blocks."""
        self._keys.clear()
        self._values.clear()
        self._rows = self._length = 0

    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copy the first `length` positions of rows `sources` to rows `targets`, which must be others."""
        for block in (*self._keys, *self._values):
            block[targets, :, :length] = block[sources, :, :length]

    def clear_rows(self, rows: list[int]) -> None:
        """Set rows to zero: a masked position contributes 0 x value, which must not be 0 x NaN."""
        for block in (*self._keys, *self._values):
            block[rows] = 0

    def begin_prefill(self, first_row: int, copies: torch.Tensor | None = None) -> None:
        """Have the next forward pass write whole prompts, from position 0, into the rows from `first_row` on.

        `copies` int64 [rows] has for each row its prompt in the pass, where rows share one; None if each has its own.
        """
        self._first_row = first_row
        self._copies = copies
        self._positions = None

    def begin_decode(self, positions: torch.Tensor, span: int) -> None:
        """Have the next forward pass add one token per row at `positions` int64 [B], and attend to positions below
        `span`.
        """
        self._positions = positions
        self._row_index = torch.arange(len(positions))
        self._span = span

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store [B, heads, T, head_dim] and return the keys and values to attend to.

        The model's attention calls this.
        """
        # Layers are called in order, and the first call of each one creates its block.
        if layer_idx == len(self._keys):
            for blocks, new in ((self._keys, key_states), (self._values, value_states)):
                _, heads, _, head_dim = new.shape
                blocks.append(torch.zeros(self._rows, heads, self._length, head_dim, dtype=new.dtype))
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        # A prefill attends to its own tokens only, so it may return them without a copy out of the cache.
        if self._positions is None:
            count, _, length, _ = key_states.shape
            copies = self._copies
            rows = slice(self._first_row, self._first_row + (count if copies is None else len(copies)))
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
        """Return the number of tokens before the first one of the next pass.

        Models ask only if they get no positions, and the scheduler gives them.
        """
        return 0 if self._positions is None else self._span - 1

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the position of the next pass's first token, for the mask of a prefill (a decode has its own)."""
        return self.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the number of keys and the offset of the first one, for the mask of a prefill."""
        return self.get_seq_length(layer_idx) + query_length, 0


def _grown(old: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    """Return a zeroed block of the new size that begins with the old one's contents."""
    new = torch.zeros(rows, old.shape[1], length, old.shape[3], dtype=old.dtype)
    new[: old.shape[0], :, : old.shape[2]] = old
    return new
