"""Executes the stored requests of models, each model's in the order of their seq_ids, one after the other.

    state after request m ──▶ request m+1, m+2, … ──▶ results, states, checkpoints, samplers

What an executor holds in memory follows from what is stored: a newer state, or else the requests again. So a process
that dies loses nothing and counts nothing twice. A request with an error as its result changed nothing, and is left out
when requests are executed again.
"""

import dataclasses
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from millrace.backoff import Backoff
from millrace.decoding import Fields, decode_message, decode_object
from millrace.errors import AlreadyExistsError, InternalError, InvalidStateError, MillraceError, UnavailableError
from millrace.internal.v1.tinker_pb2 import ForwardBackwardRequest, ModelVerb, VerbError, VerbResult
from millrace.storage.base import ObjectStore, with_checksum
from millrace.tinker.examples import loss_config, output_of, read_examples, refused
from millrace.tinker.log import (
    ADAPTER,
    FORMAT,
    FULL,
    SERVER,
    USER,
    ModelLog,
    canonical,
    error_of,
    read_record,
    sampler_taken,
)
from millrace.tinker.losses import find_loss
from millrace.tinker.names import (
    MAX_NUMBER,
    SAMPLER_WEIGHTS,
    WEIGHTS,
    CheckpointPath,
    ModelName,
    SamplerName,
    is_checkpoint_name,
)
from millrace.tinker.training import AdapterShape, SharedBase, StepParams, TrainedAdapter

logger = logging.getLogger(__name__)

MAX_RESIDENT = 64
"""Models whose adapters are in memory; the one that was used least recently goes."""
_KEPT_STATES = 2
_RETRY = Backoff(0.5, 30.0)

Note = Callable[[Mapping[str, Any]], None]


@dataclass(slots=True, kw_only=True)
class _Resident:
    """A model in memory, as it is before request `next_seq`."""

    log: ModelLog
    adapter: TrainedAdapter | None
    """None where the model could not be made, which the result of its first request says."""
    next_seq: int
    stored: int = -1
    """The newest request after which a state is stored; -1 if there is none."""


