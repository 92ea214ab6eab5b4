"""From a sample back to the policies that made it and forward to what came of it; from a version in both directions."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from millrace.errors import CorruptObjectError, NotFoundError
from millrace.readers.dashboard.index import Columns
from millrace.readers.dashboard.query import row_json
from millrace.readers.dashboard.views.facts import RunFacts
from millrace.rollouts.batch_wire import MAX_HEADER_BYTES, decode_header
from millrace.runlog.names import Names
from millrace.storage import ObjectStore

_MAX_VERSIONS = 64
_SHOWN_SAMPLES = 12


class Lineage:
    """Answers about one run. Version v is what step v - 1 made; the batch of step s is trained on version s."""

    def __init__(self, store: ObjectStore, names: Names, columns: Columns, facts: RunFacts) -> None:
        self._store = store
        self._names = names
        self._columns = columns
        self._facts = facts

    def of_sample(self, row: int, tokens: Mapping[int, int] | None = None) -> dict[str, Any]:
        """Return the versions that made a sample's tokens, the step that resolved it, and the version that came of it.

        `tokens` says how many each version made; without it every version from the oldest to the newest is
        named.
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
        """Return the batch that a version was trained on, and the samples made with it.

        NotFoundError if it is unknown.
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
        """Return the batch of a step, with the figures of its header; `problem` if that cannot be read."""
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
        """Return the newest checkpoint at a version or before it."""
        saved = self._facts.checkpoint_before(version)
        return None if saved is None else {"step": saved.step, "uri": saved.uri, "size_bytes": saved.size_bytes}

    def _samples(self, rows: np.ndarray) -> dict[str, Any]:
        """Return the number of the samples in `rows`, and the first of them."""
        first = [int(row) for row in rows[:_SHOWN_SAMPLES]]
        found = self._columns.rows()
        texts = self._columns.texts(first)
        return {
            "num_samples": len(rows),
            "samples": [row_json(self._columns, found[row], text) for row, text in zip(first, texts, strict=True)],
        }
