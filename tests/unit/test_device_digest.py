"""Digests by torch are those by numpy, for every width, start and block."""

import numpy as np
import pytest
import torch

from millrace import device_digest as module
from millrace.device_digest import device_digest, torch_digest
from millrace.policies.digest import bits_digest, placed_digest


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("start", [0, 3, 2**40 + 1])
def test_equal_to_numpys(width: int, start: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_BLOCK_ELEMENTS", 1000)
    bits = np.random.default_rng(width).integers(0, 256, 4321 * width, dtype=np.uint8).view(f"u{width}")
    tensor = torch.from_numpy(bits.view(f"i{width}"))
    assert torch_digest(tensor, start=start) == bits_digest(bits, start=start)
    assert device_digest(tensor.reshape(3, -1) if len(bits) % 3 == 0 else tensor, start=start) == bits_digest(
        bits, start=start
    )
    positions = np.sort(np.random.default_rng(0).choice(10**6, bits.size, replace=False)) + start
    assert torch_digest(tensor, positions=torch.from_numpy(positions)) == placed_digest(bits, positions)


def test_floats_are_digested_by_their_bits():
    values = torch.randn(100, dtype=torch.bfloat16)
    assert device_digest(values, start=5) == bits_digest(values.view(torch.int16).numpy().view("u2"), start=5)
    assert device_digest(torch.empty(0)) == 0
