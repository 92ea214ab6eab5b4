"""Whether a checkpoint holds what was published: the casts are the publisher's, and names may differ."""

from pathlib import Path

import numpy as np
import pytest
import torch

from millrace.storage.local import LocalStore
from millrace.trainer.checkpoint.index import ShardPiece, ShardTensor, cast, differences, encode_index

FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    unsigned = {2: "<u2", 4: "<u4", 8: "<u8"}[tensor.element_size()]
    return np.frombuffer(tensor.contiguous().view(torch.uint8).numpy().tobytes(), unsigned)


@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
def test_a_cast_is_that_of_torch(source: str, target: str) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(4096, dtype=torch.float64, generator=generator) * 10.0 ** torch.randint(-45, 40, (4096,))
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1.00390625, 1.01171875, 65519.0, 65520.0, 3.4e38, 1e-40])
    numbers = torch.cat([values, special.double()]).to(FLOATS[source])
    expected = bits_of(numbers.to(FLOATS[target]))
    assert np.array_equal(cast(bits_of(numbers), source, target), expected)


def checkpoint(root: Path, tensors: dict[str, torch.Tensor]) -> tuple[LocalStore, dict[str, tuple[str, int]]]:
    """Return a checkpoint of one file, stored."""
    store, data, rows = LocalStore(root), b"", list[ShardTensor]()
    for name, tensor in tensors.items():
        piece = ShardPiece("rank-00000.bin", len(data), 0, tensor.numel())
        dtype = str(tensor.dtype).removeprefix("torch.")
        rows.append(ShardTensor(name=name, dtype=dtype, shape=tuple(tensor.shape), pieces=(piece,)))
        data += tensor.contiguous().view(torch.uint8).numpy().tobytes()
    files = {"rank-00000.bin": data, "index.json": encode_index(rows)}
    for name, content in files.items():
        store.put(name, content)
    return store, {name: (name, len(content)) for name, content in files.items()}


def published(tensor: torch.Tensor, dtype: str = "bfloat16") -> tuple[str, np.ndarray]:
    return dtype, bits_of(tensor.to(FLOATS[dtype]).reshape(-1))


def test_names_of_adapters_and_ranges_of_tensors_are_found(tmp_path: Path) -> None:
    fused, low = torch.randn(4, 3, 2), torch.randn(2, 6)
    state = {"model.experts.up": fused, "model.q.lora_A.weight": low, "optim.q.exp_avg": torch.randn(3)}
    store, files = checkpoint(tmp_path, state)
    policy = {f"experts.{number}.up.weight": published(fused[number]) for number in range(4)}
    policy["base_model.model.q.lora_A.weight"] = published(low, "float32")
    assert list(differences(store, files, policy)) == []
    policy["experts.2.up.weight"] = published(fused[2] + 1)
    assert list(differences(store, files, policy)) == [
        "tensor experts.2.up.weight (bfloat16, 6 elements) is nowhere in it"
    ]


def test_what_has_no_index_is_told(tmp_path: Path) -> None:
    store, files = checkpoint(tmp_path, {"model.a": torch.ones(2)})
    assert list(differences(store, {"rank-00000.bin": files["rank-00000.bin"]}, {})) == ["it has no index"]
    store.put("index.json", b"{")
    assert "cannot be read" in " ".join(differences(store, files, {}))
    store.delete("index.json")
    assert "index.json" in " ".join(differences(store, files, {}))
