"""Smaller parts: the background loop, shards, model directories, staleness."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from millrace.config.sections.trainer import TrainerConfig
from millrace.custom_code import CustomCode
from millrace.errors import CorruptObjectError, InvalidSpecError, InvalidStateError, NotFoundError, UnavailableError
from millrace.internal.v1 import batch_pb2
from millrace.models.files import MODEL_FILES, TOKENIZER_FILES, small_files
from millrace.trainer import job
from millrace.trainer.checkpoint.index import ShardPiece, ShardTensor, decode_index
from millrace.trainer.checkpoint.store import load_shards, needed_files, save_shards
from millrace.trainer.gang.agreement import decode_result, encode_result
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.learning import learner
from millrace.trainer.learning.batch import BatchLayout
from millrace.trainer.learning.learner import Learner, StartModel
from millrace.trainer.log.background import BackgroundLoop
from millrace.trainer.log.batches import Batches
from millrace.trainer.model.pretrained import resolve_model_directory, with_tokenizer, with_turn_stops
from millrace.trainer.model.published import policy_tensors
from millrace.trainer.reporter import staleness, token_staleness
from millrace_testing.turn_templates import CHATML, tokenizer_of


def test_background_calls_return_raise_and_time_out() -> None:
    async def answer() -> int:
        await asyncio.sleep(0)
        return 7

    async def fail() -> None:
        raise NotFoundError("gone")

    async def own_timeout() -> None:
        raise TimeoutError("its own")

    with BackgroundLoop() as loop:
        assert loop.call(answer(), what="asking", timeout_s=10) == 7
        with pytest.raises(NotFoundError, match="gone"):
            loop.call(fail(), what="failing", timeout_s=10)
        with pytest.raises(TimeoutError, match="its own"):
            loop.call(own_timeout(), what="timing out", timeout_s=10)
        with pytest.raises(UnavailableError, match=r"sleeping did not finish within 0\.05 s"):
            loop.call(asyncio.sleep(30), what="sleeping", timeout_s=0.05)
        pending = loop.submit(asyncio.sleep(30))
    assert pending.cancelled()


def _index(directory: Path) -> dict[str, ShardTensor]:
    sizes = {path.name: path.stat().st_size for path in directory.glob("*.bin")}
    return decode_index((directory / "index.json").read_bytes(), sizes=sizes, source="index.json")


def test_shards_restore_every_bit(tmp_path: Path) -> None:
    state = {
        "model.a": torch.randn(4, 3),
        "model.b": torch.randn(5).bfloat16(),
        "optim.a.step": torch.tensor(3.0),
        "rng.cpu.0": torch.get_rng_state(),
    }
    state |= {
        "model.empty": torch.zeros(0, 3),
        "model.flags": torch.tensor([True, False]),
        "model.c": torch.ones(3, 2).T,
    }
    save_shards(state, tmp_path, gang=Gang())
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    index = _index(tmp_path)
    assert needed_files(loaded, index) == {"rank-00000.bin"}
    load_shards(loaded, tmp_path, index)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("names", [{"model.a"}, {"model.a", "model.b", "model.c"}])
def test_shards_of_another_model_are_refused(tmp_path: Path, names: set[str]) -> None:
    save_shards({"model.a": torch.ones(2), "model.b": torch.ones(2)}, tmp_path, gang=Gang())
    with pytest.raises(InvalidStateError, match=r"model\.[bc]") as raised:
        needed_files({name: torch.zeros(2) for name in names}, _index(tmp_path))
    assert raised.value.reason == "CHECKPOINT_MISMATCH"


def test_a_rank_needs_only_the_files_with_what_it_loads() -> None:
    state = {"model.a": torch.ones(300), "rng.cpu.0": torch.ones(300), "rng.cpu.1": torch.ones(300)}
    tensors = [
        ShardTensor(name=name, dtype="float32", shape=(300,), pieces=(ShardPiece(f"{name}.bin", 0, 0, 300),))
        for name in state
    ]
    index = {tensor.name: tensor for tensor in tensors}
    assert needed_files(state, index) == {f"{name}.bin" for name in state}
    mine = {name: state[name] for name in ("model.a", "rng.cpu.1")}
    assert needed_files(mine, index) == {"model.a.bin", "rng.cpu.1.bin"}
    grown = {**mine, "rng.cpu.7": torch.ones(300)}
    assert needed_files(grown, index) == needed_files(mine, index), "a rank that was not there keeps its own"
    for wrong in (
        {"model.a": torch.ones(7)},
        {"model.a": torch.ones(300).bfloat16()},
        {**mine, "model.b": torch.ones(1)},
        {"rng.cpu.0": torch.ones(300)},
    ):
        with pytest.raises(InvalidStateError, match=r"do not fit the model: .*model\.[ab]"):
            needed_files(wrong, index)


def test_a_model_that_another_machine_lacks_is_told_before_anything_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    told, _ = encode_result(lambda: resolve_model_directory(str(tmp_path / "none")), rank=1)

    class Leader(Gang):
        """Rank 0 of two."""

        def gather(self, data: bytes) -> list[bytes]:
            return [data, told]

    config: Any = SimpleNamespace(trainer=SimpleNamespace(model=SimpleNamespace(name=str(tmp_path))))
    monkeypatch.setattr(job, "parse_config", lambda record, uid: config)
    context: Any = SimpleNamespace(gang=Leader(rank=0, world_size=2))
    nothing: Any = SimpleNamespace(uid="run")
    with pytest.raises(NotFoundError, match="none is not a directory") as raised:
        job.prepare(context, nothing, nothing, b"")
    assert raised.value.reason == "MODEL_NOT_FOUND"


class FirstOfTwo(Gang):
    """Rank 0 of two ranks; the other one tells the error that `work` raises there."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__(rank=0, world_size=2)
        self._told, _ = encode_result(work, rank=1)

    def broadcast(self, data: bytes | None) -> bytes:
        return data or b""

    def gather(self, data: bytes) -> list[bytes]:
        return [data, self._told]


