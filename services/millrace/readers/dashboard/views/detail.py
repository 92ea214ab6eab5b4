"""One sample with all that the log knows of it: conversation, reward parts, its group, and its tokens."""

import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from millrace.errors import CorruptObjectError, MillraceError, NotFoundError
from millrace.internal.v1 import batch_pb2
from millrace.readers.dashboard.index import Columns, Segment
from millrace.readers.dashboard.query import parse_id, row_json, sample_id
from millrace.readers.dashboard.views.facts import RunFacts
from millrace.readers.dashboard.views.tokens import (
    TrainedSequence,
    TrainerLogprobs,
    Vocabulary,
    not_trained,
    of_secrets,
)
from millrace.readers.exports.conversation import given_of, messages_of
from millrace.rollouts.batch_wire import MAX_HEADER_BYTES, chunks_for, decode_header, unpack_batch
from millrace.rollouts.types import Rollout, Sample, TrainSample
from millrace.rollouts.wire import decode_archive
from millrace.runlog.names import Names
from millrace.runlog.records.frontier import chain_hash
from millrace.runlog.records.revisions import read_archive
from millrace.storage import ObjectStore
from millrace.telemetry.logging import MASK

# From a sample back to the policies that made it and forward to what came of it; from a version in both directions.

_MAX_VERSIONS = 64
_SHOWN_SAMPLES = 12


