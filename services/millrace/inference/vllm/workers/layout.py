"""Where each element of a checkpoint is in a vLLM model, and a worker's memory as flat bits.

`load_weights` knows how names are mapped, projections fused and shards cut. It is called once with tensors and
parameters on the meta device, and every copy between the two is noted as a `Region`: which strided box of which tensor
goes to which strided box of which parameter. From then on an update can write single elements, or read the weights,
without the loaders; nothing is assumed about models or parallelism. Parameters that loaders fill by other means than a
plain copy have no region, and are loaded by vLLM's layerwise reload.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

from millrace.device_digest import device_digest
from millrace.inference.vllm.ranks import OrderFiles
from millrace.models.torch_support import BITS, DTYPES
from millrace.policies.digest import bits_digest, placed_digest
from millrace.policies.proof import NextDigests, mismatch
from millrace.policies.tensors import TensorChange, TensorPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A parameter of the model, by the names of its module and within it."""

    module: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A box of `shape` elements that a loader copies; offsets and strides count elements, of tensor and parameter."""

    tensor: str
    slot: Slot
    shape: tuple[int, ...]
    source_offset: int
    source_strides: tuple[int, ...]
    target_offset: int
    target_strides: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Return the number of elements that the box has."""
        return math.prod(self.shape)

    @property
    def key(self) -> str:
        """Return a name of the box among those of its tensor, equal on all ranks that have the same box."""
        return f"{self.source_offset}:{self.shape}"

    @property
    def is_contiguous(self) -> bool:
        """Return whether the box is one range of the tensor, in order, and one range of the parameter."""
        dense = _dense_strides(self.shape)
        return all(
            size == 1 or source == target == want
            for size, source, target, want in zip(
                self.shape, self.source_strides, self.target_strides, dense, strict=True
            )
        )

    @property
    def is_in_runs(self) -> bool:
        """Return whether the box is one range of the parameter, in order, made of runs of the tensor at equal
        distances.

        That is so for a shard cut across rows, such as of output projections in tensor parallelism.
        """
        if self.is_contiguous:
            return True
        is_dense = self.target_strides == _dense_strides(self.shape)
        return is_dense and len(self.shape) == 2 and self.source_strides[1] == 1

    @property
    def end(self) -> int:
        """Return the index in the tensor after the box's last element; only for a box in runs (`is_in_runs`)."""
        length, distance = self._run
        return self.source_offset + (self.num_elements // length - 1) * distance + length if length else 0

    def places(self, first: int, last: int) -> tuple[int, int]:
        """Return the range [begin, end) of the box's elements, counted in order, that are the tensor's elements [first,
        last).

        Only for a box in runs (`is_in_runs`).
        """
        length, distance = self._run
        found: list[int] = []
        for position in (first, last):
            run, rest = divmod(max(0, position - self.source_offset), distance)
            found.append(min(run * length + min(rest, length), self.num_elements))
        return found[0], found[1]

    def places_of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices, among the box's elements in order, of the tensor's elements at `positions` [N].

        All of these must be in the box, which is in runs (`is_in_runs`).
        """
        length, distance = self._run
        run, rest = np.divmod(positions - self.source_offset, distance)
        return run * length + rest

    def digest(self, bits: NDArray[np.unsignedinteger], begin: int) -> int:
        """Return the digest of a part of the box; `bits` are its elements from index `begin` on.

        The digest depends on their places in the tensor, so that digests of parts can be combined. Only for a box in
        runs (`is_in_runs`).
        """
        if self.is_contiguous:
            return bits_digest(bits, start=self.source_offset + begin)
        return placed_digest(bits, self.positions(begin, begin + bits.size).numpy())

    def positions(self, begin: int, end: int, *, device: torch.device | None = None) -> torch.Tensor:
        """Return the positions in the tensor of the box's elements [begin, end), int64, on `device`.

        Only for a box in runs (`is_in_runs`).
        """
        length, distance = self._run
        place = torch.arange(begin, end, device=device)
        return self.source_offset + place // length * distance + place % length

    @property
    def _run(self) -> tuple[int, int]:
        """Return (elements of a run, distance between the first elements of two runs in the tensor)."""
        if self.is_contiguous:
            return self.num_elements, max(1, self.num_elements)
        return self.shape[1], self.source_strides[0]

    def span_of(self, positions: NDArray[np.int64]) -> slice:
        """Return the slice of `positions` [N], which ascend, that is between the box's first and last element in the
        tensor.

        Others are not in the box. A tensor of fused experts has two boxes for each, and the changes of one are a small
        part of all.
        """
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.source_strides, strict=True))
        ends = (self.source_offset, self.source_offset + last + 1) if self.num_elements else (0, 0)
        begin, end = np.searchsorted(positions, ends)
        return slice(int(begin), int(end))

    def targets(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a mask of the tensor's row-major `positions` [N] that are in the box, and the indices of these in
        the parameter's storage.
        """
        # The common case: a contiguous range of the tensor lands in a contiguous range of the parameter.
        if self.is_contiguous:
            inside = (positions >= self.source_offset) & (positions < self.source_offset + self.num_elements)
            return inside, positions[inside] + (self.target_offset - self.source_offset)
        rest, offset = positions, self.source_offset
        inside = torch.ones_like(positions, dtype=torch.bool)
        index = torch.full_like(positions, self.target_offset)
        dims = sorted(zip(self.source_strides, self.shape, self.target_strides, strict=True), reverse=True)
        # Take one dimension after the other, largest stride first: the quotient is the place in it.
        for source, size, target in dims:
            if size == 1:
                continue
            place = rest // source - offset // source
            inside &= (place >= 0) & (place < size)
            index += place * target
            rest, offset = rest % source, offset % source
        # A remainder that differs is between the elements of a strided slice.
        inside &= rest == offset
        return inside, index[inside]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The regions of each tensor, and the shapes of parameters when the loaders fill them.

    `specs` has (shape, strides, dtype) by slot. `opaque` are slots that the loaders wrote to in other ways than copies.
    """

    regions: Mapping[str, tuple[Region, ...]]
    specs: Mapping[Slot, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]
    opaque: frozenset[Slot]


def trace(model: torch.nn.Module, places: Collection[TensorPlace]) -> Layout:
    """Return which part of each tensor of `places` the model's own loaders copy to which part of which parameter.

    The loaders are run on the meta device; the model is as before afterwards.
    """
    try:
        return _trace(model, places, keeps_views=True)
    except RuntimeError:  # of a loader that wants the memory which a view has not
        return _trace(model, places, keeps_views=False)


def _trace(model: torch.nn.Module, places: Collection[TensorPlace], *, keeps_views: bool) -> Layout:
    """Return which part of each tensor of `places` the model's loaders copy to which part of which parameter.

    With `keeps_views`, a part of a tensor that a loader makes contiguous counts as that part; some loaders fail then.
    """
    # vllm is in its own environment, which the type checker does not see.
    from vllm.model_executor.model_loader.reload.layerwise import (  # pyright: ignore[reportMissingImports]
        get_layerwise_info,
    )
    from vllm.model_executor.model_loader.reload.meta import (  # pyright: ignore[reportMissingImports]
        SKIP_TENSORS,
        restore_layer_on_meta,
        to_meta_tensor,
    )

    modules = dict(model.named_modules())
    # Copies of the tables, from which the model's own parameters are put back whatever happens.
    saved = {
        module: (dict(module._parameters), dict(module._buffers), set(module._non_persistent_buffers_set))
        for module in modules.values()
    }
    recorder = _Recorder(modules, keeps_views=keeps_views)
    try:
        # Parameters get the shapes that they have while loaders fill them, which vLLM keeps for its reload.
        for name, module in modules.items():
            info = get_layerwise_info(module)
            if any(info.restore_metadata):
                restore_layer_on_meta(module, info)
            for parameter, tensor in module._parameters.items():
                if tensor is not None and parameter in SKIP_TENSORS:  # such as biases, which a reload leaves in place
                    module._parameters[parameter] = tensor = to_meta_tensor(tensor)
                if tensor is not None and tensor.is_meta:
                    _unwrap_loader(tensor)
                    recorder.add_target(Slot(module=name, name=parameter), tensor)
        # Without memory, because only the copies that the loaders make of them are of interest.
        fakes = [(p.name, torch.empty(p.shape, dtype=DTYPES[p.dtype], device="meta")) for p in places]
        for name, fake in fakes:
            recorder.add_source(name, fake)
        with torch.no_grad(), recorder:
            model.load_weights(fakes)  # pyright: ignore[reportCallIssue] - every vLLM model has it
    finally:
        for module, (parameters, buffers, transient) in saved.items():
            module._parameters.clear()
            module._parameters.update(parameters)
            module._buffers.clear()
            module._buffers.update(buffers)
            module._non_persistent_buffers_set = transient
    return recorder.layout()


def _unwrap_loader(tensor: torch.Tensor) -> None:
    """Remove the wrapper of an earlier layerwise reload from the tensor's loader; the next reload wraps it again."""
    loader: Any = getattr(tensor, "weight_loader", None)
    while loader is not None and loader.__name__ == "online_process_loader":
        loader = loader.__wrapped__
        tensor.weight_loader = loader  # pyright: ignore[reportAttributeAccessIssue] - vLLM's convention


class _Recorder(TorchDispatchMode):
    """Notes copies from known tensors to known parameters."""

    def __init__(self, modules: Mapping[str, torch.nn.Module], *, keeps_views: bool) -> None:
        """Record copies into parameters of `modules`, by name; with `keeps_views`, `contiguous()` of a source is no
        copy.
        """
        super().__init__()
        self._keeps_views = keeps_views
        self._modules = modules
        self._sources: dict[int, str] = {}
        self._targets: dict[int, Slot] = {}
        self._alive: list[torch.Tensor] = []  # storages are distinguished by address
        self._regions: dict[str, list[Region]] = {}
        self._specs: dict[Slot, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]] = {}
        self._opaque: set[Slot] = set()

    def add_source(self, name: str, tensor: torch.Tensor) -> None:
        """Note that copies from this tensor's memory are of the checkpoint's tensor `name`."""
        self._sources[_storage(tensor)] = name
        self._alive.append(tensor)

    def add_target(self, slot: Slot, tensor: torch.Tensor) -> None:
        """Note that copies into this tensor's memory are into the parameter `slot`."""
        self._targets[_storage(tensor)] = slot
        self._specs[slot] = (tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
        self._alive.append(tensor)

    def _late_slot(self, target: torch.Tensor) -> Slot | None:
        """Return the slot of the parameter with this tensor's memory, if a loader has registered one since; else
        None.
        """
        for name, module in self._modules.items():
            for each, parameter in module._parameters.items():
                if parameter is not None and _storage(parameter) == _storage(target):
                    self.add_target(found := Slot(module=name, name=each), parameter)
                    return found
        return None

    def layout(self) -> Layout:
        """Return which part of which tensor goes where in which parameter, by the copies that were noted so far."""
        regions = {name: tuple(found) for name, found in self._regions.items()}
        return Layout(regions=regions, specs=self._specs, opaque=frozenset(self._opaque))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a copy from a known tensor into a known parameter; run this and every other operation, with two
        exceptions.

        With `keeps_views`, `contiguous()` of a known tensor returns the tensor as it is. A copy from the meta device to
        a parameter with memory is only noted.
        """
        is_copy = func is torch.ops.aten.clone.default and _storage(args[0]) in self._sources
        if self._keeps_views and is_copy and (kwargs or {}).get("memory_format") is torch.contiguous_format:
            return args[0].view(args[0].shape)  # of `contiguous()`: the same numbers in the same order
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        target, source = args[0], args[1]
        is_late = source.is_meta and not target.is_meta  # nothing can be copied there
        slot = self._targets.get(_storage(target)) or (self._late_slot(target) if is_late else None)
        if slot is not None:
            name = self._sources.get(_storage(source))
            # A copy that converts, or whose source is unknown, does not leave the file's bits in the parameter.
            if name is None or target.shape != source.shape or target.dtype != source.dtype:
                self._opaque.add(slot)
            if name is not None and target.shape == source.shape:
                region = Region(
                    tensor=name,
                    slot=slot,
                    shape=tuple(target.shape),
                    source_offset=source.storage_offset(),
                    source_strides=tuple(source.stride()),
                    target_offset=target.storage_offset(),
                    target_strides=tuple(target.stride()),
                )
                self._regions.setdefault(name, []).append(region)
        return target if is_late else func(*args, **(kwargs or {}))


def _storage(tensor: torch.Tensor) -> int:
    """Return a number by which tensors with the same memory are recognised."""
    return tensor.untyped_storage()._cdata


def _dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a row-major tensor of this shape, in elements."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


# A worker's memory and the host copy's file as flat bits, and the writes of a version.

Bits = NDArray[np.unsignedinteger]

SLICE_ELEMENTS = 1 << 20
"""Changed elements that are looked up at a time: some ten milliseconds."""


class ModelMemory:
    """Reads contiguous boxes of a model's parameters."""

    def __init__(self, model: Callable[[], torch.nn.Module]) -> None:
        """Take a function that returns the model whose parameters are read."""
        self._model = model

    def read(self, part: Region, begin: int, end: int) -> Bits:
        """Return a copy of elements [begin, end) of the box `part` from the model's memory, as bits."""
        found = self._flat(part)[begin:end]
        return _as_numpy(found.clone() if found.device.type == "cpu" else found.cpu())

    def gather(self, part: Region, index: NDArray[np.int64]) -> Bits:
        """Return a copy of those elements of the box `part` that have the indices `index` [N], as bits."""
        return gather(self._flat(part), index)

    def digest(self, part: Region, begin: int, end: int) -> int:
        """Return the digest of elements [begin, end) of the box `part`, computed on their device."""
        flat = self._flat(part)[begin:end]
        if part.is_contiguous:
            return device_digest(flat, start=part.source_offset + begin)
        return device_digest(flat, positions=part.positions(begin, end, device=flat.device))

    def _flat(self, part: Region) -> torch.Tensor:
        """Return the box's elements in the model's memory, flat, as bits."""
        return box_of(parameter_of(self._model(), part), part).reshape(-1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Write:
    """A write of a version into one box: `bits` [N] at the indices `index` [N] of the parameter's storage.

    `positions` [N] are the same elements in the tensor. With `index` None the whole box is copied from the file.
    `staged` are index and bits on the parameter's device.
    """

    region: Region
    index: NDArray[np.int64] | None = None
    positions: NDArray[np.int64] | None = None
    bits: Bits | None = None
    staged: tuple[torch.Tensor, torch.Tensor] | None = None

    def on(self, device: torch.device) -> "Write":
        """Return the same write with index and bits copied to a device, so that the pause copies nothing.

        On a CPU, and for a whole box, it is returned as it is.
        """
        if device.type == "cpu" or self.index is None or self.bits is None:
            return self
        # torch lacks most operations for unsigned integers of more than 8 bits.
        bits = self.bits.view(f"i{self.bits.itemsize}") if self.bits.itemsize > 1 else self.bits
        return replace(self, staged=(torch.from_numpy(self.index).to(device), torch.from_numpy(bits).to(device)))

    def put(self, files: OrderFiles, parameter: torch.Tensor) -> None:
        """Write the bits into the parameter, and read them back at once; raise InternalError if others are there.

        `files` has the whole box, for a write that copies it.
        """
        if self.index is None or self.bits is None:
            source = source_of(files, self.region).to(parameter.device)
            box = box_of(parameter, self.region)
            box.copy_(source)
            wrong = 0 if torch.equal(box, source) else int((box != source).sum())
        else:
            flat = flat_bits(parameter)
            index, bits = self.staged or (self.index, self.bits)
            scatter(flat, index, bits)
            wrong = count_other(flat, index, bits)
        if wrong:
            raise mismatch(f"the engine holds other bits than were written at {wrong} elements of {self.region.tensor}")

    def add_to(self, digests: NextDigests[Region], files: OrderFiles) -> None:
        """Add the write to the digests of the next version; must be called while the memory still has the old bits."""
        if self.positions is not None and self.bits is not None:
            digests.add_change(self.region, TensorChange(bits=self.bits, positions=self.positions))
        elif self.region.is_in_runs:
            source = source_of(files, self.region).reshape(-1).numpy()
            digests.add_whole(self.region, source.view(f"u{source.itemsize}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeSlice:
    """Elements [first, last) of one part of a tensor's changes; `part` None is a tensor that is copied whole."""

    tensor: str
    part: int | None = None
    first: int = 0
    last: int = 0

    def num_bytes(self, width: int) -> int:
        """Return the bytes of the slice's positions and bits, where an element has `width` bytes.

        0 for a whole copy, whose file a thread reads.
        """
        return (self.last - self.first) * (8 + width)


def slices_of(files: OrderFiles, name: str) -> Iterator[ChangeSlice]:
    """Yield the changes of the tensor `name` in slices of at most `SLICE_ELEMENTS`; one slice if it is copied whole.

    `files` has the order of the version, which says what changes.
    """
    counts = files.counts(name)
    if counts is None:
        yield ChangeSlice(tensor=name)
        return
    for part, count in enumerate(counts):
        for first in range(0, count, SLICE_ELEMENTS):
            yield ChangeSlice(tensor=name, part=part, first=first, last=min(first + SLICE_ELEMENTS, count))


def writes_of(files: OrderFiles, region: Region, width: int, of: ChangeSlice | None = None) -> Iterator[Write]:
    """Yield the writes into a box for the order's changes of its tensor, or for the slice `of` them.

    One for each part of the changes. If the order has the tensor whole, a single one without `index`, which copies the
    box from the file. `width` is the bytes of an element. Computed before the pause, because it takes time.
    """
    parts = files.sparse(region.tensor, width)
    if parts is not None and of is not None:
        assert of.part is not None
        positions, raw = parts[of.part]
        first, last = of.first, of.last
        parts = [(positions[first:last], raw[first * width : last * width])]
    if parts is None:
        yield Write(region=region)
        return
    for all_positions, raw in parts:
        # Positions ascend: two binary searches leave those near the box, before the exact test.
        near = region.span_of(all_positions)
        positions = np.array(all_positions[near])
        inside, index = region.targets(torch.from_numpy(positions))
        chosen = inside.numpy()
        bits = np.array(raw[near.start * width : near.stop * width]).view(f"u{width}")
        yield Write(region=region, index=index.numpy(), positions=positions[chosen], bits=bits[chosen])


def tensor_of(files: OrderFiles, name: str) -> torch.Tensor:
    """Return a tensor of the policy over the mapped file; it must not be written to.

    torch needs a mapping that could be written; the pages stay shared as long as nobody does.
    """
    place = files.places[name]
    return torch.from_numpy(files.raw(name)).view(DTYPES[place.dtype]).reshape(place.shape)


def source_of(files: OrderFiles, region: Region) -> torch.Tensor:
    """Return the part of the policy's tensor in the file that goes into the region, as bits."""
    tensor = tensor_of(files, region.tensor)
    flat = tensor.reshape(-1).view(BITS[tensor.element_size()])
    # `as_strided` counts its offset from the beginning of the storage.
    return flat.as_strided(region.shape, region.source_strides, flat.storage_offset() + region.source_offset)


def parameter_of(model: torch.nn.Module, region: Region) -> torch.Tensor:
    """Return the model's parameter that has the region."""
    parameter = model.get_submodule(region.slot.module)._parameters[region.slot.name]
    assert parameter is not None
    return parameter


def flat_bits(parameter: torch.Tensor) -> torch.Tensor:
    """Return a parameter's memory, from its first to its last element, as flat integers of its element's width; a
    view.
    """
    # Of strides, not of the shape: a parameter may have gaps between its rows.
    size = 1 + sum((n - 1) * stride for n, stride in zip(parameter.shape, parameter.stride(), strict=True))
    return parameter.data.as_strided((size,), (1,)).view(BITS[parameter.element_size()])


def box_of(parameter: torch.Tensor, region: Region) -> torch.Tensor:
    """Return the region's part of a parameter, as bits; a view."""
    # `as_strided` counts its offset from the beginning of the storage.
    return flat_bits(parameter).as_strided(
        region.shape, region.target_strides, parameter.storage_offset() + region.target_offset
    )


def gather(flat: torch.Tensor, index: NDArray[np.int64]) -> Bits:
    """Return a copy of the elements of `flat` at the indices `index` [N], in this process's own memory."""
    if flat.device.type == "cpu":
        return _as_numpy(flat)[index]  # a fifth of the time that torch's indexing takes
    return _as_numpy(flat[torch.from_numpy(index).to(flat.device)].cpu())


def scatter(flat: torch.Tensor, index: Any, bits: Any) -> None:
    """Write `bits` [N] at the indices `index` [N] of `flat`.

    Both are numpy arrays for a tensor on a CPU, and tensors on its device for any other.
    """
    if isinstance(bits, torch.Tensor):
        flat[index] = bits
    else:  # numpy takes a fifth of the time that torch's indexing takes
        _as_numpy(flat)[index] = bits


def count_other(flat: torch.Tensor, index: Any, bits: Any) -> int:
    """Return at how many of the indices `index` [N] `flat` has other elements than `bits` [N].

    Both are numpy arrays for a tensor on a CPU, and tensors on its device for any other.
    """
    if isinstance(bits, torch.Tensor):
        return int(torch.count_nonzero(flat[index] != bits))
    return int(np.count_nonzero(_as_numpy(flat)[index] != bits))


def _as_numpy(flat: torch.Tensor) -> Bits:
    """Return a CPU tensor as unsigned integers of its element's width; a view."""
    return flat.numpy().view(f"u{flat.element_size()}")