def test_a_rank_that_may_not_load_the_loss_tells_the_others(tmp_path: Path) -> None:
    told: list[bytes] = []

    class Second(Gang):
        """Rank 1 of two."""

        def gather(self, data: bytes) -> list[bytes]:
            told.append(data)
            return [encode_result(lambda: None, rank=0)[0], data]

    loss = {"type": "custom", "import_path": "my_losses:fn"}
    config: Any = SimpleNamespace(trainer=TrainerConfig.model_validate({"loss": loss}), seed=0)
    gang = Second(rank=1, world_size=2)
    with pytest.raises(InvalidSpecError, match="MILLRACE_CUSTOM_CODE"):
        Learner.of_start_model(config, gang=gang, directory=tmp_path, start_directory=tmp_path, code=CustomCode())
    with pytest.raises(InvalidSpecError, match="MILLRACE_CUSTOM_CODE"):
        decode_result(told[0])


def test_a_chunk_that_another_rank_finds_damaged_is_told_before_the_batch_is_trained_on() -> None:
    def damaged() -> None:
        raise CorruptObjectError("chunk 1 of batch 0 has another sha256", reason="BATCH_CORRUPT")

    header = batch_pb2.BatchHeader(
        run_uid="run", kind=batch_pb2.BATCH_KIND_TRAIN, run_hash="hash", previous_chain_hash=bytes(32)
    )
    run_log: Any = SimpleNamespace(
        is_stop_requested=lambda: False,
        poll_header=lambda step, *, timeout_s: header.SerializeToString(),
        read_superseded=lambda step, revisions: [],
        read_chunks=lambda step, chunks: {},
        prefetch=lambda step: None,
    )
    batches = Batches(
        run_log,
        gang=FirstOfTwo(damaged),
        run_uid="run",
        run_hash="hash",
        previous_chain_hash=bytes(32),
        layout=BatchLayout(seq_len=8, micro_batch_tokens=16, minibatches=1, packing=None),
    )
    with pytest.raises(CorruptObjectError, match="chunk 1 of batch 0"):
        batches.read(0)


def test_a_start_model_that_another_rank_cannot_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged() -> None:
        raise CorruptObjectError("the weights are damaged", reason="MODEL_CORRUPT")

    monkeypatch.setattr(learner, "open_model", lambda directory, **given: torch.nn.Linear(2, 2))
    sharding: Any = SimpleNamespace(compute_dtype=torch.float32)
    with pytest.raises(CorruptObjectError, match="the weights are damaged"):
        StartModel.load(tmp_path, gang=FirstOfTwo(damaged), sharding=sharding, context_length=8)


def test_a_log_that_another_rank_cannot_open_is_told() -> None:
    def away() -> None:
        raise UnavailableError("rank 1 could not open the log", reason="REDIS_UNREACHABLE")

    epochs: list[int] = []
    context: Any = SimpleNamespace(gang=FirstOfTwo(away), should_stop=lambda: False, on_epoch=epochs.append)
    client: Any = SimpleNamespace(poll_ready=lambda *, timeout_s: True, epoch=3)
    with pytest.raises(UnavailableError, match="rank 1 could not open the log"):
        job.hold_run(context, client)
    assert epochs == [3]


