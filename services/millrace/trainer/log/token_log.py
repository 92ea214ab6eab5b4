"""Stores log-probs and entropies of a step's tokens, one object per step, in the background.

    main thread      step n: keeps log-probs of its forward ─▶ hands them over ─▶ step n + 1 ─▶ …
    beside it                                       encode, gather at rank 0, create the object

No step waits for it: if more than a few objects are not stored yet, a step goes without. A failure is reported as a
warning, and the training goes on.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from millrace.errors import MillraceError, UnavailableError
from millrace.internal.v1 import batch_pb2
from millrace.rollouts.token_log import (
    LoggedSample,
    TokenLog,
    chosen_rollouts,
    decode_token_log,
    encode_token_log,
    merged,
)
from millrace.runlog.names import Names
from millrace.runlog.records.token_logs import StoredTokenLog, store_token_log
from millrace.storage.base import ObjectStore
from millrace.trainer.background import BackgroundWork, BackgroundWriter
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.learning.batch import MicroBatch, Minibatch
from millrace.trainer.log.batches import Batch

logger = logging.getLogger(__name__)

MAX_WAITING = 4
"""Steps whose objects may be waiting to be stored, more than occur with a store that is fast enough."""


# The values that a step's own forward pass gave for the tokens that are logged: nothing is computed twice.
#
# Shape suffixes: B samples, T longest sample, K chosen ones of them.


@dataclass(frozen=True, slots=True)
class _Part:
    """The chosen samples of one micro-batch, by their indices in the header's sample table."""

    places: list[int]
    values_2KT: torch.Tensor
    mask_KT: torch.Tensor


class TokenRows:
    """Collects log-probs and entropies of this rank's chosen samples, from the forward pass of their minibatch."""

    def __init__(self, header: batch_pb2.BatchHeader, minibatches: Sequence[Minibatch], *, share: float) -> None:
        """Choose the rollouts to log: `share`, from 0 to 1, of the batch's rollouts, the same ones at every rank."""
        self._header = header
        self._share = share
        self._places = [minibatch.samples for minibatch in minibatches]
        members = {(entry.ordinal, entry.member, entry.attempt) for entry in header.samples}
        chosen = chosen_rollouts(members, share)
        self._num_rollouts = len(members)
        self._chosen = {
            place
            for place, entry in enumerate(header.samples)
            if (entry.ordinal, entry.member, entry.attempt) in chosen
        }
        self._parts: list[_Part] = []

    def add(
        self, micro_batch: MicroBatch, samples: Sequence[int], *, logprobs_BT: torch.Tensor, entropy_BT: torch.Tensor
    ) -> None:
        """Keep log-probs and entropies of those samples of a micro-batch that were chosen, copied to the host.

        `samples` are the indices of its rows' samples in the sample table.
        """
        rows = [row for row, place in enumerate(samples) if place in self._chosen]
        if not rows:
            return
        at = torch.tensor(rows, device=logprobs_BT.device)
        values_2KT = torch.stack((logprobs_BT.detach()[at], entropy_BT.detach()[at])).cpu()
        self._parts.append(_Part([samples[row] for row in rows], values_2KT, micro_batch.loss_mask_BT[at].cpu()))

    def to_log(self, *, lineage: int, chain_hash: bytes) -> TokenLog:
        """Make this rank's part of the step's token log from the samples that were added.

        `lineage` is that of the policies that are published, and `chain_hash` the batch's.
        """
        minibatch_of = {
            place: number
            for number, micro_batches in enumerate(self._places)
            for places in micro_batches
            for place in places
        }
        samples = [each for part in self._parts for each in self._samples(part, minibatch_of)]
        return TokenLog(
            run_uid=self._header.run_uid,
            step=self._header.step,
            lineage=lineage,
            chain_hash=chain_hash,
            num_rollouts=self._num_rollouts,
            share=self._share,
            samples=tuple(sorted(samples, key=lambda each: each.sample)),
        )

    def _samples(self, part: _Part, minibatch_of: Mapping[int, int]) -> list[LoggedSample]:
        """Return the logged samples of one micro-batch; `minibatch_of` has the minibatch of each sample."""
        values_2KT, mask_KT = part.values_2KT.numpy(), part.mask_KT.numpy()
        found = []
        for row, place in enumerate(part.places):
            entry = self._header.samples[place]
            mask = mask_KT[row, : entry.length]  # of a longer sample the trainer took as much as the row has
            logprobs, entropies = values_2KT[:, row, : entry.length][:, mask]
            found.append(
                LoggedSample(
                    sample=place,
                    ordinal=entry.ordinal,
                    member=entry.member,
                    attempt=entry.attempt,
                    minibatch=minibatch_of[place],
                    mask=mask.astype(np.uint8),
                    logprobs=logprobs,
                    entropies=entropies.astype(np.float16),
                )
            )
        return found


