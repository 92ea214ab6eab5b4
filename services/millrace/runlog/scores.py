"""Where the teacher's scores of logged rollouts lie: one object per rollout, written before its entry is appended.

A crash between the two leaves an object that nobody names, never an entry without its scores. They are deleted with
the run.
"""

from millrace.rollouts.scores import encode_scores, scored_digest, with_scores
from millrace.rollouts.types import Float32Array, Rollout
from millrace.runlog.names import Names
from millrace.storage.base import ObjectStore


def store_scores(store: ObjectStore, names: Names, rollout: Rollout, scores: list[Float32Array]) -> None:
    """Keep the scores of a rollout's samples (blocking); whoever plays the same tokens again keeps the first ones."""
    store.create(names.scores(scored_digest(rollout.samples)), encode_scores(rollout.samples, scores))


def load_scores(store: ObjectStore, names: Names, rollout: Rollout) -> Rollout:
    """The rollout with its scores (blocking); NotFoundError if none were kept, CorruptObjectError if damaged."""
    key = names.scores(scored_digest(rollout.samples))
    return with_scores(rollout, store.get(key), where=key)
