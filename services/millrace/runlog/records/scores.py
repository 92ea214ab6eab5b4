"""Where the teacher's scores of logged rollouts are: one object per rollout, written before its entry is appended.

A crash between the two leaves an object that nobody names, never an entry without its scores. They are deleted with
the run.
"""

import hashlib
from collections.abc import Iterable

from millrace.internal.v1 import batch_pb2
from millrace.rollouts.token_log import encode_scores, scored_digest, with_scores
from millrace.rollouts.types import Float32Array, Rollout, Taught
from millrace.runlog.names import Names
from millrace.storage.base import ObjectStore


def store_scores(
    store: ObjectStore,
    names: Names,
    rollout: Rollout,
    scores: list[Float32Array],
    taught: list[Taught | None] | None = None,
) -> None:
    """Store the teacher's scores of a rollout's samples (blocking); scores of the same tokens that are stored stay.

    `taught` says how each sample was scored where the policy is its own teacher.
    """
    store.create(names.scores(scored_digest(rollout)), encode_scores(rollout.samples, scores, taught))


def name_scores(names: Names, rollouts: Iterable[Rollout]) -> list[batch_pb2.ObjectRef]:
    """Return the references that a header has to the scores of those rollouts that it archives that have any."""
    found: dict[str, batch_pb2.ObjectRef] = {}
    for rollout in rollouts:
        scores = [sample.teacher_logprobs for sample in rollout.samples if sample.teacher_logprobs is not None]
        if scores and len(scores) == len(rollout.samples):
            key = names.scores(scored_digest(rollout)).removeprefix(names.root)
            data = encode_scores(rollout.samples, scores, [sample.taught for sample in rollout.samples])
            found[key] = batch_pb2.ObjectRef(key=key, sha256=hashlib.sha256(data).digest())
    return [found[key] for key in sorted(found)]


def load_scores(store: ObjectStore, names: Names, rollout: Rollout) -> Rollout:
    """Return the rollout with its scores (blocking); NotFoundError if none were kept, CorruptObjectError if damaged."""
    key = names.scores(scored_digest(rollout))
    return with_scores(rollout, store.get(key), where=key)