class TokenLogWriter(BackgroundWriter):
    """Writes the token log of every step; every rank of a gang calls it, at the same steps.

    Used as a context manager around the training: leaving it waits for what is under way, or abandons it if the
    training failed. `on_stored` is called for every log that is stored, and `on_problem` once for failures in a row, on
    the thread that stores.
    """

    def __init__(
        self,
        store: ObjectStore,
        names: Names,
        *,
        share: float,
        lineage: int,
        gang: Gang,
        on_stored: Callable[[StoredTokenLog], None],
        on_problem: Callable[[str], None],
    ) -> None:
        """Prepare to log `share` (0 to 1) of each step's rollouts; 0 logs none.

        `lineage` is that of the published policies, and part of the keys. `on_stored` is called for every stored log,
        and `on_problem` with a sentence once for failures in a row, both on the thread that stores.
        """
        self._store = store
        self._names = names
        self._share = share
        self._lineage = lineage
        self._gang = gang
        self._beside = gang.beside("token logs") if share else gang
        self._on_stored = on_stored
        self._on_problem = on_problem
        self._work = BackgroundWork(gang=gang)
        self._lock = threading.Lock()
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_busy = False
        self._has_problem = False

    def collect(self, batch: Batch) -> TokenRows | None:
        """Return an object that collects the values of a batch's tokens during its step; None if the run logs none."""
        return TokenRows(batch.header, batch.minibatches, share=self._share) if self._share else None

    def write(self, batch: Batch, rows: TokenRows | None) -> None:
        """Queue the values of a step's tokens to be stored in the background.

        Skip the step, with a warning, if the queue is full. Does nothing if `rows` is None. Collective in a gang.
        """
        if rows is None:
            return
        with self._lock:
            num_waiting = len(self._waiting)
        # All ranks skip the same steps, because their parts are gathered in a collective.
        if self._gang.max([num_waiting])[0] >= MAX_WAITING:
            self._report(batch.step, UnavailableError(f"those of {MAX_WAITING} steps before are not stored yet"))
            return
        step, chain_hash = batch.step, batch.chain_hash
        with self._lock:
            self._waiting.append(lambda: self._store_step(step, chain_hash, rows))
            # Under the same lock as the end of `_drain`: either its thread takes this step, or a new thread has to
            # begin.
            begins, self._is_busy = not self._is_busy, True
        if begins:
            self._work.finish()  # the queue is empty: only the end of the thread is waited for
            self._work.begin("log-probs to be stored", self._drain)

    def _drain(self) -> None:
        """Store the queued steps in order until none is left, or the work is abandoned."""
        while True:
            with self._lock:
                if not self._waiting or self._work.is_abandoned.is_set():
                    self._is_busy = False
                    return
                store_next = self._waiting.popleft()
            store_next()

    def _store_step(self, step: int, chain_hash: bytes, rows: TokenRows) -> None:
        """Store the token log of a step, and call `on_stored`; report an error instead of raising it."""
        try:
            log = self._gathered(rows, chain_hash)
            if log is None:
                return
            stored = store_token_log(self._store, self._names, log)
            if stored.is_another:
                logger.warning("the step's log-probs are not those that were stored before", extra={"step": step + 1})
            self._on_stored(stored)
        except Exception as error:  # noqa: BLE001 - a thread's edge: the training does not depend on this
            self._report(step, error)
        else:
            self._has_problem = False

    def _gathered(self, rows: TokenRows, chain_hash: bytes) -> TokenLog | None:
        """Return the step's log, merged from all ranks, at rank 0, and None at the others. Collective in a gang."""
        if self._beside.is_alone:
            return rows.to_log(lineage=self._lineage, chain_hash=chain_hash)
        layout = self._beside.layout
        is_first = layout.is_first_of_samples(self._beside.rank)

        def mine() -> bytes:
            return encode_token_log(rows.to_log(lineage=self._lineage, chain_hash=chain_hash)) if is_first else b""

        parts = self._beside.agree(mine)
        if not self._beside.is_leader:
            return None
        return merged([decode_token_log(part, where=f"of rank {rank}") for rank, part in enumerate(parts) if part])

    def _report(self, step: int, error: Exception) -> None:
        """Log why a step's log-probs are not stored; rank 0 calls `on_problem`, once until a step is stored again."""
        logger.warning("the step's log-probs were not stored", extra={"step": step + 1, "error": repr(error)})
        if self._has_problem or not self._gang.is_leader:
            return
        self._has_problem = True
        cause = str(error) if isinstance(error, MillraceError) else f"{type(error).__name__}: {error}"
        try:
            self._on_problem(
                f"the trainer's log-probs of step {step + 1} were not stored: {cause}. The training goes on; the "
                "dashboard cannot compare trainer and engine at this step, nor after it as long as this lasts",
            )
        except Exception as failure:  # noqa: BLE001 - a thread's edge: a lost log is met by the step's own report
            logger.warning("the warning was not written", extra={"error": repr(failure)})