class Lineage:
    """Answers about one run. Version v is what step v - 1 made; the batch of step s is trained on version s."""

    def __init__(self, store: ObjectStore, names: Names, columns: Columns, facts: RunFacts) -> None:
        """Create the view over a run's index (`columns`) and events (`facts`)."""
        self._store = store
        self._names = names
        self._columns = columns
        self._facts = facts

    def of_sample(self, row: int, tokens: Mapping[int, int] | None = None) -> dict[str, Any]:
        """Return the versions that made a sample's tokens, the step that resolved it, and the version that came of it.

        `row` is its number in the index. `tokens` says how many tokens each version made; without it every version from
        the oldest to the newest is named.
        """
        found = self._columns.rows()[row]
        lowest, highest = int(found["version_min"]), int(found["version_max"])
        versions = sorted(tokens) if tokens is not None else range(lowest, highest + 1) if lowest >= 0 else range(0)
        step = int(found["step"])
        is_trained = bool(found["trained"])
        return {
            "sample": row_json(self._columns, found, next(self._columns.texts([row]))),
            "made_by": [
                self.version(version) | {"tokens": (tokens or {}).get(version)} for version in versions[:_MAX_VERSIONS]
            ],
            "step": self.step(step),
            "is_trained": is_trained,
            "became": self.version(step + 1) if is_trained else None,
        }

    def of_version(self, version: int) -> dict[str, Any]:
        """Return what is known of a policy version, the batch that it was trained on, and the samples made with it.

        Of the samples of either, their number and the first ones are returned. NotFoundError if the version is unknown.
        """
        num_rows = self._columns.num_rows  # the index grows meanwhile: columns of one length

        def column(name: str) -> np.ndarray:
            return self._columns.column(name)[:num_rows]

        with_it = np.flatnonzero((column("version_min") <= version) & (version <= column("version_max")))
        # Version v is what the batch of step v - 1 made.
        from_it = np.flatnonzero((column("step") == version - 1) & (column("trained") == 1))
        about = self.version(version)
        if not len(with_it) and not len(from_it) and not about["is_known"]:
            newest = self._facts.newest_version
            raise NotFoundError(
                f"the run has no policy version {version}: the newest that its archived events name is {newest}",
                reason="VERSION_NOT_FOUND",
                remedy=f"choose one from 0, the start policy, to {newest}; events of a live run come within 10 s",
            )
        trained = [int(step) for step in np.unique(column("step")[with_it][column("trained")[with_it] == 1])]
        return {
            "version": about,
            "made_from": None if version == 0 else self.step(version - 1) | self._samples(from_it),
            "made": self._samples(with_it) | {"steps": trained[:200]},
            "next": self.version(version + 1),
        }

    def version(self, version: int) -> dict[str, Any]:
        """Return what events say of a policy version: its publication, its checkpoint, and its replicas."""
        about: dict[str, Any] = {"version": version, "is_known": version == 0, "served": []}
        about |= {"checkpoint": self._checkpoint(version), "batch": None if version == 0 else self._batch(version - 1)}
        for event in self._facts.about(version):
            match event.WhichOneof("body"):
                case "policy_published" if event.policy_published.version == version:
                    body = event.policy_published
                    about |= {"is_known": True, "published": event.time.ToNanoseconds() / 1e9, "digest": body.digest}
                    about |= {"uri": body.uri, "codec": body.codec, "size_bytes": body.size_bytes}
                case "policy_served" if event.policy_served.version == version:
                    body = event.policy_served
                    served = {"replica": body.replica, "time": event.time.ToNanoseconds() / 1e9, "proof": body.proof}
                    about["is_known"] = True
                    about["served"].append(served)
                case _:
                    pass
        about["served"] = about["served"][:_SHOWN_SAMPLES]
        return about

    def step(self, step: int) -> dict[str, Any]:
        """Return the batch of a step, with the figures of its header; `problem` if that cannot be read.

        Without a header in the index there are no figures.
        """
        about = self._batch(step) | {"trained": None, "reward": None}
        if not about["key"]:
            return about
        try:
            header = decode_header(self._store.get(about["key"], max_bytes=MAX_HEADER_BYTES))
        except (CorruptObjectError, NotFoundError) as error:
            return about | {"problem": error.message}
        dropped: dict[str, int] = {}
        for each in header.resolutions:
            if each.reason:
                dropped[each.reason] = dropped.get(each.reason, 0) + 1
        members = {(each.ordinal, each.member, each.attempt) for each in header.samples}
        return about | {
            "trained": len(members),
            "reward": header.reward_mean,
            "tokens": header.num_tokens,
            "dropped_groups": dropped,
            "chain_hash_before": header.previous_chain_hash.hex(),
            "epoch": header.writer_epoch,
        }

    def _batch(self, step: int) -> dict[str, Any]:
        """Return what the index has of a step's batch, without reading its header."""
        segments = [each for each in self._columns.segments if each.step == step]
        return {
            "step": step,
            "is_done": self._facts.is_done(step),
            "key": segments[-1].key if segments else "",
            "rollouts": sum(each.count for each in segments),
        }

    def _checkpoint(self, version: int) -> dict[str, Any] | None:
        """Return the newest checkpoint at a version or before it, as plain data; None without one."""
        saved = self._facts.checkpoint_before(version)
        return None if saved is None else {"step": saved.step, "uri": saved.uri, "size_bytes": saved.size_bytes}

    def _samples(self, rows: np.ndarray) -> dict[str, Any]:
        """Return how many samples there are in `rows` (numbers in the index), and the first of them."""
        first = [int(row) for row in rows[:_SHOWN_SAMPLES]]
        found = self._columns.rows()
        texts = self._columns.texts(first)
        return {
            "num_samples": len(rows),
            "samples": [row_json(self._columns, found[row], text) for row, text in zip(first, texts, strict=True)],
        }


MAX_TOKENS = 4096
"""On one page of tokens."""
MAX_MEMBERS = 256
"""Of a group, on one page."""
_SECRET_TOKENS = 512  # a secret may begin so many tokens before a page, or end after it
_KEPT, _MAX_KEPT_BYTES = 2, 32 << 20


@dataclass(frozen=True, slots=True)
class BatchArchive:
    """A header, its chain hash (empty if it continues nothing), and the rollouts that it archives."""

    header: batch_pb2.BatchHeader
    chain_hash: bytes
    rollouts: list[Rollout]


