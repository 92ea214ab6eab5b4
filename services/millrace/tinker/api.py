"""What the SDK's calls do with the store: sessions, requests of models and samplers, checkpoints. All methods block.

Nothing here computes. A call that trains or samples stores its request and returns the id of its future, which says
where the request is: so the same future is found after a restart, by any server of the store.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from millrace.decoding import Fields, decode_message, decode_object
from millrace.errors import CorruptObjectError, MillraceError, NotFoundError
from millrace.internal.v1.tinker_pb2 import ForwardBackwardRequest, ModelVerb, VerbResult
from millrace.storage.base import ObjectStore, with_checksum
from millrace.tinker.examples import refused
from millrace.tinker.log import FORMAT, FULL, Checkpoint, ModelLog, canonical, read_record, sampler_taken
from millrace.tinker.names import (
    MAX_NUMBER,
    WEIGHTS,
    CheckpointPath,
    ModelName,
    SamplerName,
    SessionName,
    tenant_folder,
    unknown,
)
from millrace.tinker.states import peft_files

VERBS = ("optim_step", "save_weights", "save_weights_for_sampler", "load_weights")
"""Requests of a model in JSON, by the last part of their path."""
MAX_SEQ_ID = MAX_NUMBER
_MAX_SAMPLE_SEQ = (1 << 63) - 1
_MODEL_FUTURE, _SAMPLE_FUTURE = "model", "sample"


@dataclass(frozen=True, slots=True)
class Future:
    """Where a result is: request `seq_id` of a model or of a sampling session."""

    name: ModelName | SamplerName
    seq_id: int

    @property
    def id(self) -> str:
        """Return the id that the SDK asks with."""
        kind = _MODEL_FUTURE if isinstance(self.name, ModelName) else _SAMPLE_FUTURE
        return f"{kind}/{self.name.id}/{self.seq_id}"


class SessionGoneError(MillraceError):
    """A session has ended: it was finished, or its client sent no heartbeat for long."""

    code = "FAILED_PRECONDITION"
    exit_code = 2
    default_reason = "SESSION_ENDED"


def read_body(data: bytes) -> dict[str, Any]:
    """Return the JSON object in a request's body; InvalidSpecError for anything else."""
    try:
        return decode_object(data or b"{}", what="the body", reason="REQUEST_MALFORMED")
    except CorruptObjectError as error:
        raise refused("body", error.message) from error


