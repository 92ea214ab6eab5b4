"""The samples of a run as other tools read them: what was asked, what was answered, and what came of it."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from millrace.errors import CorruptObjectError, NotFoundError
from millrace.internal.v1 import batch_pb2
from millrace.readers.exports.conversation import answer_of, content_of, info_of, messages_of
from millrace.rollouts.batch_wire import MAX_HEADER_BYTES, closes_run, decode_header, unpack_batch
from millrace.rollouts.types import Rollout
from millrace.runlog.names import Names
from millrace.runlog.records import revisions
from millrace.runlog.records.revisions import read_rollouts
from millrace.storage import ObjectStore
from millrace.storage.base import revision_of

_Member = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedSample:
    """A rollout, the step whose batch resolved it, and its advantage there."""

    step: int
    rollout: Rollout
    advantage: float | None
    """Mean over the tokens that it was trained on; None if it was not, or the batch's data is not kept any more."""
    messages: list[dict[str, Any]]

    @property
    def completion(self) -> str:
        """Return the text of the policy's last message, and of what came after it; empty if there is none."""
        last = self.messages[self._answer_at :]
        return "\n".join(content_of(message) for message in last)

    @property
    def prompt(self) -> str:
        """Return the text of every message before the policy's last one, each with its role."""
        before = self.messages[: self._answer_at]
        return "\n".join(f"{message.get('role', '?')}: {content_of(message)}" for message in before)

    @property
    def _answer_at(self) -> int:
        """Return the place of the policy's last message in the conversation.

        The conversation's length if there is none.
        """
        roles = [message.get("role") for message in self.messages]
        return len(roles) - 1 - roles[::-1].index("assistant") if "assistant" in roles else len(roles)

    def to_json(self) -> dict[str, Any]:
        """Return the sample as plain columns by name; `metrics` is a dictionary."""
        rollout = self.rollout
        return {
            "step": self.step,
            "environment": rollout.env,
            "purpose": rollout.purpose.value,
            "evaluation": rollout.eval_id,
            "task_id": rollout.task_id,
            "ordinal": rollout.ordinal,
            "member": rollout.member,
            "attempt": rollout.attempt,
            "status": rollout.status.value,
            "error": "" if rollout.error is None else f"{rollout.error.type}: {rollout.error.message}",
            "prompt": self.prompt,
            "completion": self.completion,
            "reward": rollout.reward,
            "advantage": self.advantage,
            "version_min": rollout.min_version,
            "version_max": rollout.max_version,
            "tokens": rollout.num_tokens,
            "sampled_tokens": rollout.num_loss_tokens,
            "turns": rollout.num_turns,
            "stop": rollout.stop_condition,
            "truncated": rollout.is_truncated,
            "seconds": rollout.seconds,
            "metrics": dict(rollout.metrics),
            "answer": answer_of(rollout),
            "info": info_of(rollout),
        }


def list_headers(store: ObjectStore, names: Names) -> list[tuple[int, str]]:
    """Return step and whole key of every committed header, the closing ones included, in the order of the run
    (blocking).
    """
    return [(step, names.batch_header(step, revision)) for step, revision in revisions.list_headers(store, names)]


def read_headers(
    store: ObjectStore, names: Names, *, step: int | None = None
) -> Iterator[tuple[int, int, batch_pb2.BatchHeader]]:
    """Yield step, revision and header of what is committed, or of one step, up to the header that ends the run
    (blocking).

    `CorruptObjectError` names a header that is damaged.
    """
    previous: tuple[int, str] | None = None
    for at, key in list_headers(store, names):
        is_wanted = step is None or at == step
        if is_wanted and previous is not None and previous[0] != at and closes_run(_read_header(store, previous[1])):
            return  # what comes after the end is no part of the run
        if is_wanted:
            yield at, revision_of(key), _read_header(store, key)
        previous = at, key


def _read_header(store: ObjectStore, key: str) -> batch_pb2.BatchHeader:
    """Return the header under a whole key; CorruptObjectError names it if it is damaged."""
    try:
        return decode_header(store.get(key, max_bytes=MAX_HEADER_BYTES))
    except CorruptObjectError as error:
        raise CorruptObjectError(f"{store.uri(key)}: {error.message}", reason=error.reason) from error


def read_samples(
    store: ObjectStore, names: Names, *, step: int | None = None, advantages: bool = True
) -> Iterator[ExportedSample]:
    """Yield the samples that committed batches resolved, or one step's, in the order of steps, without duplicates
    (blocking).

    One archive is in memory at a time, and steps whose archive was removed are left out. Without `advantages` the
    batches are not read, and every advantage is None. `CorruptObjectError` names an archive that is damaged.
    """
    for at, _, header in read_headers(store, names, step=step):
        try:
            rollouts = read_rollouts(store, header)
        except NotFoundError:  # pruned: archives of rollouts are kept longer than batches, but not for ever
            continue
        trained = advantages_of(store, header) if advantages else {}
        for rollout in rollouts:
            if not rollout.is_duplicate:
                member = (rollout.ordinal, rollout.member, rollout.attempt)
                yield ExportedSample(
                    step=at,
                    rollout=rollout,
                    advantage=trained.get(member) if rollout.purpose.value == "train" else None,
                    messages=messages_of(rollout),
                )


def advantages_of(store: ObjectStore, header: batch_pb2.BatchHeader) -> dict[_Member, float]:
    """Return the mean advantage per trained token of each rollout that a batch trains on, by (ordinal, member,
    attempt).

    Empty where the batch's data is gone or damaged.
    """
    try:
        chunks = {index: store.get(ref.key) for index, ref in enumerate(header.chunks)}
        samples = unpack_batch(header, chunks)
    except (NotFoundError, CorruptObjectError):
        return {}
    sums: dict[_Member, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for sample in samples:
        found = sums[sample.ordinal, sample.member, sample.attempt]
        found[0] += float(sample.advantages[sample.loss_mask != 0].sum())
        found[1] += sample.num_loss_tokens
    return {member: total / count for member, (total, count) in sums.items() if count}
