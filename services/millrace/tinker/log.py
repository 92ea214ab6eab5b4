"""The log of one model: requests by seq_id, their results, states after some of them, and checkpoints.

A request is stored before it is answered, under its seq_id, create-only; so it counts once however often it is sent.
Results and states follow from the requests: executed again, after the death of a process, they give the same bits, and
what is stored already is compared with them.

All methods block.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from millrace.decoding import Fields, decode_message, decode_object
from millrace.errors import ConflictError, CorruptObjectError, InternalError, MillraceError, NotFoundError
from millrace.internal.v1.tinker_pb2 import ModelVerb, VerbError, VerbResult
from millrace.storage.base import ObjectStore, require_checksum, with_checksum
from millrace.tinker.names import CheckpointPath, ModelName, SamplerName, unknown

logger = logging.getLogger(__name__)

FORMAT = 1
MAX_STATE_BYTES = 1 << 36
FULL, ADAPTER = "full", "adapter"
"""Kinds of states: all that training goes on from, and what a sampler needs."""
USER, SERVER = "user", "server"
"""Whose fault an error is, in the SDK's words."""


def canonical(raw: Mapping[str, Any]) -> bytes:
    """Return JSON with sorted keys and without spaces, so that equal requests have equal bytes."""
    return json.dumps(raw, sort_keys=True, separators=(",", ":")).encode()