class VerbExecutor:
    """Executes requests of all models on one base. For one thread."""

    def __init__(
        self,
        store: ObjectStore,
        base: SharedBase,
        *,
        base_digest: str,
        note: Note,
        snapshot_verbs: int,
    ) -> None:
        """Make an executor with no model in memory.

        `note` is called before and after each request, and where a model cannot go on. `base_digest` is that of the
        base's files. After `snapshot_verbs` requests without a state one is stored: as many are executed again at most
        after a death.
        """
        self._store = store
        self._base = base
        self._digest = base_digest
        self._note = note
        self._snapshot_verbs = snapshot_verbs
        self._residents: OrderedDict[ModelName, _Resident] = OrderedDict()
        self._waiting: OrderedDict[ModelName, float] = OrderedDict()
        """Models that may have requests, with the time (monotonic) from which on they are looked at."""
        self._failures: dict[ModelName, int] = {}

    def look(self, name: ModelName) -> None:
        """Note that a model may have requests that were not executed."""
        self._waiting.setdefault(name, 0.0)

    def pause_s(self) -> float | None:
        """Return the seconds until `work` may have something to do; None if no model waits."""
        if not self._waiting:
            return None
        return max(0.0, min(self._waiting.values()) - time.monotonic())

    def work(self) -> None:
        """Execute one request of the model that has waited for longest, if one may be executed now."""
        now = time.monotonic()
        name = next((name for name, since in self._waiting.items() if since <= now), None)
        if name is None:
            return
        del self._waiting[name]
        try:
            if self._next(name):
                self._waiting.setdefault(name, 0.0)
            self._failures.pop(name, None)
        except UnavailableError as error:
            self._residents.pop(name, None)
            self._failures[name] = self._failures.get(name, 0) + 1
            delay_s = _RETRY.after(self._failures[name])
            self._waiting[name] = now + delay_s
            logger.warning("a model waits", extra={"model": name.id, "error": str(error), "retry_s": delay_s})
        except MillraceError as error:
            # What is stored contradicts itself or the base: nothing is executed until somebody looks.
            self._residents.pop(name, None)
            logger.error("a model cannot go on", extra={"model": name.id, "error": str(error)})
            self._note({"kind": "broken", **_of(name), "error": str(error)})

    def _next(self, name: ModelName) -> bool:
        """Execute the model's next request, and return whether there was one."""
        resident = self._resident(name)
        seq_id = resident.next_seq
        verb = resident.log.verb(seq_id)
        if verb is None:
            return False
        held = resident.log.result(seq_id)
        if held is None or held.WhichOneof("result") != "error":
            self._note({"kind": "begin", **_of(name), "seq_id": seq_id})
            self._execute(resident, seq_id, verb)
        resident.next_seq = seq_id + 1
        # Not what a failed request may have changed in part: that model is read again.
        if self._residents.get(name) is resident and seq_id - resident.stored >= self._snapshot_verbs:
            self._snapshot(resident)
        self._note({"kind": "done", **_of(name), "seq_id": seq_id})
        return True

    def _execute(self, resident: _Resident, seq_id: int, verb: ModelVerb) -> None:
        """Execute one request, and store its result.

        What is wrong with the request becomes its result, and so does an error of foreign code, after which the model
        is read again. Errors of the store are raised.
        """
        try:
            result = self._result(resident, seq_id, verb)
        except MillraceError as error:
            if error_of(error).category != USER:
                raise
            result = VerbResult(error=error_of(error))
        except ValueError as error:  # of a field of the body
            result = VerbResult(error=VerbError(message=f"{verb.kind}: {error}", category=USER))
        except Exception as error:  # the edge of torch: such as memory that ran out
            logger.exception("a request failed", extra={"model": resident.log.name.id, "seq_id": seq_id})
            result = VerbResult(error=VerbError(message=f"{type(error).__name__}: {error}", category=SERVER))
            # The adapter may have been changed in part; the request is left out when the model is read again.
            self._residents.pop(resident.log.name, None)
            if not resident.log.create_error(seq_id, result.error):
                raise InternalError(
                    f"request {seq_id} of model {resident.log.name.id} had a result, and failed when it was executed "
                    f"again: {result.error.message[:1000]}",
                    reason="REPLAY_FAILED",
                    remedy="restart the server with more memory; the stored requests and states are unchanged",
                ) from error
            return
        resident.log.put_result(seq_id, result)

    def _result(self, resident: _Resident, seq_id: int, verb: ModelVerb) -> VerbResult:
        """Return the result of a request, after which the model is as the request says.

        Raises an error before anything is changed.
        """
        decided = Fields(decode_object(verb.decided, what="what the server decided", reason="TINKER_OBJECT_DAMAGED"))
        if decided.has("error"):
            raise refused(verb.kind, decided.text("error", most=1 << 12))
        if seq_id == 0:
            return self._create(resident, verb, decided)
        if resident.adapter is None:
            raise InvalidStateError(
                f"model {resident.log.name.id} was never made",
                reason="NO_MODEL",
                remedy="see the error of its creation",
            )
        if verb.kind == "forward_backward":
            return self._forward_backward(resident.adapter, verb)
        body = Fields(decode_object(verb.body, what=f"the body of {verb.kind}", reason="REQUEST_MALFORMED"))
        match verb.kind:
            case "optim_step":
                metrics = resident.adapter.step(_adam_params(body))
                return VerbResult(json=canonical({"metrics": metrics}))
            case "save_weights":
                return self._save(resident, seq_id, body)
            case "save_weights_for_sampler":
                return self._save_for_sampler(resident, seq_id, body)
            case "load_weights":
                self._load(resident, resident.adapter, decided, with_optimizer=body.flag("optimizer"))
                return VerbResult(json=canonical({"path": body.text("path"), "type": "load_weights"}))
            case kind:
                raise refused("type", "must be a request of a model", kind)

    def _create(self, resident: _Resident, verb: ModelVerb, decided: Fields) -> VerbResult:
        """Make the model's adapter, new or with saved weights."""
        name = resident.log.name
        adapter = self._base.new_adapter(read_shape(decided, name))
        made = {"model_id": name.id, "type": verb.kind, "base_digest": self._digest}
        if decided.has("source"):
            self._load(resident, adapter, decided, with_optimizer=decided.flag("optimizer"))
            body = Fields(decode_object(verb.body, what="the body of load_weights", reason="REQUEST_MALFORMED"))
            made["path"] = body.text("path")
        resident.adapter = adapter
        return VerbResult(json=canonical(made))

    def _forward_backward(self, adapter: TrainedAdapter, verb: ModelVerb) -> VerbResult:
        """Compute a loss, and its gradient unless only the loss is asked for."""
        request = decode_message(
            ForwardBackwardRequest, verb.body, what="a forward_backward request", reason="REQUEST_MALFORMED"
        )
        loss, config = find_loss(request.loss_fn, loss_config(request))
        examples = read_examples(
            request, inputs=loss.inputs, vocab_size=self._base.vocab_size, max_tokens=self._base.max_tokens
        )
        logprobs, total = self._base.forward_backward(adapter, examples, loss, config, learns=not request.forward_only)
        return VerbResult(protobuf=output_of(logprobs, {"loss:sum": total}))

    def _save(self, resident: _Resident, seq_id: int, body: Fields) -> VerbResult:
        """Store the model's state under a name."""
        name = _checkpoint_name(body, seq_id)
        path = CheckpointPath(resident.log.name.id, WEIGHTS, name)
        has_earlier = any(other < seq_id for other in resident.log.checkpoint_seqs(path))
        if has_earlier and not (body.has("overwrite") and body.flag("overwrite")):
            raise AlreadyExistsError(
                f"{path} exists", reason="CHECKPOINT_EXISTS", remedy="save under another name, or with overwrite"
            )
        assert resident.adapter is not None
        data = resident.adapter.export()
        resident.log.put_state(seq_id, FULL, data, is_named=True)
        resident.stored = seq_id
        self._put_checkpoint(resident.log, path, seq_id, FULL, body, size_bytes=len(data))
        return VerbResult(json=canonical({"path": str(path), "type": "save_weights"}))

    def _save_for_sampler(self, resident: _Resident, seq_id: int, body: Fields) -> VerbResult:
        """Store the adapter's weights, under a name, or for a new sampling session."""
        assert resident.adapter is not None
        log = resident.log
        is_named = body.has("path")
        if not is_named and not body.has("sampling_session_seq_id"):
            raise refused("path", "must be given, or sampling_session_seq_id")
        name = _checkpoint_name(body, seq_id) if is_named else ""
        number = 0 if is_named else body.integer("sampling_session_seq_id", most=MAX_NUMBER)
        data = resident.adapter.export_weights()
        log.put_state(seq_id, ADAPTER, data, is_named=True)
        kind = {"type": "save_weights_for_sampler"}
        if is_named:
            path = CheckpointPath(log.name.id, SAMPLER_WEIGHTS, name)
            self._put_checkpoint(log, path, seq_id, ADAPTER, body, size_bytes=len(data))
            return VerbResult(json=canonical({"path": str(path), **kind}))
        sampler = SamplerName(log.name.home, number)
        record = {"format": FORMAT, "model": log.name.id, "seq_id": seq_id, "kind": ADAPTER, "path": None}
        if not self._store.create(sampler.record, with_checksum(record)):
            held = read_record(self._store, sampler.record, what="a sampling session")
            same = held.has("model") and held.text("model") == log.name.id and held.integer("seq_id") == seq_id
            if not same:
                raise sampler_taken(sampler)
        return VerbResult(json=canonical({"sampling_session_id": sampler.id, **kind}))

    def _put_checkpoint(
        self, log: ModelLog, path: CheckpointPath, seq_id: int, kind: str, body: Fields, *, size_bytes: int
    ) -> None:
        """Store the record of a checkpoint that a request asks for."""
        now = datetime.now(UTC)
        ttl_s = body.integer("ttl_seconds", least=1) if body.has("ttl_seconds") else None
        record = {
            "format": FORMAT,
            "kind": kind,
            "created": now.isoformat(),
            "expires": None if ttl_s is None else (now + timedelta(seconds=ttl_s)).isoformat(),
            "size_bytes": size_bytes,
            "about": body.table("user_metadata") if body.has("user_metadata") else {},
        }
        log.put_checkpoint(path, seq_id, record)

    def _load(self, resident: _Resident, adapter: TrainedAdapter, decided: Fields, *, with_optimizer: bool) -> None:
        """Put the saved state that `decided` names into an adapter, without its gradients."""
        source = decided.inner("source")
        if source is None:
            raise refused("path", "must name a checkpoint")
        home = resident.log.name.home
        # A path of another tenant names nothing here.
        log = ModelLog(self._store, ModelName.parse(home.prefix, home.tenant, source.text("model")))
        data = log.state(source.integer("seq_id"), FULL)
        adapter.restore(data, with_optimizer=with_optimizer, with_gradients=False)

    def _resident(self, name: ModelName) -> _Resident:
        """Return the model, read from its newest state if it is not in memory.

        Raises InvalidStateError (BASE_DIFFERS) if it was made on another base.
        """
        if (found := self._residents.get(name)) is not None:
            self._residents.move_to_end(name)
            return found
        log = ModelLog(self._store, name)
        resident = _Resident(log=log, adapter=None, next_seq=0)
        newest, first = log.newest_state(), log.verb(0)
        if first is not None and newest is not None:
            decided = Fields(
                decode_object(first.decided, what="what the server decided", reason="TINKER_OBJECT_DAMAGED")
            )
            resident.adapter = self._base.new_adapter(read_shape(decided, name))
            resident.adapter.restore(log.state(newest, FULL))
            resident.next_seq, resident.stored = newest + 1, newest
        self._require_base(log)
        self._residents[name] = resident
        while len(self._residents) > MAX_RESIDENT:
            _, oldest = self._residents.popitem(last=False)
            self._snapshot(oldest)
        return resident

    def _require_base(self, log: ModelLog) -> None:
        """Raise InvalidStateError (BASE_DIFFERS) if the model's first result names another base."""
        first = log.result(0)
        if first is None or first.WhichOneof("result") != "json":
            return
        made = Fields(decode_object(first.json, what="a result", reason="TINKER_OBJECT_DAMAGED"))
        if made.text("base_digest") != self._digest:
            raise InvalidStateError(
                f"model {log.name.id} was made on other base weights than this server has",
                reason="BASE_DIFFERS",
                remedy="start the server with the model directory of that time",
            )

    def _snapshot(self, resident: _Resident) -> None:
        """Store the state after the last request that was executed, and delete older states without a name."""
        last = resident.next_seq - 1
        if resident.adapter is None or last <= resident.stored:
            return
        resident.log.put_state(last, FULL, resident.adapter.export(), is_named=False)
        resident.stored = last
        resident.log.drop_states(keep=_KEPT_STATES)