class TinkerApi:
    """The calls, for the base model with the names `base_names`, of which the first is the tokenizer's, too."""

    def __init__(self, store: ObjectStore, *, prefix: str, base_names: Sequence[str]) -> None:
        self._store = store
        self._prefix = prefix
        self.base_names = tuple(base_names)

    # Sessions

    def create_session(self, tenant: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Make a session, which belongs to the tenant."""
        name = SessionName.new(self._prefix, tenant)
        about = {key: body.get(key) for key in ("tags", "user_metadata", "sdk_version", "display_name")}
        record = {"format": FORMAT, "created": _now(), "about": about}
        self._store.create(name.record, with_checksum(record))
        return {"type": "create_session", "session_id": name.session}

    def session(self, tenant: str, session_id: object) -> SessionName:
        """Return the name of an open session.

        NotFoundError if there is none of that id, SessionGoneError if it was finished.
        """
        name = SessionName.parse(self._prefix, tenant, session_id)
        self._require(name)
        if self._store.head(f"{name.root}finished.json") is not None:
            raise SessionGoneError(f"session {name.session} has ended", remedy="make a new ServiceClient")
        return name

    def finish_session(self, tenant: str, session_id: object) -> dict[str, Any]:
        """End a session: nothing more can be asked in it; what it made stays."""
        name = SessionName.parse(self._prefix, tenant, session_id)
        self._require(name)
        self._store.create(f"{name.root}finished.json", with_checksum({"format": FORMAT, "ended": _now()}))
        return {}

    def describe_session(self, tenant: str, session_id: object) -> dict[str, Any]:
        """Return which models and sampling sessions a session has, also when it has ended."""
        name = SessionName.parse(self._prefix, tenant, session_id)
        about = self._require(name).entries("about")
        samplers = (info.key for info in self._store.list(f"{name.root}samplers/"))
        numbers = [int(key.rpartition("/")[2].removesuffix(".json")) for key in samplers]
        return {
            "training_run_ids": [each.id for each in self._models(name)],
            "sampler_ids": [SamplerName(name, number).id for number in numbers],
            "user_metadata": about.get("user_metadata"),
            "display_name": about.get("display_name"),
        }

    def _require(self, name: SessionName) -> Fields:
        """Return the record of a session; NotFoundError if there is none."""
        try:
            return read_record(self._store, name.record, what="the record of a session")
        except NotFoundError:
            raise unknown("session", name.session) from None

    def _sessions(self, tenant: str) -> Iterator[SessionName]:
        """Yield all sessions of a tenant."""
        root = f"{self._prefix}/tinker/{tenant_folder(tenant)}/"
        for folder in self._store.list_prefixes(root):
            yield SessionName(self._prefix, tenant, folder.removeprefix(root).rstrip("/"))

    def _models(self, name: SessionName) -> Iterator[ModelName]:
        """Yield the models of a session."""
        for folder in self._store.list_prefixes(name.root):
            kind, _, number = folder.removeprefix(name.root).rstrip("/").partition("-")
            if kind == "train":
                yield ModelName(name, int(number))

    # Models

    def create_model(self, tenant: str, body: Mapping[str, Any]) -> Future:
        """Store that a model is wanted: a new adapter on the base."""
        fields = Fields(dict(body))
        home = self.session(tenant, body.get("session_id"))
        name = ModelName(home, fields.integer("model_seq_id", most=MAX_SEQ_ID))
        base, optimizer = fields.text("base_model"), body.get("optimizer_config") or {}
        decided: dict[str, Any] = {"base": base}
        if base not in self.base_names:
            decided["error"] = f"this server has the base model {', '.join(self.base_names)}, not {base}"
        elif not isinstance(optimizer, dict) or optimizer.get("type", "adamw") != "adamw":
            decided["error"] = "models here have the optimizer adamw"
        elif not fields.has("lora_config"):
            decided["error"] = "models here are adapters: give lora_config"
        else:
            whole = {"train_unembed": True, "train_mlp": True, "train_attn": True}
            shape = Fields({**whole, **fields.entries("lora_config")})
            # Read once, so that a stored shape can be listed.
            decided["shape"] = {"rank": shape.integer("rank"), **{name: shape.flag(name) for name in whole}}
            if shape.has("seed"):
                decided["shape"]["seed"] = shape.integer("seed")
        return self._append(name, 0, ModelVerb(kind="create_model", body=canonical(body), decided=canonical(decided)))

    def _create_by_load(self, tenant: str, body: Mapping[str, Any]) -> Future:
        """Store that a model is wanted that begins with saved weights."""
        fields = Fields(dict(body))
        home = self.session(tenant, body.get("session_id"))
        name = ModelName(home, fields.integer("model_seq_id", most=MAX_SEQ_ID))
        decided = self._resolve(tenant, body.get("path"))
        decided["optimizer"] = fields.flag("optimizer")
        wanted = body.get("base_model")
        if wanted is not None and wanted not in self.base_names:
            decided["error"] = f"this server has the base model {', '.join(self.base_names)}, not {wanted}"
        return self._append(name, 0, ModelVerb(kind="load_weights", body=canonical(body), decided=canonical(decided)))

    def _resolve(self, tenant: str, path: object) -> dict[str, Any]:
        """Return which saved state a path names now, with the shape and base of its model, or the error."""
        try:
            found, name = self._checkpoint(tenant, path)
        except NotFoundError as error:
            return {"error": str(error)}
        if found.kind != FULL:
            return {"error": f"{path} is of a sampler: it has no state to train from, which save_state makes"}
        about = self._decided(name)
        return {
            "source": {"model": name.id, "seq_id": found.seq_id},
            "shape": about.entries("shape"),
            "base": about.text("base"),
        }

    def forward_backward(self, tenant: str, data: bytes) -> Future:
        """Store a request to compute a loss and its gradient."""
        try:
            request = decode_message(
                ForwardBackwardRequest, data, what="the body", reason="REQUEST_MALFORMED", max_bytes=len(data)
            )
        except CorruptObjectError as error:
            raise refused("body", error.message) from error
        name = self._open_model(tenant, request.model_id)
        # Written anew with sorted maps: a repeated request has equal bytes then.
        verb = ModelVerb(kind="forward_backward", body=request.SerializeToString(deterministic=True), decided=b"{}")
        return self._append(name, request.seq_id, verb)

    def verb(self, tenant: str, kind: str, body: Mapping[str, Any]) -> Future:
        """Store a request of a model in JSON; `kind` is one of `VERBS`."""
        if kind == "load_weights" and body.get("session_id") is not None:
            return self._create_by_load(tenant, body)
        name = self._open_model(tenant, body.get("model_id"))
        seq_id = Fields(dict(body)).integer("seq_id", most=MAX_SEQ_ID)
        decided = self._resolve(tenant, body.get("path")) if kind == "load_weights" else {}
        return self._append(name, seq_id, ModelVerb(kind=kind, body=canonical(body), decided=canonical(decided)))

    def _open_model(self, tenant: str, model_id: object) -> ModelName:
        """Return the name of a model whose session is open; NotFoundError if there is none."""
        name = ModelName.parse(self._prefix, tenant, model_id)
        self.session(tenant, name.home.session)
        self._decided(name)
        return name

    def _append(self, name: ModelName, seq_id: int, verb: ModelVerb) -> Future:
        """Store a request, and return its future."""
        if not 0 <= seq_id <= MAX_SEQ_ID or (seq_id == 0 and verb.kind not in ("create_model", "load_weights")):
            raise refused("seq_id", f"must be 1 to {MAX_SEQ_ID}", seq_id)
        ModelLog(self._store, name).append(seq_id, verb)
        return Future(name, seq_id)

    def _decided(self, name: ModelName) -> Fields:
        """Return what was decided when a model was asked for; NotFoundError if it was not."""
        verb = ModelLog(self._store, name).verb(0)
        if verb is None:
            raise unknown("model", name.id)
        return Fields(decode_object(verb.decided, what="what the server decided", reason="TINKER_OBJECT_DAMAGED"))

    def get_info(self, tenant: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a model is."""
        name = ModelName.parse(self._prefix, tenant, body.get("model_id"))
        base, shape = self._about(name)
        return {
            "type": "get_info",
            "model_id": name.id,
            "model_name": base,
            "model_data": {"model_name": base, "tokenizer_id": base, "arch": None},
            "is_lora": True,
            "lora_rank": shape.integer("rank"),
        }

    def _about(self, name: ModelName) -> tuple[str, Fields]:
        """Return a model's base and the shape of its adapter; NotFoundError if it could not be made."""
        decided = self._decided(name)
        shape = decided.inner("shape") if decided.has("shape") else None
        if shape is None:
            raise unknown("model", name.id)
        return decided.text("base"), shape

    # Samplers

    def create_sampling_session(self, tenant: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Make a sampling session of the base or of saved weights; the same again is the same session."""
        home = self.session(tenant, body.get("session_id"))
        number = Fields(dict(body)).integer("sampling_session_seq_id", most=MAX_SEQ_ID)
        name, path = SamplerName(home, number), body.get("model_path")
        record: dict[str, Any] = {"format": FORMAT, "path": path, "model": None}
        if path is None:
            if body.get("base_model") not in self.base_names:
                raise refused("base_model", f"must be {', '.join(self.base_names)}", body.get("base_model"))
        else:
            found, model = self._checkpoint(tenant, path)
            record |= {"model": model.id, "seq_id": found.seq_id, "kind": found.kind}
        if not self._store.create(name.record, with_checksum(record)):
            _, held = self._sampler(tenant, name.id)
            held_path = held.text("path") if held.has("path") else None
            if held_path != path or (path is None and held.has("model")):
                raise sampler_taken(name)
        return {"type": "create_sampling_session", "sampling_session_id": name.id}

    def get_sampler(self, tenant: str, sampler_id: object) -> dict[str, Any]:
        """Return which weights a sampling session has."""
        name, record = self._sampler(tenant, sampler_id)
        base = self.base_names[0]
        if record.has("model"):
            base, _ = self._about(ModelName.parse(self._prefix, tenant, record.text("model")))
        path = record.text("path") if record.has("path") else None
        return {"sampler_id": name.id, "base_model": base, "model_path": path}

    def _sampler(self, tenant: str, sampler_id: object) -> tuple[SamplerName, Fields]:
        """Return a sampling session's name and record; NotFoundError if there is none."""
        name = SamplerName.parse(self._prefix, tenant, sampler_id)
        try:
            return name, read_record(self._store, name.record, what="a sampling session")
        except NotFoundError:
            raise unknown("sampling session", sampler_id) from None

    def sample(self, tenant: str, body: Mapping[str, Any]) -> tuple[Future, list[str]]:
        """Store a request for samples, and return its future and an id for each sample.

        InvalidSpecError if its seq_id holds another request.
        """
        fields = Fields(dict(body))
        if body.get("sampling_session_id") is None:
            raise refused("sampling_session_id", "must be given: make a sampling client first")
        name, _ = self._sampler(tenant, body.get("sampling_session_id"))
        self.session(tenant, name.home.session)
        seq_id = fields.integer("seq_id", most=_MAX_SAMPLE_SEQ)
        count, data = fields.integer("num_samples", least=1, most=1 << 10), canonical(body)
        key = name.request(seq_id)
        if not self._store.create(key, data) and self._store.get(key) != data:
            raise refused("seq_id", "holds another request of this sampling session", seq_id)
        return Future(name, seq_id), [f"{name.id}/{seq_id}/{number}" for number in range(count)]

    # Futures

    def future(self, tenant: str, request_id: object) -> Future:
        """Return the future of an id, whose request is stored; NotFoundError if there is none."""
        kind, _, rest = request_id.partition("/") if isinstance(request_id, str) else ("", "", "")
        name_id, _, number = rest.rpartition("/")
        if (
            kind not in (_MODEL_FUTURE, _SAMPLE_FUTURE)
            or not (number.isascii() and number.isdigit())
            or len(number) > 19
        ):
            raise unknown("request", request_id)
        of = ModelName if kind == _MODEL_FUTURE else SamplerName
        found = Future(of.parse(self._prefix, tenant, name_id), int(number))
        key = found.name.verb(found.seq_id) if isinstance(found.name, ModelName) else found.name.request(found.seq_id)
        if self._store.head(key) is None:
            raise unknown("request", request_id)
        return found

    def result(self, future: Future) -> VerbResult | None:
        """Return the result of a request; None if there is none yet."""
        try:
            data = self._store.get(future.name.result(future.seq_id))
        except NotFoundError:
            return None
        return decode_message(VerbResult, data, what="a result", reason="TINKER_OBJECT_DAMAGED")

    def missing_before(self, future: Future, *, executed: int) -> int | None:
        """Return the smallest seq_id from `executed` on, up to the future's, that has not arrived; None if all have."""
        if isinstance(future.name, SamplerName):
            return None
        name = future.name
        # Where nothing is known, as after a restart: a state has all that came before it.
        executed = executed or (ModelLog(self._store, name).newest_state() or 0)
        # `head`: requests have megabytes.
        return next((n for n in range(executed, future.seq_id) if self._store.head(name.verb(n)) is None), None)

    # Checkpoints

    def _checkpoint(self, tenant: str, path: object) -> tuple[Checkpoint, ModelName]:
        """Return the checkpoint of a path and its model; NotFoundError if the tenant has none there."""
        parsed = CheckpointPath.parse(path)
        name = ModelName.parse(self._prefix, tenant, parsed.model_id)
        return ModelLog(self._store, name).find_checkpoint(parsed), name

    def weights_info(self, tenant: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return of which base and shape saved weights are."""
        _, name = self._checkpoint(tenant, body.get("tinker_path") or body.get("path"))
        base, shape = self._about(name)
        flags = {key: shape.flag(key) for key in ("train_unembed", "train_mlp", "train_attn")}
        return {"base_model": base, "is_lora": True, "lora_rank": shape.integer("rank"), **flags}

    def checkpoints(self, tenant: str, model_id: object) -> list[dict[str, Any]]:
        """Return the checkpoints of a model."""
        name = ModelName.parse(self._prefix, tenant, model_id)
        self._decided(name)
        return [_shown(each) for each in ModelLog(self._store, name).checkpoints()]

    def training_runs(self, tenant: str) -> list[dict[str, Any]]:
        """Return all models of a tenant; what could not be made is none."""
        names = (name for home in self._sessions(tenant) for name in self._models(home))
        return [self.training_run(tenant, name.id) for name in names if self._decided(name).has("shape")]

    def training_run(self, tenant: str, model_id: object) -> dict[str, Any]:
        """Return one model with its newest checkpoints; NotFoundError if it could not be made."""
        name = ModelName.parse(self._prefix, tenant, model_id)
        base, shape = self._about(name)
        saved = sorted(ModelLog(self._store, name).checkpoints(), key=lambda each: each.created)
        by_folder = {
            is_full: [_shown(c) for c in saved if (c.path.folder == WEIGHTS) is is_full] for is_full in (True, False)
        }
        first = self._store.head(name.verb(0))
        last = datetime.fromtimestamp(first.modified, UTC).isoformat() if first else _now()
        return {
            "training_run_id": name.id,
            "base_model": base,
            "model_owner": tenant,
            "is_lora": True,
            "lora_rank": shape.integer("rank"),
            "last_request_time": by_folder[True][-1]["time"] if by_folder[True] else last,
            "last_checkpoint": by_folder[True][-1] if by_folder[True] else None,
            "last_sampler_checkpoint": by_folder[False][-1] if by_folder[False] else None,
        }

    def peft_files(self, tenant: str, model_id: object, checkpoint_id: str) -> dict[str, bytes]:
        """Return the adapter of a checkpoint as PEFT's files, by name; `checkpoint_id` is `{folder}/{name}`."""
        found, name = self._checkpoint(tenant, f"tinker://{model_id}/{checkpoint_id}")
        base, shape = self._about(name)
        data = ModelLog(self._store, name).state(found.seq_id, found.kind)
        return peft_files(data, is_full=found.kind == FULL, rank=shape.integer("rank"), base=base)


def _shown(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return a checkpoint as the SDK reads it."""
    path = checkpoint.path
    return {
        "checkpoint_id": f"{path.folder}/{path.name}",
        "checkpoint_type": "training" if path.folder == WEIGHTS else "sampler",
        "time": checkpoint.created.isoformat(),
        "tinker_path": str(path),
        "size_bytes": checkpoint.size_bytes,
        "public": False,
        "user_metadata": dict(checkpoint.about),
        "expires_at": None if checkpoint.expires is None else checkpoint.expires.isoformat(),
    }


def _now() -> str:
    """Return the time of now in UTC."""
    return datetime.now(UTC).isoformat()