def error_of(error: MillraceError) -> VerbError:
    """Return an error as the SDK is answered: what a user can change is category `user`, everything else `server`."""
    category = SERVER if error.code in ("INTERNAL", "UNAVAILABLE", "UNKNOWN") else USER
    return VerbError(message=str(error), category=category)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A state with a name."""

    path: CheckpointPath
    seq_id: int
    """Of the request that made it, after which its state is."""
    kind: str
    created: datetime
    expires: datetime | None
    size_bytes: int
    about: Mapping[str, Any]
    """What the user noted."""


class ModelLog:
    """What is stored for one model."""

    def __init__(self, store: ObjectStore, name: ModelName) -> None:
        self._store = store
        self.name = name

    def append(self, seq_id: int, verb: ModelVerb) -> None:
        """Store a request under its seq_id; ConflictError if that holds another request.

        What the server decided the first time counts: it is no part of the comparison.
        """
        key = self.name.verb(seq_id)
        if self._store.create(key, verb.SerializeToString(deterministic=True)):
            return
        held = self.verb(seq_id)
        if held is None or (held.kind, held.body) != (verb.kind, verb.body):
            raise ConflictError(
                f"seq_id {seq_id} of model {self.name.id} is that of another request, {held.kind if held else 'none'}",
                reason="SEQ_ID_TAKEN",
                remedy="send each request with a seq_id of its own, and repeat one unchanged",
            )

    def verb(self, seq_id: int) -> ModelVerb | None:
        """Return a request; None if it has not arrived."""
        return self._message(ModelVerb, self.name.verb(seq_id))

    def result(self, seq_id: int) -> VerbResult | None:
        """Return the result of a request; None if there is none yet."""
        return self._message(VerbResult, self.name.result(seq_id))

    def put_result(self, seq_id: int, result: VerbResult) -> None:
        """Store the result of a request.

        Raises InternalError (REPLAY_DIFFERS) if another result is stored already.
        """
        data = result.SerializeToString(deterministic=True)
        if not self._store.create(self.name.result(seq_id), data):
            held = self._store.get(self.name.result(seq_id))
            if held != data:
                raise _differs(f"the result of request {seq_id}", self.name)

    def create_error(self, seq_id: int, error: VerbError) -> bool:
        """Store an error as the result of a request, unless it has a result; return whether its result is an error."""
        data = VerbResult(error=error).SerializeToString(deterministic=True)
        if self._store.create(self.name.result(seq_id), data):
            return True
        held = self.result(seq_id)
        return held is not None and held.WhichOneof("result") == "error"

    def put_state(self, seq_id: int, kind: str, data: bytes, *, is_named: bool) -> None:
        """Store the state after a request: its bytes, then a record with their digest, which commits them.

        `is_named` says that a checkpoint or sampler refers to it. Raises InternalError (REPLAY_DIFFERS) if another
        state is stored already.
        """
        key, digest = self.name.state(seq_id, kind), hashlib.sha256(data).hexdigest()
        if not self._store.create(f"{key}.safetensors", data):
            held = self._store.get(f"{key}.safetensors", max_bytes=MAX_STATE_BYTES)
            if hashlib.sha256(held).hexdigest() != digest:
                raise _differs(f"the state after request {seq_id}", self.name)
        about = {"format": FORMAT, "sha256": digest, "size_bytes": len(data), "is_named": is_named}
        self._store.create(f"{key}.json", with_checksum(about))

    def state(self, seq_id: int, kind: str) -> bytes:
        """Return the bytes of the state after a request.

        Raises NotFoundError if there is none, CorruptObjectError if they have another digest than the record says.
        """
        key = self.name.state(seq_id, kind)
        record = read_record(self._store, f"{key}.json", what="the record of a state")
        data = self._store.get(f"{key}.safetensors", max_bytes=MAX_STATE_BYTES)
        if hashlib.sha256(data).hexdigest() != record.hexadecimal("sha256", num_bytes=32):
            raise CorruptObjectError(
                f"{self._store.uri(key)}.safetensors has another sha256 than its record says",
                reason="STATE_DAMAGED",
                remedy="restore it from a backup, or delete its record: the requests before it are executed again",
            )
        return data

    def newest_state(self) -> int | None:
        """Return the seq_id of the newest full state whose request has a result; None if there is none.

        A request that saves a state stores it before its result: where a process died in between it is executed again.
        """
        states = sorted(self._full_states(), reverse=True)
        return next((seq_id for seq_id in states if self.result(seq_id) is not None), None)

    def drop_states(self, *, keep: int) -> None:
        """Delete the full states without a name but the newest `keep`."""
        for seq_id in sorted(self._full_states(), reverse=True)[keep:]:
            key = self.name.state(seq_id, FULL)
            if not read_record(self._store, f"{key}.json", what="the record of a state").flag("is_named"):
                # The record first: what has none is no state.
                self._store.delete(f"{key}.json")
                self._store.delete(f"{key}.safetensors")

    def _full_states(self) -> list[int]:
        """Return the seq_ids of all committed full states."""
        ending = f"/{FULL}.json"
        keys = (info.key.removeprefix(self.name.states) for info in self._store.list(self.name.states))
        return [int(key.removesuffix(ending)) for key in keys if key.endswith(ending)]

    def put_checkpoint(self, path: CheckpointPath, seq_id: int, record: Mapping[str, Any]) -> None:
        """Store that the state after a request has a name; `record` is what `checkpoints` returns of it."""
        self._store.create(self.name.checkpoint(path.folder, path.name, seq_id), with_checksum(record))

    def checkpoint_seqs(self, path: CheckpointPath) -> list[int]:
        """Return the seq_ids of all requests that gave a state this name."""
        prefix = f"{self.name.checkpoints}{path.folder}/{path.name}/"
        return [int(info.key.removeprefix(prefix).removesuffix(".json")) for info in self._store.list(prefix)]

    def checkpoints(self) -> Iterator[Checkpoint]:
        """Yield the checkpoints that have not expired, sorted by path; of equal names the newest."""
        found: dict[str, tuple[str, int]] = {}
        for info in self._store.list(self.name.checkpoints):
            folder_and_name, _, number = info.key.removeprefix(self.name.checkpoints).rpartition("/")
            found[folder_and_name] = info.key, int(number.removesuffix(".json"))
        for place, (key, seq_id) in sorted(found.items()):
            folder, _, name = place.partition("/")
            checkpoint = self._checkpoint(CheckpointPath(self.name.id, folder, name), key, seq_id)
            if checkpoint.expires is None or checkpoint.expires > datetime.now(UTC):
                yield checkpoint

    def find_checkpoint(self, path: CheckpointPath) -> Checkpoint:
        """Return the checkpoint of a path; NotFoundError if there is none, or it has expired."""
        seq_ids = self.checkpoint_seqs(path)
        found = None
        if seq_ids:
            newest = max(seq_ids)
            found = self._checkpoint(path, self.name.checkpoint(path.folder, path.name, newest), newest)
        if found is None or (found.expires is not None and found.expires <= datetime.now(UTC)):
            raise unknown("checkpoint", path)
        return found

    def _checkpoint(self, path: CheckpointPath, key: str, seq_id: int) -> Checkpoint:
        """Read the record of a checkpoint."""
        record = read_record(self._store, key, what="the record of a checkpoint")
        return Checkpoint(
            path=path,
            seq_id=seq_id,
            kind=record.text("kind"),
            created=datetime.fromisoformat(record.text("created")),
            expires=datetime.fromisoformat(record.text("expires")) if record.has("expires") else None,
            size_bytes=record.integer("size_bytes"),
            about=record.entries("about"),
        )

    def _message(self, kind: Any, key: str) -> Any:
        """Return the message under a key; None if there is none."""
        try:
            data = self._store.get(key)
        except NotFoundError:
            return None
        return decode_message(kind, data, what=self._store.uri(key), reason="TINKER_OBJECT_DAMAGED", remedy=_REMEDY)


_REMEDY = "restore the object from a backup of the store"


def read_record(store: ObjectStore, key: str, *, what: str) -> Fields:
    """Return the fields of a stored JSON record, whose checksum is compared; `what` names it in errors.

    Raises NotFoundError if there is none, and CorruptObjectError (TINKER_OBJECT_DAMAGED) if it is damaged.
    """
    raw = decode_object(store.get(key), what=what, reason="TINKER_OBJECT_DAMAGED", remedy=_REMEDY)
    try:
        require_checksum(raw)
        return Fields(raw, what=what)
    except ValueError as error:
        raise CorruptObjectError(
            f"{store.uri(key)}: {error}", reason="TINKER_OBJECT_DAMAGED", remedy=_REMEDY
        ) from error


def sampler_taken(name: SamplerName) -> ConflictError:
    """Make the error that a sampling session with this id has other weights than a request asks for."""
    return ConflictError(
        f"sampling session {name.id} has other weights",
        reason="SAMPLER_TAKEN",
        remedy="give each sampling session of a session a sampling_session_seq_id of its own",
    )


def _differs(what: str, name: ModelName) -> InternalError:
    """Make the error that something came out otherwise when it was computed again."""
    return InternalError(
        f"{what} of model {name.id} came out otherwise when it was computed again",
        reason="REPLAY_DIFFERS",
        remedy="execute it with the processor, the releases and the number of threads of the first time; the stored "
        "requests and states are unchanged",
    )