def test_a_model_path_that_does_not_exist_is_not_looked_up_on_the_hub(tmp_path: Path) -> None:
    for name in (str(tmp_path / "none"), "outputs/reverse-text/none", "./none"):
        with pytest.raises(NotFoundError, match=r"is not a directory; set model\.name") as raised:
            resolve_model_directory(name)
        assert raised.value.reason == "MODEL_NOT_FOUND" and raised.value.metadata["model"] == name
    with pytest.raises(NotFoundError, match=r"no config\.json"):
        resolve_model_directory(str(tmp_path))
    for name in ("config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(
        InvalidStateError, match=r"holds an adapter \(adapter_model\.safetensors\).*millrace merge"
    ) as found:
        resolve_model_directory(str(tmp_path))
    assert found.value.reason == "MODEL_IS_ADAPTER"


def test_the_tokenizer_may_come_from_another_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "other"}')
    (tmp_path / "tokenizer.json").write_text('{"other": 1}')
    files = {"config.json": b"{}", "tokenizer.json": b"{}", "chat_template.jinja": b"x"}
    assert with_tokenizer(files, tmp_path) == {"config.json": b"{}", "tokenizer.json": b'{"other": 1}'}


def test_what_is_published_names_the_ends_of_turns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = tokenizer_of(CHATML, eos="<|endoftext|>")
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 300}')
    files = with_turn_stops(small_files(tmp_path, (*MODEL_FILES, *TOKENIZER_FILES)), tmp_path, tokenizer=tmp_path)
    named = set(json.loads(files["generation_config.json"])["eos_token_id"])
    assert named == {300, *tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])}
    assert with_turn_stops({"config.json": b"{}"}, tmp_path, tokenizer=tmp_path) == {"config.json": b"{}"}
    (tmp_path / "tokenizer.json").write_text("{")  # one whose code is not here does not load, either
    files = small_files(tmp_path, (*MODEL_FILES, *TOKENIZER_FILES))
    assert with_turn_stops(files, tmp_path, tokenizer=tmp_path) == files
    assert "where the model's configs say" in caplog.text


def test_tied_tensors_are_published_once_in_the_asked_dtype() -> None:
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(4, 2), "head": torch.nn.Linear(2, 4, bias=False)})
    model["head"].weight = model["embed"].weight  # type: ignore[assignment]
    tensors = dict(policy_tensors(model, dtype=torch.bfloat16))
    assert list(tensors) == ["embed.weight"]
    weight = tensors["embed.weight"]
    assert (weight.dtype, weight.shape) == ("bfloat16", (4, 2))
    expected = model["embed"].weight.detach().bfloat16().view(torch.int16).numpy().tobytes()  # type: ignore[operator]
    assert bytes(weight.data) == expected


def test_staleness_is_per_rollout_by_its_oldest_token() -> None:
    header = batch_pb2.BatchHeader(step=9)
    for ordinal, member, version in ((1, 0, 8), (1, 0, 6), (1, 1, 9)):  # the first rollout has two samples
        header.samples.add(ordinal=ordinal, member=member, min_policy_version=version, max_policy_version=9)
    assert staleness(header) == (1.5, 3)
    assert staleness(batch_pb2.BatchHeader(step=9)) == (0.0, 0)


def test_staleness_by_token_is_over_sampled_tokens_and_by_environment() -> None:
    """Step 9. Environment a: 3 tokens of version 8 and 1 of version 4. b: 4 tokens of version 9."""
    header = batch_pb2.BatchHeader(step=9, envs=["a", "b"])
    header.samples.add(env=0, min_policy_version=4, max_policy_version=8, mean_policy_version=7.0, num_sampled_tokens=4)
    header.samples.add(env=1, min_policy_version=9, max_policy_version=9, mean_policy_version=9.0, num_sampled_tokens=4)
    assert token_staleness(header) == {
        "staleness/mean": 1.0,
        "staleness/max": 5.0,
        "staleness/a/mean": 2.0,
        "staleness/a/max": 5.0,
        "staleness/b/mean": 0.0,
        "staleness/b/max": 0.0,
    }
    header.samples[0].ClearField("mean_policy_version")
    assert token_staleness(header).keys() == {
        f"staleness{env}/{name}" for env in ("", "/b") for name in ("mean", "max")
    }
