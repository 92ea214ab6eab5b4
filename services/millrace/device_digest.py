"""Digests of tensors where they are: those of `policies.digest`, computed by torch on the tensors' own device.

A GPU digests at the speed of its memory what the host would first have to copy, and then needs a processor minute for;
for tensors on a CPU numpy is faster, and is what is used for them.
"""

import torch

from millrace.policies.digest import BITS_KEY, LAST_SHIFT, MIX, PLACE_KEY, bits_digest, placed_digest

_BLOCK_ELEMENTS = 1 << 24
"""Elements at a time; each takes 40 bytes meanwhile."""
_LANE = 1 << 64
_WIDTHS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def device_digest(tensor: torch.Tensor, *, start: int = 0, positions: torch.Tensor | None = None) -> int:
    """Return the 128-bit digest of a tensor's elements in row-major order; wait for the device that computes it.

    It is computed on the tensor's own device and depends on each element's bits and index. The indices count from
    `start`, that of the first element in a larger whole; `positions`, int64 [N] on the same device, are the elements'
    indices instead. An empty tensor gives 0.
    """
    flat = tensor.detach().reshape(-1)
    if not flat.numel():
        return 0
    bits = flat.view(_WIDTHS[flat.element_size()])
    if bits.device.type == "cpu":
        numbers = bits.numpy().view(f"u{bits.element_size()}")
        return bits_digest(numbers, start=start) if positions is None else placed_digest(numbers, positions.numpy())
    return torch_digest(bits, start=start, positions=positions)


def torch_digest(bits: torch.Tensor, *, start: int = 0, positions: torch.Tensor | None = None) -> int:
    """Return the digest of `device_digest`, computed by torch on any device.

    `bits` are the flat elements as signed integers of their width; `start` and `positions` are those of
    `device_digest`.
    """
    sums = torch.zeros(2, dtype=torch.int64, device=bits.device)
    unsigned = -1 if bits.element_size() == 8 else (1 << 8 * bits.element_size()) - 1
    for begin in range(0, bits.numel(), _BLOCK_ELEMENTS):
        block = bits[begin : begin + _BLOCK_ELEMENTS].to(torch.int64) & unsigned  # widened with zeros
        if positions is None:
            indices = torch.arange(start + begin, start + begin + block.numel(), device=bits.device)
        else:
            indices = positions[begin : begin + _BLOCK_ELEMENTS]
        # Odd, so it has an inverse modulo 2**64: the second sum changes with every change of a term.
        places = (2 * indices + 1) * _signed(PLACE_KEY)
        terms = _mix(block * _signed(BITS_KEY) + places)
        sums[0] += terms.sum()
        sums[1] += (terms * places).sum()
    high, low = (lane % _LANE for lane in sums.tolist())
    return high << 64 | low


def mixed(numbers: torch.Tensor, *, salt: int) -> torch.Tensor:
    """Return int64 bits that look random: a hash of each number (int64) with `salt`, the same for the same input."""
    return _mix((numbers + 1) * _signed(PLACE_KEY) + _signed(salt * BITS_KEY % _LANE))


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Apply SplitMix64's finaliser to int64 `x` in place, modulo 2**64, and return it; shifts fill with zeros."""
    for shift, factor in MIX:
        x ^= (x >> shift) & ((1 << 64 - shift) - 1)
        x *= _signed(factor)
    x ^= (x >> LAST_SHIFT) & ((1 << 64 - LAST_SHIFT) - 1)
    return x


def _signed(number: int) -> int:
    """Return the signed number with the same 64 bits as `number`, which is from 0 to 2**64 - 1."""
    return number - _LANE if number >= _LANE // 2 else number