def read_shape(decided: Fields, name: ModelName) -> AdapterShape:
    """Return the shape of a model's adapter, as decided when it was asked for; without a seed one of its id."""
    shape = decided.inner("shape")
    if shape is None:
        raise refused("lora_config", "must be given")
    own = int.from_bytes(hashlib.sha256(name.id.encode()).digest()[:7], "big")
    return AdapterShape(
        rank=shape.integer("rank"),
        seed=shape.integer("seed") if shape.has("seed") else own,
        **{
            field.name: shape.flag(field.name)
            for field in dataclasses.fields(AdapterShape)
            if field.name.startswith("train_")
        },
    )


def _adam_params(body: Fields) -> StepParams:
    """Return what an optimizer step is given; InvalidSpecError for another optimizer, or a field that Adam lacks."""
    if not body.has("adam_params"):
        raise refused("optimizer_params", "must be adam_params: models here have AdamW")
    given = body.entries("adam_params")
    known = {field.name for field in dataclasses.fields(StepParams)}
    for name, value in given.items():
        if name not in known or isinstance(value, bool) or not isinstance(value, int | float):
            raise refused(f"adam_params.{name}", f"must be a number, and one of {', '.join(sorted(known))}", value)
    return StepParams(**{name: float(value) for name, value in given.items()})


def _checkpoint_name(body: Fields, seq_id: int) -> str:
    """Return the name under which a request wants a state, by default its seq_id; InvalidSpecError for a bad name."""
    name = body.text("path") if body.has("path") else f"{seq_id:08d}"
    if not is_checkpoint_name(name):
        raise refused("path", "must be 1 to 128 letters, digits, '.', '_', '-'", name)
    return name


def _of(name: ModelName) -> dict[str, str]:
    """Return the fields of a note that name a model."""
    return {"tenant": name.home.tenant, "model": name.id}