class RecentArchives:
    """The archives that were read last: who looks at a sample looks at its neighbours next."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, BatchArchive] = OrderedDict()

    def read(self, key: str) -> BatchArchive:
        """Return the header under its key with the rollouts that it archives.

        The last few are kept, large ones are not.
        """
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        header_bytes = self._store.get(key, max_bytes=MAX_HEADER_BYTES)
        header = decode_header(header_bytes)
        chain = chain_hash(header.previous_chain_hash, header_bytes) if len(header.previous_chain_hash) == 32 else b""
        data = read_archive(self._store, header)
        found = BatchArchive(header, chain, decode_archive(data) if data else [])
        with self._lock:
            # A larger archive is read again rather than kept in memory.
            if len(data) <= _MAX_KEPT_BYTES:
                self._kept[key] = found
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return found


class Details:
    """Answers for single samples of one run."""

    def __init__(
        self, store: ObjectStore, names: Names, columns: Columns, facts: RunFacts, *, secrets: tuple[str, ...] = ()
    ) -> None:
        """Create the view over a run's index.

        `secrets` are values that no token may show, besides what `redact` recognizes.
        """
        self._store = store
        self._secrets = secrets
        self._names = names
        self._columns = columns
        self._trainer = TrainerLogprobs(store, names, facts)
        self._archives = RecentArchives(store)
        self._vocabulary: Vocabulary | None = None

    def row(self, sample: str) -> int:
        """Return the row number in the index of the sample with this id; NotFoundError if there is none."""
        step, revision, place = parse_id(sample)
        segments = self._columns.segments
        segment = next((each for each in segments if (each.step, each.revision) == (step, revision)), None)
        if segment is None:
            newest = max((each.step for each in segments), default=-1)
            why = f"the newest is {newest}" if segments else "there is none yet"
            raise _no_sample(sample, f"no batch {step}{f'r{revision}' if revision else ''} is committed, {why}")
        rows = self._columns.rows()[segment.first : segment.first + segment.count]
        found = np.flatnonzero(rows["place"] == place)
        if not len(found):
            what = segment.problem or f"batch {step} resolved {segment.count} samples, and not this one"
            raise _no_sample(sample, what)
        return segment.first + int(found[0])

    def tokens_by_version(self, sample: str) -> dict[int, int] | None:
        """Count a sample's sampled tokens by policy version; None if its archive is missing or damaged.

        `sample` is its id.
        """
        try:
            at, archive = self._read(sample)
        except (CorruptObjectError, NotFoundError):
            return None
        rollout = archive.rollouts[int(self._columns.rows()["place"][at])]
        found: Counter[int] = Counter()
        for each in rollout.samples:
            found.update(version for version in _versions(each).tolist() if version >= 0)
        return dict(found)

    def show(self, sample: str) -> dict[str, Any]:
        """Return the sample with this id, its conversation and its group as plain data, without its tokens.

        NotFoundError or CorruptObjectError if it cannot be read.
        """
        at, archive = self._read(sample)
        rows = self._columns.rows()
        rollout = archive.rollouts[int(rows["place"][at])]
        same = self._group(at)
        members = [
            row_json(self._columns, rows[row], texts)
            for row, texts in zip(same, self._columns.texts([int(row) for row in same]), strict=True)
        ]
        own = next(self._columns.texts([at]))
        return {
            **row_json(self._columns, rows[at], own),
            **_facts(rollout),
            "messages": messages_of(rollout),
            "group": members,
            "samples": [_sample_facts(each) for each in rollout.samples],
            "traces": [
                {"agent": trace.agent, "reward": trace.reward, "samples": trace.num_samples, "turns": trace.num_turns}
                for trace in rollout.traces
            ],
        }

    def _group(self, at: int) -> np.ndarray:
        """Return the row numbers of a sample's group in order of member, for the sample's own row number `at`.

        They are of its batch or, for an evaluation, of all batches.
        """
        rows = self._columns.rows()
        segment, first, last = self._segment(rows[at]), 0, len(rows)
        if rows["evaluation"][at] < 0:
            first, last = segment.first, segment.first + segment.count
        is_same = np.ones(last - first, bool)
        for name in ("evaluation", "ordinal", "purpose", "env"):
            is_same &= self._columns.column(name)[first:last] == rows[name][at]
        found = first + np.flatnonzero(is_same)
        return found[np.argsort(rows["member"][found], kind="stable")][:MAX_MEMBERS]

    def tokens(self, sample: str, *, part: int, offset: int, size: int) -> dict[str, Any]:
        """Return columns over the tokens `[offset, offset + size)` of the token sequence number `part` of a sample.

        These are ids, texts, loss mask, log-probs, versions, advantages, and what the trainer computed. `sample` is the
        sample's id. At most `MAX_TOKENS` tokens are returned. NotFoundError if there is no such sequence.
        """
        at, archive = self._read(sample)
        row = self._columns.rows()[at]
        rollout = archive.rollouts[int(row["place"])]
        if not 0 <= part < len(rollout.samples):
            raise NotFoundError(
                f"sample {sample} has {len(rollout.samples)} token sequences, and no number {part}",
                reason="PART_NOT_FOUND",
                remedy="a rollout that failed has no tokens",
            )
        columns = rollout.samples[part]
        window = slice(offset, offset + min(size, MAX_TOKENS))
        ids, texts = self._readable(columns.token_ids, window)
        advantages = self._advantages(archive.header, rollout, part) if row["trained"] else None
        return {
            "total": columns.num_tokens,
            "offset": offset,
            "ids": ids,
            "texts": texts,
            "mask": columns.loss_mask[window].tolist(),
            "logprobs": [round(float(value), 5) for value in columns.inference_logprobs[window]],
            "versions": _versions(columns)[window].tolist(),
            "advantages": None if advantages is None else _rounded(advantages[window]),
            "trainer": self._of_trainer(row, archive, part, window) if row["trained"] else not_trained(),
        }

    def _readable(self, token_ids: np.ndarray, window: slice) -> tuple[list[int], list[str | None]]:
        """Return ids and texts of the tokens in a window (a slice); None for a text that is unknown.

        Tokens of a secret, which spans several, have the id -1 and a masked text.
        """
        if self._vocabulary is None:
            self._vocabulary = Vocabulary.of_run(self._store, self._names)
        first = max(0, window.start - _SECRET_TOKENS)
        around = token_ids[first : window.stop + _SECRET_TOKENS].tolist()
        texts = [self._vocabulary.text(token) for token in around]
        hidden = of_secrets(texts, self._secrets)
        shown = range(window.start - first, min(window.stop - first, len(around)))
        return [-1 if hidden[at] else around[at] for at in shown], [MASK if hidden[at] else texts[at] for at in shown]

    def _of_trainer(self, row: Any, archive: BatchArchive, part: int, window: slice) -> dict[str, Any]:
        """Return the trainer's columns over a window of sequence `part`, or why there are none.

        `row` is the sample's row. If the trainer's log has other samples of the batch only, `samples` are their ids.
        """
        asked = TrainedSequence(
            step=int(row["step"]),
            chain_hash=archive.chain_hash,
            rollouts=archive.rollouts,
            place=int(row["place"]),
            part=part,
            window=window,
        )
        found = self._trainer.of(asked)
        if (places := found.pop("places", None)) is not None:
            batch = {name: int(row[name]) for name in ("step", "revision")}
            found["samples"] = [sample_id({**batch, "place": place}) for place in places]
        return found

    def _read(self, sample: str) -> tuple[int, BatchArchive]:
        """Return the row number of the sample with this id, and the archive that holds its rollout.

        NotFoundError or CorruptObjectError if it cannot be read.
        """
        at = self.row(sample)
        row = self._columns.rows()[at]
        archive = self._archives.read(self._segment(row).key)
        if not 0 <= row["place"] < len(archive.rollouts):
            raise CorruptObjectError(
                f"the archive of batch {row['step']} has no rollout {row['place']} any more",
                reason="INDEX_CORRUPT",
                remedy="`millrace run audit` says whether the archive is what was written",
            )
        return at, archive

    def _segment(self, row: Any) -> Segment:
        """Return the index's segment of a row (columns of `ROW`): the header that resolved it."""
        wanted = (int(row["step"]), int(row["revision"]))
        return next(each for each in self._columns.segments if (each.step, each.revision) == wanted)

    def _advantages(self, header: batch_pb2.BatchHeader, rollout: Rollout, part: int) -> np.ndarray | None:
        """Return the advantages of one sequence's tokens, as the batch has them (NaN after the sequence was cut).

        None where nothing of the sequence was trained on, or where the batch is not kept any more.
        """
        member = (rollout.ordinal, rollout.member, rollout.attempt)
        own = [
            index for index, entry in enumerate(header.samples)
            if (entry.ordinal, entry.member, entry.attempt) == member
        ]  # fmt: skip
        if not own:
            return None
        try:
            chunks = {at: self._store.get(header.chunks[at].key) for at in chunks_for(header, own)}
            found = _trained_parts(unpack_batch(header, chunks, only=own), rollout)[part]
        except MillraceError:  # pruned or damaged: the page shows the rest
            return None
        if found is None:
            return None
        whole = np.full(rollout.samples[part].num_tokens, np.nan, np.float32)
        whole[: len(found.advantages)] = found.advantages
        return whole


