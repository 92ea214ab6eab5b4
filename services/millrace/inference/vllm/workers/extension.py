"""The worker extension of vLLM's worker processes, which writes policies into the model and reads them back.

An update has two halves. `millrace_stage` and `millrace_prepare` run between decode steps while the old version serves:
they read the mapped host copy, and build what cannot be changed in place (linear layers that the CPU backend packs).
`millrace_activate` runs while generation is paused: it writes the changed elements and puts the built layers in, so the
pause does not grow with the model. Weights that can be updated in neither way are loaded by vLLM's layerwise reload in
the pause.

Methods are called by name through `collective_rpc`; arguments are plain values.
"""

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from millrace.errors import InvalidStateError
from millrace.inference.vllm.lora import on_base
from millrace.inference.vllm.ranks import AnsweringWorker, OrderFiles
from millrace.inference.vllm.workers.layout import (
    ChangeSlice,
    Layout,
    ModelMemory,
    Region,
    Slot,
    Write,
    box_of,
    parameter_of,
    slices_of,
    source_of,
    tensor_of,
    trace,
    writes_of,
)
from millrace.inference.vllm.workers.node_copy import FetchingWorker
from millrace.inference.vllm.workers.reloading import (
    Packed,
    build_packed,
    derived_tensors,
    is_repackable,
    pack_experts,
    require_reloadable,
    whole_reload,
)
from millrace.policies.proof import ContinuedDigests, NextDigests, Row
from millrace.policies.tensors import element_bytes
from millrace.telemetry import faults
from millrace.telemetry.faults import Point

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Staged:
    """A version between `stage` and `activate`.

    `units` are the names, with bytes, of modules whose layers are to be built. `slices` are the changes that `gather`
    looks up, in order. `digests` are those that the model will have; None if they are unknown before the model is read
    back.
    """

    files: OrderFiles
    units: list[tuple[str, int]]
    reloads: set[str]
    slices: list[ChangeSlice]
    digests: NextDigests[Region] | None
    writes: list[Write] = field(default_factory=list)
    num_gathered: int = 0
    packed: dict[str, Packed] = field(default_factory=dict)


@dataclass(slots=True)
class Held:
    """The layout of the model in memory: `plain` slots have the checkpoint's bits, `packed` layers are built from them.

    `proved` are the digests of the boxes of plain slots, as far as each is one range of memory.
    """

    layout: Layout
    plain: set[Slot]
    packed: dict[str, Slot]
    proved: ContinuedDigests[Region]
    staged: Staged | None = None
    is_reloaded_whole: bool = False
    """Whether tensors are derived from the weights that only a whole reload computes again: those that `reloading.py`
    finds, and parameters that loaders fill without a copy that can be traced."""


