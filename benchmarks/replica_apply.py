"""What a replica saves when it takes a delta: digests by torch, places by search, a pause that only scatters.

    python benchmarks/replica_apply.py [--quick] [--repeats N]

Three parts of applying a version, each as it was first written and as it is, in turns on the same data, all on CPU
tensors and one thread. The old ways are written here:

* the digest of a tensor that lies on a device: copied to the host and digested by numpy, against torch's integer
  operations (`torch_digest`), which run where the tensor lies. On a CPU the second one is a check that they agree and
  a price; its gain is a GPU's.
* where the changes of a fused tensor of experts go: every change compared with each of the 2 E boxes, against the
  changes of each box found by search (`Region.span_of`), because positions ascend.
* what the gate is shut for: index and bits converted, copied to the parameter's device and copied again for reading
  back, against scattering what was staged there before the pause (`Write.on`) and counting there.

Figures are CPU seconds of the process, medians of the repeats.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from report import machine, progress, table

from millrace.device_digest import torch_digest
from millrace.inference.vllm.workers.layout import Region, Slot
from millrace.inference.vllm.workers.memory import count_other, scatter
from millrace.policies.digest import bits_digest

EXPERTS, INTERMEDIATE, HIDDEN = 128, 768, 2048
"""Those of a layer of Qwen3-30B-A3B."""


@dataclass(frozen=True, slots=True)
class Case:
    """One thing done in two ways, which have to give the same; `reset` goes before each, and is not counted."""

    name: str
    before: Callable[[], object]
    after: Callable[[], object]
    reset: Callable[[], object] = lambda: None


def digests(elements: int) -> Case:
    """A tensor in bfloat16."""
    bits = torch.from_numpy(np.random.default_rng(0).integers(-(1 << 15), 1 << 15, elements, dtype=np.int16))
    return Case(
        f"digest of {elements / 1e6:.0f} M elements: numpy, torch",
        lambda: bits_digest(bits.clone().numpy().view("u2")),  # the clone is the copy from the device
        lambda: torch_digest(bits),
    )


def boxes() -> list[Region]:
    """Where gate and up projection of each expert lie in the tensor that has them all."""
    half = INTERMEDIATE * HIDDEN
    return [
        Region(
            tensor="experts.gate_up_proj",
            slot=Slot(module="experts", name="w13_weight"),
            shape=(INTERMEDIATE, HIDDEN),
            source_offset=number * half,
            source_strides=(HIDDEN, 1),
            target_offset=number * half,
            target_strides=(HIDDEN, 1),
        )
        for number in range(2 * EXPERTS)
    ]


def places(changes: int) -> Case:
    """Ascending positions of changes in a fused tensor."""
    found = np.random.default_rng(1).integers(0, 2 * EXPERTS * INTERMEDIATE * HIDDEN, changes)
    positions, regions = np.unique(found), boxes()

    def compared() -> bytes:
        every = torch.from_numpy(positions)
        return b"".join(region.targets(every)[1].numpy().tobytes() for region in regions)

    def searched() -> bytes:
        near = (torch.from_numpy(positions[region.span_of(positions)]) for region in regions)
        return b"".join(region.targets(each)[1].numpy().tobytes() for region, each in zip(regions, near, strict=True))

    return Case(f"places of {changes / 1e6:g} M changes in {2 * EXPERTS} boxes: compared, searched", compared, searched)


def pauses(elements: int, share: float) -> Case:
    """A share of a parameter in bfloat16 is written and read back."""
    random = np.random.default_rng(2)
    parameter = torch.zeros(elements, dtype=torch.int16)
    index = np.flatnonzero(random.random(elements) < share)
    bits = random.integers(1, 1 << 15, index.size, dtype=np.uint16)
    staged = (_copied(index), _copied(bits.view("i2")))

    def copied() -> int:
        parameter[_copied(index)] = _copied(bits.view("i2"))
        back = parameter[_copied(index)].clone()
        return int(np.count_nonzero(back.numpy().view("u2") != bits))

    def scattered() -> int:
        scatter(parameter, *staged)
        return count_other(parameter, *staged)

    name = f"pause for {share:.0%} of {elements / 1e6:.0f} M elements: copied in it, staged before"
    return Case(name, copied, scattered, parameter.zero_)


def _copied(values: NDArray[np.signedinteger]) -> torch.Tensor:
    """On the device, which is a copy, also where the device is the host."""
    return torch.from_numpy(values).to("cpu", copy=True)


def measure(case: Case, repeats: int) -> tuple[float, float]:
    """CPU seconds of both ways in turns, the first turn uncounted."""
    taken: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats + 1):
        results = []
        for way, seconds in zip((case.before, case.after), taken, strict=True):
            case.reset()
            began = time.process_time()
            results.append(way())
            seconds.extend([time.process_time() - began] if repeat else [])
        if results[0] != results[1]:
            raise SystemExit(f"{case.name}: the two ways differ")
    return statistics.median(taken[0]), statistics.median(taken[1])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small tensors, one repeat")
    parser.add_argument("--repeats", type=int, help="5 if left out")
    asked = parser.parse_args()
    repeats, scale = asked.repeats or (1 if asked.quick else 5), 64 if asked.quick else 1
    torch.set_num_threads(1)
    cases = [
        lambda: digests((32 << 20) // scale),
        lambda: places(1_000_000 // scale),
        lambda: pauses((64 << 20) // scale, 0.01),
        lambda: pauses((64 << 20) // scale, 0.06),
    ]
    rows = []
    for make in cases:
        case = make()
        progress(case.name)
        before, after = measure(case, repeats)
        rows.append([case.name, f"{before * 1e3:.1f}", f"{after * 1e3:.1f}", f"{before / after:.2f}"])
    head = ["what: before, after", "before, ms", "after, ms", "before / after"]
    print(f"## Applying a delta, {repeats} turns, CPU time\n\n{machine()}\n\n{table(head, rows)}\n")


if __name__ == "__main__":
    main()