def _trained_parts(trained: list[TrainSample], rollout: Rollout) -> list[TrainSample | None]:
    """Return for each token sequence of a rollout the sample in `trained` that was cut from it.

    None if it was not trained on. `trained` are the rollout's samples in the batch. A batch has the sequences in their
    order, each cut, and leaves out those of which nothing sampled is left then: the number of a sequence in the rollout
    is not its number in the batch.
    """
    found: list[TrainSample | None] = []
    waiting = iter(trained)
    first = next(waiting, None)
    for sample in rollout.samples:
        is_it = (
            first is not None
            and np.array_equal(first.token_ids, sample.token_ids[: len(first.token_ids)])
            and np.array_equal(first.loss_mask != 0, sample.loss_mask[: len(first.loss_mask)] != 0)
        )
        found.append(first if is_it else None)
        first = next(waiting, None) if is_it else first
    return found


def _no_sample(sample: str, why: str) -> NotFoundError:
    """Make the error for a sample that there is not; `why` says what there is."""
    return NotFoundError(
        f"the run has no sample {sample}: {why}",
        reason="SAMPLE_NOT_FOUND",
        remedy="`millrace run samples` and the page of samples list them; one of a batch that was just committed comes "
        "within seconds",
    )


def _facts(rollout: Rollout) -> dict[str, Any]:
    """Return what a page shows of a rollout beside its row: task, error, metrics, sampling."""
    error = rollout.error
    return {
        "task_id": rollout.task_id[:2000],
        "task_index": rollout.task_index,
        "group_size": rollout.group_size,
        "error": None if error is None else {"type": error.type, "message": error.message, "frames": error.frames},
        "metrics": {name[:200]: value for name, value in sorted(rollout.metrics.items())[:500]},
        "temperature": rollout.temperature,
        "model_seconds": rollout.model_seconds,
        "env_server": rollout.env_server,
        "planned_step": rollout.planned_step,
        "eval_id": rollout.eval_id,
        "sampling": rollout.sampling_json,
        "given": given_of(rollout),
    }


def _sample_facts(sample: Sample) -> dict[str, Any]:
    """Return token counts and policy spans of one token sequence as plain data."""
    return {
        "tokens": sample.num_tokens,
        "sampled": sample.num_loss_tokens,
        "spans": [
            {"lineage": span.lineage, "version": span.version, "start": span.start, "end": span.end}
            for span in sample.policy_spans[:1000]
        ],
    }


def _rounded(values: np.ndarray) -> list[float | None]:
    """Return the numbers rounded to five places; None for each that is not finite."""
    return [round(float(value), 5) if np.isfinite(value) else None for value in values]


def _versions(sample: Sample) -> np.ndarray:
    """Return the policy version of each token; -1 where none sampled it."""
    found = np.full(sample.num_tokens, -1, np.int64)
    for span in sample.policy_spans:
        found[span.start : span.end] = span.version
    found[sample.loss_mask == 0] = -1
    return found
