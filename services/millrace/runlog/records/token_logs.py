"""Where the token logs of a run are: one object per step and lineage, created once, kept as long as the run.

They are measurements: nothing is made of them, so no header names them, and a fork begins without those of its parent.
The event of each names its sha256; events are named by headers and seals.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from millrace.internal.v1 import batch_pb2
from millrace.rollouts.token_log import (
    MAX_TOKEN_LOG_BYTES,
    TokenLog,
    decode_token_log,
    encode_scores,
    encode_token_log,
    scored_digest,
    with_scores,
)
from millrace.rollouts.types import Float32Array, Rollout, Taught
from millrace.runlog.catalogue import TOKEN_LOG
from millrace.runlog.names import Names
from millrace.storage.base import ObjectStore, find_newest, next_revision

# Where the teacher's scores of logged rollouts are: one object per rollout, written before its entry is appended.
#
# A crash between the two leaves an object that nobody names, never an entry without its scores. They are deleted with
# the run.


def store_scores(
    store: ObjectStore,
    names: Names,
    rollout: Rollout,
    scores: list[Float32Array],
    taught: list[Taught | None] | None = None,
) -> None:
    """Store the teacher's scores of a rollout's samples (blocking); scores of the same tokens that are stored stay.

    `scores` has an array of log-probs for each sample. `taught` says how each sample was scored where the policy is its
    own teacher.
    """
    store.create(names.scores(scored_digest(rollout)), encode_scores(rollout.samples, scores, taught))


def name_scores(names: Names, rollouts: Iterable[Rollout]) -> list[batch_pb2.ObjectRef]:
    """Return the references that a header has to the stored scores of these rollouts.

    Those without scores have none.
    """
    found: dict[str, batch_pb2.ObjectRef] = {}
    for rollout in rollouts:
        scores = [sample.teacher_logprobs for sample in rollout.samples if sample.teacher_logprobs is not None]
        if scores and len(scores) == len(rollout.samples):
            key = names.scores(scored_digest(rollout)).removeprefix(names.root)
            # Encoded again and not read: the rollout has its scores from that object, so the bytes are the same.
            data = encode_scores(rollout.samples, scores, [sample.taught for sample in rollout.samples])
            found[key] = batch_pb2.ObjectRef(key=key, sha256=hashlib.sha256(data).digest())
    return [found[key] for key in sorted(found)]


def load_scores(store: ObjectStore, names: Names, rollout: Rollout) -> Rollout:
    """Return the rollout with its stored scores (blocking).

    NotFoundError if none were kept, CorruptObjectError if they are damaged.
    """
    key = names.scores(scored_digest(rollout))
    return with_scores(rollout, store.get(key), where=key)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTokenLog:
    """A log that is durable. `key` is without the run's prefix, `sha256` (hex) of the log's bytes."""

    step: int
    key: str
    sha256: str
    size_bytes: int
    is_another: bool
    """Another log of the step was stored before; this one is its next revision."""


def store_token_log(store: ObjectStore, names: Names, log: TokenLog) -> StoredTokenLog:
    """Store the log of a step (blocking), and return where it is.

    It is the next revision if another log of that step and lineage is stored. Equal bytes, as of a step that is trained
    again in a strict run, are not written again.
    """
    first, data = names.token_log(log.step, log.lineage), encode_token_log(log)
    key, is_another = first, False
    if not store.create(first, data):
        key = find_newest(store, first) or first
        if is_another := store.get(key) != data:
            key = next_revision(store, first)
            store.create(key, data)
    return StoredTokenLog(
        step=log.step,
        key=key.removeprefix(names.root),
        sha256=hashlib.sha256(data).hexdigest(),
        size_bytes=len(data),
        is_another=is_another,
    )


def find_token_log(store: ObjectStore, names: Names, step: int) -> str | None:
    """Return the whole key of a step's token log, the newest revision of the newest lineage.

    None without any (blocking).
    """
    prefix = names.token_logs(step)
    found = ((TOKEN_LOG.parse(info.key.removeprefix(names.root)), info.key) for info in store.list(prefix))
    numbered = [(int(place["lineage"]), int(place["revision"]), key) for place, key in found if place]
    return max(numbered, default=(0, 0, None))[2]


def load_token_log(store: ObjectStore, key: str) -> TokenLog:
    """Return the token log with this whole key (blocking); NotFoundError, or CorruptObjectError if it is damaged."""
    return decode_token_log(store.get(key, max_bytes=MAX_TOKEN_LOG_BYTES), where=key)
