"""What torch raises where memory ends is told as that, with the keys that take less of it."""

import json
from pathlib import Path

import pytest
import torch

from millrace.errors import InvalidStateError
from millrace.models.loading import empty_model
from millrace.models.torch_support import shortage_named
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.learning.learner import fill_opened
from millrace.trainer.model.memory import Sharding
from millrace.trainer.model.pretrained import load_model
from millrace.trainer.sft import fine_tune as sft

TOO_MUCH = 1 << 50
GPU = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nGPU 0 has a capacity of …")


def allocate(*_: object, **__: object) -> None:
    """Ask this host for more than any has."""
    torch.empty(TOO_MUCH)


@pytest.mark.parametrize(
    ("error", "said"),
    [(GPU, "CUDA out of memory. Tried to allocate 20.00 GiB."), (MemoryError(), "MemoryError"), (None, "DefaultCPU")],
    ids=["GPU", "Python", "host"],
)
def test_each_kind_of_shortage_is_named(error: Exception | None, said: str) -> None:
    named = shortage_named("train the run")
    with (
        pytest.raises(InvalidStateError, match=r"not enough memory to train the run: .*`millrace estimate`") as raised,
        named,
    ):
        if error is not None:
            raise error
        allocate()
    assert raised.value.reason == "OUT_OF_MEMORY" and said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="sizes differ"), shortage_named("train the run"):
        raise RuntimeError("sizes differ")


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_model_without_room_is_not_called_damaged(
    example: Path, monkeypatch: pytest.MonkeyPatch, is_sharded: bool
) -> None:
    directory = example / "base"
    model = empty_model(directory)
    monkeypatch.setattr("transformers.core_model_loading.convert_and_load_state_dict_in_model", allocate)
    with pytest.raises(InvalidStateError, match=f"not enough memory to load model {directory.name}") as raised:
        if is_sharded:
            sharding = Sharding(compute_dtype=torch.float32)
            fill_opened(model, directory, gang=Gang(rank=0, world_size=2), sharding=sharding)
        load_model(directory)
    assert raised.value.reason == "OUT_OF_MEMORY"


def test_a_fine_tuning_without_room_names_the_keys(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {"name": str(example / "sft.jsonl"), "batch_size": 8, "seq_len": 64}
    document = {"model": {"name": str(example / "base")}, "data": data, "max_steps": 1, "output_dir": str(tmp_path)}
    (tmp_path / "sft.json").write_text(json.dumps(document))
    monkeypatch.setattr("millrace.trainer.sft.fine_tune.token_logprobs", allocate)
    with pytest.raises(InvalidStateError, match=r"not enough memory to fine-tune the model: .*model.ac"):
        sft.run(tmp_path / "sft.json")