class PolicyExtension(AnsweringWorker, FetchingWorker):
    """Methods for policies, mixed into vLLM's worker class by `--worker-extension-cls`."""

    millrace_held: Held | None = None
    millrace_is_text_part: bool = False
    """Whether policies are of the text part of a multimodal model alone; the rest stays as it is."""

    @on_base
    def millrace_reload(self, order: dict[str, Any]) -> None:
        """Load every tensor of an order into this worker's model by vLLM's layerwise reload, and find out its layout in
        memory.

        The order is what `ranks.write_order` returned. Raises InvalidStateError if the model cannot be reloaded, or has
        no place for a tensor.
        """
        # Before anything is written: if the load fails, what is known of the old weights is not true any more.
        self.millrace_held = None
        self.millrace_is_text_part = order.get("is_text_part", False)
        files = OrderFiles(self._millrace_here(order))
        model = self._millrace_model()
        require_reloadable(model)
        self._millrace_load(model, files, list(files.places))
        self.millrace_held = self._millrace_survey(model, files)

    def millrace_reload_directory(self, directory: str | None) -> None:
        """Load the safetensors files of a directory by vLLM's own reload; None is the model that vLLM was started with.

        The layout is unknown afterwards, so that the next policy needs a whole load.
        """
        self.millrace_held = None
        self.millrace_is_text_part = False
        # The reload makes the directory the model's own, where "the first weights" would be looked for from then on.
        config = self.model_runner.vllm_config.model_config  # pyright: ignore[reportAttributeAccessIssue] - of the worker
        first = {name: getattr(config, name) for name in ("model", "model_weights", "revision")}
        try:
            with whole_reload(self._millrace_model()):
                self.reload_weights(weights_path=directory)  # pyright: ignore[reportAttributeAccessIssue] - of the worker
        finally:
            for name, value in first.items():
                setattr(config, name, value)
        model = self._millrace_model()
        pack_experts(model)
        self._millrace_repack_shared(model)

    def millrace_check(self, places: list[Any]) -> list[list[str]]:
        """Return [problems of these tensors for this model, the names that have no place on this rank].

        `places` has [name, dtype, shape] of each. Changes nothing. A rank of a pipeline has only some layers: a name is
        a problem if it has no place on any rank.
        """
        held = self.millrace_held
        if held is None:
            return [["no policy was loaded yet"], []]
        problems: list[str] = []
        strangers: list[str] = []
        for name, dtype, shape in places:
            regions = held.layout.regions.get(name)
            if regions is None:
                # Another rank of the pipeline may have a place for it, which only the API server can know.
                strangers.append(name)
                continue
            known = self.millrace_shapes[name]
            if known != (dtype, tuple(shape)):
                problems.append(f"{name} is {dtype}{shape}, the model has {known[0]}{list(known[1])}")
        given = {name for name, _, _ in places}
        problems += [f"{name} is missing" for name in held.layout.regions if name not in given]
        return [problems, strangers]

    @on_base
    def millrace_stage(self, order: dict[str, Any]) -> dict[str, Any]:
        """Begin to stage the version of an order, while the old one serves, and return how much work that is on this
        rank.

        The order is what `ranks.write_order` returned. `units` has the bytes of each unit for `millrace_prepare`,
        `slices` those of each slice for `millrace_gather`. `seconds`, here and in the other methods, is the time in
        which this worker did not decode.
        """
        began = time.monotonic()
        held = self._millrace_required()
        files = OrderFiles(self._millrace_here(order))
        if held.is_reloaded_whole:
            held.staged = Staged(files=files, units=[], reloads=set(), slices=[], digests=None)
            return {"units": [], "slices": [], "seconds": time.monotonic() - began}
        touched: set[Slot] = {region.slot for name in files.names() for region in held.layout.regions.get(name, ())}
        units: list[tuple[str, int]] = []
        for module, slot in held.packed.items():
            if slot in touched:
                shape, _, dtype = held.layout.specs[slot]
                units.append((module, int(np.prod(shape)) * dtype.itemsize))
        built = set(held.packed.values())
        # What is neither written in place nor built in a unit must go through vLLM's own loader.
        reloads = {slot.module for slot in touched if slot not in held.plain and slot not in built}
        here = [name for name in files.names() if _plain_regions(held, name)]
        slices = [found for name in here for found in slices_of(files, name)]
        digests = held.proved.next()
        held.staged = Staged(files=files, units=units, reloads=reloads, slices=slices, digests=digests)
        sizes = [found.num_bytes(element_bytes(files.places[found.tensor].dtype)) for found in slices]
        return {"units": [size for _, size in units], "slices": sizes, "seconds": time.monotonic() - began}

    @on_base
    def millrace_gather(self, first: int, last: int) -> float:
        """Prepare the writes of slices [first, last) of the staged version, and read the present values for the
        digests.

        Returns the seconds that it took, in which this worker did not decode.
        """
        held, began = self._millrace_required(), time.monotonic()
        staged = held.staged
        assert staged is not None and staged.num_gathered >= min(first, len(staged.slices))
        model = self._millrace_model()
        writes = [
            write.on(parameter_of(model, region).device)
            for part in staged.slices[first:last]
            for region in _plain_regions(held, part.tensor)
            for write in writes_of(staged.files, region, held.layout.specs[region.slot][2].itemsize, part)
        ]
        staged.writes += writes
        if staged.digests is not None:
            for write in writes:
                write.add_to(staged.digests, staged.files)
        staged.num_gathered = min(last, len(staged.slices))
        return time.monotonic() - began

    def millrace_foreseen(self) -> dict[str, Any]:
        """Return the digests that this rank will have with the staged version: `rows`, as `millrace_digests` returns
        them.

        `rows` is None while `is_pending`, and also without it if they have to be read back after the version is
        written.
        """
        staged = self._millrace_required().staged
        assert staged is not None and staged.num_gathered == len(staged.slices)
        if staged.digests is None:
            return {"is_pending": False, "rows": None}
        staged.digests.compute()
        rows = staged.digests.rows()
        return {"is_pending": rows is None, "rows": rows}

    @on_base
    def millrace_prepare(self, first: int, last: int) -> float:
        """Build the packed weights [first, last) of the staged version beside the served layers.

        Returns the seconds that it took, in which this worker did not decode.
        """
        held, began = self._millrace_required(), time.monotonic()
        assert held.staged is not None
        model = self._millrace_model()
        for module, _ in held.staged.units[first:last]:
            slot = held.packed[module]
            weight = self._millrace_plain(held, held.staged.files, slot)
            held.staged.packed[module] = build_packed(model.get_submodule(module), weight)
        return time.monotonic() - began

    @on_base
    def millrace_activate(self, version: int) -> None:
        """Write the staged version into this worker's model, and read back what was written; generation must be paused.

        `version` is for fault points. A failure is raised, and leaves the model undefined.
        """
        held = self._millrace_required()
        staged, held.staged = held.staged, None
        assert staged is not None and len(staged.packed) == len(staged.units)
        assert staged.num_gathered == len(staged.slices)
        model = self._millrace_model()
        if held.is_reloaded_whole:
            self.millrace_held = None
            self._millrace_load(model, staged.files, list(staged.files.places))
            self.millrace_held = self._millrace_survey(model, staged.files)
            return
        # From here on the memory is neither version, until every write has been read back.
        held.proved.begin_writing()
        with torch.no_grad():
            for write in staged.writes:
                write.put(staged.files, parameter_of(model, write.region))
        rank: int = self.rank  # pyright: ignore[reportAttributeAccessIssue] - of the worker
        after: int = self.parallel_config.world_size - 1 - rank  # pyright: ignore[reportAttributeAccessIssue]
        faults.reach(Point.INFERENCE_MID_APPLY, version=version, rank=rank, ranks_after=after)
        for module, packed in staged.packed.items():
            packed.put_into(model.get_submodule(module))
        for module in sorted(staged.reloads):
            names = [n for n, found in held.layout.regions.items() if any(r.slot.module == module for r in found)]
            self._millrace_load(model.get_submodule(module), staged.files, names)
        if staged.digests is not None:
            held.proved.accept(staged.digests)

    def millrace_discard(self) -> None:
        """Drop the staged version, if there is one."""
        if self.millrace_held is not None:
            self.millrace_held.staged = None

    @on_base
    def millrace_digests(self, names: list[str]) -> list[Row]:
        """Digest the boxes of these tensors that have the checkpoint's bits here, keep that as proved, and return it.

        Each row is [tensor, key of the box, elements, digest as hex]. This rank may have no box of a tensor. Ranks that
        have the same box return the same key. Later versions continue the digests that are kept.
        """
        return self._millrace_required().proved.read(names)

    @on_base
    def millrace_verify_next(self) -> list[Any]:
        """Verify a share of the weights in memory.

        Returns [number of shares left, description of damage or "", whether all of the rest is proved].
        """
        if self.millrace_held is None:
            return [0, "", False]
        return list(self.millrace_held.proved.verify_next())

    # ---- the methods below are not called from outside ----

    def _millrace_model(self) -> torch.nn.Module:
        """Return the model that policies are for: the worker's, or its text part."""
        model = self.model_runner.get_model()  # pyright: ignore[reportAttributeAccessIssue] - of the worker
        has_parts = self.millrace_is_text_part and hasattr(model, "get_language_model")
        return model.get_language_model() if has_parts else model

    def _millrace_required(self) -> Held:
        """Return what is known of the model in memory; raise RuntimeError if no policy was loaded yet."""
        if self.millrace_held is None:
            raise RuntimeError("no policy was loaded into this worker yet")
        return self.millrace_held

    def _millrace_load(self, module: torch.nn.Module, files: OrderFiles, names: list[str]) -> None:
        """Run vLLM's layerwise reload of these tensors into a module of the model, or into the whole model.

        Raises InvalidStateError if the model has no place for a tensor.
        """
        from vllm.config import set_current_vllm_config  # pyright: ignore[reportMissingImports]
        from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        model = self._millrace_model()
        runner = self.model_runner  # pyright: ignore[reportAttributeAccessIssue] - of the worker
        with torch.device(runner.device), set_current_vllm_config(self.vllm_config), whole_reload(module):  # pyright: ignore[reportAttributeAccessIssue]
            initialize_layerwise_reload(module)
            try:
                model.load_weights(self._millrace_tensors(files, names))  # pyright: ignore[reportCallIssue]
            except KeyError as error:  # vLLM's loaders look parameters up by name; then raises
                raise InvalidStateError(
                    f"vLLM's {type(model).__name__} has no place for the tensor {error.args[0]}: experts fused "
                    "as transformers fuses them are taken for some architectures only",
                    reason="TENSOR_WITHOUT_PLACE",
                    remedy='serve this model with inference.engine = "embedded"',
                ) from error
            finalize_layerwise_reload(module, runner.model_config)
        pack_experts(module)
        self._millrace_repack_shared(model)

    def _millrace_repack_shared(self, model: torch.nn.Module) -> None:
        """Pack again the layers that share their weight with one that the reload has filled, such as tied heads.

        The reload repacks a layer when tensors arrive for it, and none arrive for a tied one.
        """
        owners: dict[int, int] = {}
        shared: list[torch.nn.Module] = []
        for module in model.modules():
            weight = module._parameters.get("weight")
            if weight is not None and weight.numel() and is_repackable(module):
                # Tied layers share the memory of their weight.
                owners[weight.data_ptr()] = owners.get(weight.data_ptr(), 0) + 1
                shared.append(module)
        for module in shared:
            weight = module._parameters["weight"]
            assert weight is not None
            if owners[weight.data_ptr()] > 1:
                build_packed(module, weight.data).put_into(module)

    def _millrace_tensors(self, files: OrderFiles, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor over the mapped file) of each of the named tensors."""
        for name in names:
            yield name, tensor_of(files, name)

    def _millrace_survey(self, model: torch.nn.Module, files: OrderFiles) -> Held:
        """Find out where each tensor of the file is in the model, and which parameters have the file's bits; return
        that.

        The loaders are traced, and the memory is compared with the file, so the file's weights must be loaded.
        """
        layout = trace(model, files.places.values())
        self.millrace_shapes = {name: (place.dtype, place.shape) for name, place in files.places.items()}
        by_slot: dict[Slot, list[Region]] = {}
        for regions in layout.regions.values():
            for region in regions:
                by_slot.setdefault(region.slot, []).append(region)
        plain = {
            slot
            for slot, regions in by_slot.items()
            if slot not in layout.opaque and self._millrace_is_plain(model, layout, files, slot, regions)
        }
        packed: dict[str, Slot] = {}
        for name, module in model.named_modules():
            slot = self._millrace_packed_slot(model, name, module, by_slot)
            if slot is not None and slot not in layout.opaque:
                packed[name] = slot
        logger.info("layout of the model", extra={"plain": len(plain), "packed": len(packed), "slots": len(by_slot)})
        boxes = [region for slot in plain for region in by_slot[slot] if region.is_in_runs]
        proved = ContinuedDigests(boxes, ModelMemory(self._millrace_model))
        derived = derived_tensors(model, layout.specs)
        # Some of what has no place that is known may be what opaque parameters are made of.
        unknown = sorted(files.places.keys() - layout.regions.keys()) if layout.opaque else []
        if is_reloaded_whole := bool(derived or unknown):
            why = {"derived": derived[:4], "no_place": unknown[:4]}
            logger.info("every version is loaded whole: not all that comes of its tensors is known", extra=why)
        return Held(layout=layout, plain=plain, packed=packed, proved=proved, is_reloaded_whole=is_reloaded_whole)

    def _millrace_packed_slot(
        self, model: torch.nn.Module, name: str, module: torch.nn.Module, by_slot: Mapping[Slot, Any]
    ) -> Slot | None:
        """Return the slot whose weight the packed layer `module` was built from: its own, or that of the layer it is
        tied to.

        None if the layer is not packed, or its weight comes from no tensor in `by_slot`. `name` is the layer's.
        """
        if not is_repackable(module):
            return None
        own = Slot(module=name, name="weight")
        if own in by_slot:
            return own
        weight = module._parameters.get("weight")
        if weight is None or not weight.numel():
            return None
        for slot in by_slot:
            if model.get_submodule(slot.module)._parameters.get(slot.name) is weight:
                return slot
        return None

    def _millrace_is_plain(
        self, model: torch.nn.Module, layout: Layout, files: OrderFiles, slot: Slot, regions: list[Region]
    ) -> bool:
        """Return whether the slot's parameter has, in these regions, exactly the file's bits.

        False also if its shape, strides or dtype are not those that it had while loaders filled it, which `layout` has.
        """
        parameter = model.get_submodule(slot.module)._parameters.get(slot.name)
        shape, strides, dtype = layout.specs[slot]
        # A parameter that vLLM has repacked after loading differs in one of these, or in its bits.
        if parameter is None or (tuple(parameter.shape), tuple(parameter.stride()), parameter.dtype) != (
            shape,
            strides,
            dtype,
        ):
            return False
        return all(
            torch.equal(box_of(parameter, region), source_of(files, region).to(parameter.device)) for region in regions
        )

    def _millrace_plain(self, held: Held, files: OrderFiles, slot: Slot) -> torch.Tensor:
        """Return the slot's parameter as the loaders would fill it from the file; padding is zero."""
        shape, strides, dtype = held.layout.specs[slot]
        weight = torch.empty_strided(shape, strides, dtype=dtype).zero_()
        for regions in held.layout.regions.values():
            for region in regions:
                if region.slot == slot:
                    box_of(weight, region).copy_(source_of(files, region))
        return weight


def _plain_regions(held: Held, name: str) -> list[Region]:
    """Return the regions of a tensor on this rank whose memory has the checkpoint's bits."""
    return [region for region in held.layout.regions.get(name, ()) if region.slot in held.plain]
