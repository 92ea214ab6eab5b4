"""Continuous batching of the embedded engine: requests join and leave between two decode steps.

One `step` admits what fits and computes prompts of newcomers (which gives their first token), or else adds one token to
every running request; between two passes over prompts the running ones get a token. Calls take turns, so that one with
hundreds of completions does not keep others waiting until it ends. A step never runs while a policy is applied: both
happen in the engine's thread.
"""

import logging
from collections import Counter
from typing import Protocol

import numpy as np
import torch

from millrace.errors import InternalError
from millrace.inference.embedded.kv_cache import RowCache
from millrace.inference.embedded.rows import RowTable, Running
from millrace.inference.embedded.sampling import Limits, penalised, sample, uniforms
from millrace.inference.embedded.turns import Turns
from millrace.inference.engine import FinishReason, InflightMode, PolicyIdentity
from millrace.telemetry import faults
from millrace.telemetry.faults import Point

logger = logging.getLogger(__name__)

PREFILL_TOKENS = 8192
"""Padded prompt tokens per forward pass, which is one step: bounds memory and how long running requests stand still."""
_RESERVED = 8
"""One in so many rows, and as much of the cache, is not for a call that has rows already: others come in at once."""
IDLE_CACHE_BYTES = 64 << 20  # cache that is kept while nothing runs
_TAIL_EXTRA_TOKENS = 8  # tokens looked at for a stop string beyond its length: one may span incomplete characters


