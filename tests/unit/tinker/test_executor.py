"""The executor of stored requests: whatever it dies at, the next one goes on to the same bits."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.errors import ConflictError, CorruptObjectError, InternalError, NotFoundError, UnavailableError
from millrace.internal.v1 import tinker_pb2 as pb
from millrace.storage.local import LocalStore
from millrace.tinker.api import Future, TinkerApi
from millrace.tinker.executor import VerbExecutor
from millrace.tinker.log import FULL, ModelLog
from millrace.tinker.names import ModelName
from millrace.tinker.training import SharedBase
from millrace_testing.model_files import make_qwen3
from millrace_testing.tinker import datum, loss_request

DATA = [datum([1, 2, 3, 4]), datum([5, 6])]
SNAPSHOT_VERBS = 3


class Died(BaseException):
    """The process was killed."""


class DyingStore:
    """A store at whose operation `at` (from 1) the process dies, before or after the operation is done."""

    def __init__(self, store: LocalStore, *, at: int, is_done: bool) -> None:
        self._store, self._at, self._is_done, self.count = store, at, is_done, 0

    def __getattr__(self, name: str) -> Any:
        call: Callable[..., Any] = getattr(self._store, name)
        if name not in ("create", "get", "delete"):
            return call

        def counted(*args: Any, **more: Any) -> Any:
            self.count += 1
            if self.count == self._at and not self._is_done:
                raise Died
            try:
                return call(*args, **more)
            finally:
                if self.count == self._at:
                    raise Died

        return counted


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> SharedBase:
    return SharedBase(make_qwen3(tmp_path_factory.mktemp("base"), is_tied=True))


def executor(
    store: Any, base: SharedBase, notes: list[dict[str, Any]] | None = None, digest: str = "base"
) -> VerbExecutor:
    note = (lambda message: None) if notes is None else (lambda message: notes.append(dict(message)))
    return VerbExecutor(store, base, base_digest=digest, note=note, snapshot_verbs=SNAPSHOT_VERBS)


class Asked:
    """A model of which a whole loop was asked, in a store of its own."""

    def __init__(self, directory: Path) -> None:
        self.store = LocalStore(directory)
        self.api = TinkerApi(self.store, prefix="test", base_names=("tiny",))
        made = self.api.create_session("", {"tags": []})["session_id"]
        self.session = made
        body = {
            "session_id": made,
            "model_seq_id": 0,
            "base_model": "tiny",
            "lora_config": {"rank": 2, "seed": 1},
        }
        self.name = self.api.create_model("", body).name
        assert isinstance(self.name, ModelName)
        self.log = ModelLog(self.store, self.name)
        self.next = 1

    def ask(self, kind: str, **body: Any) -> Future:
        sent = self.api.verb("", kind, {"model_id": self.name.id, "seq_id": self.next, **body})
        self.next += 1
        return sent

    def loss(self, data: list[pb.Datum] = DATA, **request: Any) -> Future:
        sent = self.api.forward_backward("", loss_request(self.name.id, self.next, data, **request))
        self.next += 1
        return sent

    def loop(self) -> None:
        for number in range(3):
            self.loss()
            self.loss(DATA[:1])
            self.ask("optim_step", adam_params={"learning_rate": 0.01 * (number + 1)})
        self.loss(loss="no_such_loss")
        self.ask("save_weights", path="end")
        self.ask("save_weights_for_sampler", path="end")

    def weights(self) -> bytes:
        files = self.api.peft_files("", self.name.id, "weights/end")
        return files["adapter_model.safetensors"]


def run(made: VerbExecutor, name: ModelName) -> None:
    made.look(name)
    while made.pause_s() is not None:
        made.work()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, base: SharedBase) -> tuple[bytes, int]:
    """Return the weights of a loop, and how many operations of the store it has."""
    asked = Asked(tmp_path_factory.mktemp("unbroken"))
    asked.loop()
    store = DyingStore(asked.store, at=0, is_done=False)
    run(executor(store, base), asked.name)
    return asked.weights(), store.count


@pytest.mark.parametrize("is_done", [False, True])
def test_a_death_at_any_operation_of_the_store_changes_no_bit(
    tmp_path: Path, base: SharedBase, unbroken: tuple[bytes, int], is_done: bool
) -> None:
    weights, count = unbroken
    for at in range(1 + is_done, count + 1, 2):
        asked = Asked(tmp_path / str(at))
        asked.loop()
        with pytest.raises(Died):
            run(executor(DyingStore(asked.store, at=at, is_done=is_done), base), asked.name)
        run(executor(asked.store, base), asked.name)
        assert asked.weights() == weights, f"operation {at}"


def test_short_lives_change_no_bit(tmp_path: Path, base: SharedBase, unbroken: tuple[bytes, int]) -> None:
    asked = Asked(tmp_path)
    asked.loop()
    for _ in range(asked.next):
        made = executor(asked.store, base)
        made.look(asked.name)
        # One more than are executed again at most.
        for _ in range(SNAPSHOT_VERBS + 1):
            made.work()
    assert asked.weights() == unbroken[0]


def test_a_gap_waits_and_models_take_turns(tmp_path: Path, base: SharedBase) -> None:
    asked, notes = Asked(tmp_path), []
    made = executor(asked.store, base, notes)
    asked.next = 2
    late = asked.ask("optim_step", adam_params={})
    run(made, asked.name)
    assert asked.api.result(late) is None and asked.api.missing_before(late, executed=1) == 1
    asked.next = 1
    asked.loss()
    run(made, asked.name)
    result = asked.api.result(late)
    assert result is not None and result.WhichOneof("result") == "json"
    assert [(n["kind"], n["seq_id"]) for n in notes] == [(k, s) for s in range(3) for k in ("begin", "done")]


def test_states_without_a_name_go_and_named_ones_stay(tmp_path: Path, base: SharedBase) -> None:
    asked = Asked(tmp_path)
    asked.ask("save_weights", path="first")
    for _ in range(12):
        asked.loss()
    run(executor(asked.store, base), asked.name)
    kept = [info.key for info in asked.store.list(asked.name.states) if info.key.endswith("full.json")]
    assert [int(key.split("/")[-2]) for key in kept] == [1, 10, 13]


def test_a_request_with_an_error_as_its_result_is_left_out(tmp_path: Path, base: SharedBase) -> None:
    asked = Asked(tmp_path)
    asked.loss()
    poison = asked.loss()
    stepped = asked.ask("optim_step", adam_params={})
    asked.log.create_error(poison.seq_id, pb.VerbError(message="the trainer died 5 times", category="server"))
    run(executor(asked.store, base), asked.name)
    result = asked.api.result(stepped)
    assert result is not None and result.WhichOneof("result") == "json"


def test_results_that_come_out_otherwise_stop_the_model(tmp_path: Path, base: SharedBase) -> None:
    asked, notes = Asked(tmp_path), []
    sent = asked.loss()
    asked.log.put_result(sent.seq_id, pb.VerbResult(protobuf=b"other"))
    after = asked.loss()
    run(executor(asked.store, base, notes), asked.name)
    assert asked.api.result(after) is None
    assert notes[-1]["kind"] == "broken" and "came out otherwise" in notes[-1]["error"]
    with pytest.raises(InternalError, match="came out otherwise"):
        asked.log.put_result(sent.seq_id, pb.VerbResult(protobuf=b"third"))


def test_a_model_of_another_base_is_not_executed(tmp_path: Path, base: SharedBase) -> None:
    asked, notes = Asked(tmp_path), []
    run(executor(asked.store, base), asked.name)
    sent = asked.loss()
    run(executor(asked.store, base, notes, digest="other"), asked.name)
    assert asked.api.result(sent) is None and "other base weights" in notes[-1]["error"]


def test_an_outage_of_the_store_is_waited_for(
    tmp_path: Path, base: SharedBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(tmp_path)
    sent = asked.loss()
    create, failures = asked.store.create, [2]

    def failing(key: str, data: bytes) -> bool:
        if failures[0]:
            failures[0] -= 1
            raise UnavailableError("the store is away", reason="STORE_UNREACHABLE")
        return create(key, data)

    monkeypatch.setattr(asked.store, "create", failing)
    run(executor(asked.store, base), asked.name)
    assert failures == [0] and asked.api.result(sent) is not None


def test_a_damaged_state_is_noticed(tmp_path: Path, base: SharedBase) -> None:
    asked = Asked(tmp_path)
    asked.loop()
    run(executor(asked.store, base), asked.name)
    seq_id = asked.next - 2
    key = asked.name.state(seq_id, FULL)
    damaged = bytearray(asked.log.state(seq_id, FULL))
    damaged[-1] ^= 1
    asked.store.put(f"{key}.safetensors", bytes(damaged))
    with pytest.raises(CorruptObjectError, match="another sha256") as caught:
        asked.log.state(seq_id, FULL)
    assert hashlib.sha256(damaged).hexdigest() not in str(caught.value)


def test_a_seq_id_holds_one_request(tmp_path: Path) -> None:
    asked = Asked(tmp_path)
    first = asked.loss()
    asked.next = first.seq_id
    assert asked.loss() == first, "the same again is the same future"
    asked.next = first.seq_id
    with pytest.raises(ConflictError, match=r"seq_id 1 of model .* is that of another request, forward_backward"):
        asked.ask("optim_step", adam_params={})


def test_another_tenants_ids_are_ids_of_nothing(tmp_path: Path) -> None:
    asked = Asked(tmp_path)
    future = asked.loss()
    asked.ask("save_weights", path="one")
    sampler = asked.api.create_sampling_session(
        "", {"session_id": asked.session, "sampling_session_seq_id": 0, "base_model": "tiny"}
    )["sampling_session_id"]
    model = asked.name.id
    for call in (
        lambda tenant: asked.api.get_info(tenant, {"model_id": model}),
        lambda tenant: asked.api.verb(tenant, "optim_step", {"model_id": model, "seq_id": 9}),
        lambda tenant: asked.api.forward_backward(tenant, loss_request(model, 9, DATA)),
        lambda tenant: asked.api.future(tenant, future.id),
        lambda tenant: asked.api.describe_session(tenant, asked.session),
        lambda tenant: asked.api.finish_session(tenant, asked.session),
        lambda tenant: asked.api.checkpoints(tenant, model),
        lambda tenant: asked.api.weights_info(tenant, {"tinker_path": f"tinker://{model}/weights/one"}),
        lambda tenant: asked.api.get_sampler(tenant, sampler),
        lambda tenant: asked.api.sample(tenant, {"sampling_session_id": sampler, "seq_id": 0, "num_samples": 1}),
    ):
        with pytest.raises(NotFoundError) as caught:
            call("other")
        # The text of an id that never was.
        assert str(caught.value).startswith("there is no ")
    assert asked.api.training_runs("other") == [] and len(asked.api.training_runs("")) == 1


def test_a_request_that_fails_in_its_midst_leaves_no_trace_in_a_state(tmp_path: Path, base: SharedBase) -> None:
    asked, clean = Asked(tmp_path / "failed"), Asked(tmp_path / "clean")
    for each in (asked, clean):
        each.loss()
        each.loss()
    # The third request, after which a state would be stored; torch refuses the rate once it has changed the moments.
    failed = asked.ask("optim_step", adam_params={"learning_rate": 1e200})
    assert failed.seq_id == SNAPSHOT_VERBS
    clean.log.append(3, pb.ModelVerb(kind="optim_step", body=b"{}", decided=b"{}"))
    clean.log.create_error(3, pb.VerbError(message="left out", category="server"))
    clean.next = 4
    results = []
    for each in (asked, clean):
        stepped = each.ask("optim_step", adam_params={"learning_rate": 0.1})
        after = each.loss()
        run(executor(each.store, base), each.name)
        results.append([each.api.result(future) for future in (stepped, after)])
    error = asked.api.result(failed)
    assert error is not None and error.WhichOneof("result") == "error"
    assert results[0] == results[1]
    assert [each is not None and each.WhichOneof("result") for each in results[0]] == ["json", "protobuf"]


def test_a_request_that_had_a_result_and_fails_when_it_is_executed_again_stops_the_model(
    tmp_path: Path, base: SharedBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, notes = Asked(tmp_path), []
    asked.loss()
    run(executor(asked.store, base), asked.name)
    after = asked.loss()

    def failing(*_: Any, **__: Any) -> Any:
        raise MemoryError("no memory")

    monkeypatch.setattr(base, "forward_backward", failing)
    made = executor(asked.store, base, notes)
    made.look(asked.name)
    for _ in range(10):
        made.work()
    assert made.pause_s() is None, "it is tried again and again"
    assert notes[-1]["kind"] == "broken" and "no memory" in notes[-1]["error"]
    assert asked.api.result(after) is None


def test_what_could_not_be_made_is_not_listed(tmp_path: Path, base: SharedBase) -> None:
    asked = Asked(tmp_path)
    body = {"session_id": asked.session, "model_seq_id": 1, "path": f"tinker://{asked.name.id}/weights/none"}
    sent = asked.api.verb("", "load_weights", {**body, "optimizer": True})
    assert isinstance(sent.name, ModelName)
    run(executor(asked.store, base), sent.name)
    made = {"session_id": asked.session, "model_seq_id": 2, "base_model": "tiny"}
    with pytest.raises(ValueError, match="rank"):
        asked.api.create_model("", {**made, "lora_config": {"rank": "eight"}})
    assert [each["training_run_id"] for each in asked.api.training_runs("")] == [asked.name.id]
    with pytest.raises(NotFoundError):
        asked.api.training_run("", sent.name.id)


def test_a_sampling_session_has_the_weights_that_were_asked_for(tmp_path: Path, base: SharedBase) -> None:
    asked = Asked(tmp_path)
    first = asked.ask("save_weights_for_sampler", sampling_session_seq_id=0)
    second = asked.ask("save_weights_for_sampler", sampling_session_seq_id=0)
    asked.ask("save_weights_for_sampler", path="named")
    run(executor(asked.store, base), asked.name)
    held, refused = asked.api.result(first), asked.api.result(second)
    assert held is not None and held.WhichOneof("result") == "json"
    assert refused is not None and "has other weights" in refused.error.message
    wanted = {"session_id": asked.session, "base_model": "tiny"}
    with pytest.raises(ConflictError, match="has other weights"):
        asked.api.create_sampling_session("", {**wanted, "sampling_session_seq_id": 0})
    named = {**wanted, "sampling_session_seq_id": 1, "model_path": f"tinker://{asked.name.id}/sampler_weights/named"}
    assert asked.api.create_sampling_session("", named) == asked.api.create_sampling_session("", named)
    with pytest.raises(ConflictError, match="has other weights"):
        asked.api.create_sampling_session("", {**wanted, "sampling_session_seq_id": 1})


def test_the_missing_request_is_found_without_knowing_what_was_executed(tmp_path: Path, base: SharedBase) -> None:
    asked = Asked(tmp_path)
    for _ in range(4):
        asked.loss()
    run(executor(asked.store, base), asked.name)
    asked.next = 7
    late = asked.loss()
    assert asked.api.missing_before(late, executed=0) == 5