class Decoder(Protocol):
    """Turns tokens into text; a transformers tokenizer is one."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str | list[str]:
        """The text of these tokens."""
        ...


class Scheduler:
    """Runs the requests of one model. `kv_bytes` bounds the KV cache if every admitted request used up its limit."""

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
        """Requests that generate."""
        return self._rows.count

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a row."""
        return len(self._waiting)

    def submit(self, entry: Running) -> None:
        """Queue a request; one whose id waits already fails."""
        if not self._waiting.push(entry):
            entry.fail(InternalError(f"request {entry.request.request_id!r} waits already", reason="REQUEST_REPEATED"))

    def abort(self, request_id: str) -> None:
        """End a request with what it has; unknown ids are ignored."""
        if (row := self._rows.find(request_id)) is not None:
            self._retire([row], FinishReason.ABORT)
            return
        if (entry := self._waiting.remove(request_id)) is not None:
            entry.finish(FinishReason.ABORT)

    def abort_all(self) -> None:
        """End every request, without tokens. Raises nothing, whatever a failed step left in table and cache."""
        entries = [*self._rows.running, *self._waiting.all()]
        self.num_finished += len(self._rows.running)
        self._rows, self._waiting = RowTable(), Turns()
        self._cache.release()
        for entry in entries:
            try:
                entry.finish(FinishReason.ABORT)
            except Exception as error:  # the others must hear of their end all the same
                logger.exception("a request could not be aborted", extra={"request": entry.request.request_id})
                entry.fail(error)

    def step(self) -> bool:
        """One prefill or decode step; False if there was nothing to do."""
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
        """The model's weights are now those of `identity`: attribute what follows to it, recompute caches if asked."""
        self.identity = identity
        for row, entry in enumerate(self._rows.running):
            entry.mark(identity, len(self._rows.completion(row)))
        if mode is InflightMode.RECOMPUTE and self._rows.count:
            # The last token of each row is not in the cache yet: the next decode step feeds it.
            known = self._rows.length[: self._rows.count] - 1
            for rows in _chunks(0, known):
                self._forward_prompts(rows, known[rows], wants_logits=False)

    def _admit(self) -> list[Running]:
        """Take waiting requests by turns, as long as rows, cache and a pass allow; the first one always fits."""
        if not self._rows.count and self._cache.size_bytes > IDLE_CACHE_BYTES:
            self._cache.release()  # one long request must not make every later row that long
        admitted: list[Running] = []
        running = Counter(entry.request.turn for entry in self._rows.running) if self._waiting else Counter[str]()
        longest = int(self._rows.limit[: self._rows.count].max(initial=0))
        longest_prompt = 0
        shut: set[str] = set()
        while (entry := self._waiting.next(shut)) is not None:
            turn = entry.request.turn
            if not self._fits(len(admitted), max(longest, entry.limit), has_rows=running[turn] > 0):
                if not running[turn]:
                    break  # its turn comes when rows end; one that fits in its place would keep it waiting
                shut.add(turn)
                continue
            longest_prompt = max(longest_prompt, len(entry.request.prompt_token_ids))
            if admitted and (len(admitted) + 1) * longest_prompt > PREFILL_TOKENS:
                break
            longest = max(longest, entry.limit)
            running[turn] += 1
            admitted.append(self._waiting.take(entry))
        return admitted

    def _fits(self, num_admitted: int, longest: int, *, has_rows: bool) -> bool:
        """Whether rows and cache take one more request; less of both is for a call that has rows already."""
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
        """Give requests their rows; one that does not fit the table ends with an error, the others go on."""
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
        """Compute the first `lengths` tokens of contiguous rows into the cache; logits [N, V] of each last one.

        Rows are padded on the right: no real token attends to what follows it, and what the padding leaves in the
        cache is masked until it is overwritten. Rows with the same tokens, as a group's have, are computed once.
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
        """Sample one token per row; return the rows that end with it."""
        table = self._rows
        tokens, logprobs = sample(
            self._penalised(rows, logits),
            temperatures_B=table.temperature[rows],
            limits_B=Limits(top_p=table.top_p[rows], top_k=table.top_k[rows], min_p=table.min_p[rows]),
            uniforms_B=uniforms(table.seed[rows], table.length[rows] - table.prompt_length[rows]),
        )
        ends = table.append(rows, tokens.numpy(), logprobs.numpy())
        self.num_generated_tokens += rows.stop - rows.start
        if table.has_stop_strings[rows].any():
            for row in range(rows.start, rows.stop):
                if table.has_stop_strings[row] and self._stop_string(row) is not None:
                    ends[row - rows.start] = True
        return (np.flatnonzero(ends) + rows.start).tolist() if ends.any() else []

    def _penalised(self, rows: slice, logits: torch.Tensor) -> torch.Tensor:
        """The logits behind the penalties of those rows that have any."""
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
        """The stop string that the completion's last token completes, or None."""
        if not self._rows.has_stop_strings[row] or self._decoder is None:
            return None
        sampling, completion = self._rows.running[row].request.sampling, self._rows.completion(row)
        if sampling.min_tokens and len(completion) <= sampling.min_tokens:  # as vLLM counts
            return None
        stops = sampling.stop
        window = max(len(stop.encode()) for stop in stops) + _TAIL_EXTRA_TOKENS  # a token is at least one byte
        ids, skips = completion[-window:].tolist(), sampling.skip_special_tokens
        tail = self._decoder.decode(ids, skip_special_tokens=skips)
        # One that was passed over because the reply was too short does not end it later.
        before = self._decoder.decode(ids[:-1], skip_special_tokens=skips) if sampling.min_tokens else ""
        return next((stop for stop in stops if tail.count(stop) > before.count(stop)), None)

    def _retire(self, rows: list[int], reason: FinishReason | None = None) -> None:
        """Deliver the results of rows, and close the holes in table and cache."""
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
        """Why a row ended by itself."""
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
    """Of rows of tokens, each of its length: the first row with each content, and per row the number of its content."""
    numbers: dict[bytes, int] = {}
    firsts: list[int] = []
    of_row = np.empty(len(lengths), np.int64)
    for row, length in enumerate(lengths.tolist()):
        number = of_row[row] = numbers.setdefault(tokens[row, :length].tobytes(), len(firsts))
        if number == len(firsts):
            firsts.append(row)
    return np.array(firsts, np.int64), of_row


def _chunks(first: int, lengths: np.ndarray) -> list[slice]:
    """Contiguous rows whose padded size is at most PREFILL_TOKENS; a longer prompt is a chunk of its own."""
    chunks: list[slice] = []
    start, longest = 0, 0
    for index, length in enumerate(lengths.tolist()):
        if index > start and (index + 1 - start) * max(longest, length) > PREFILL_TOKENS:
            chunks.append(slice(first + start, first + index))
            start, longest = index, 0
        longest = max(longest, length)
    chunks.append(slice(first + start, first + len(lengths)))
    return chunks
