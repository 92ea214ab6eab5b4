"""LoRA in vLLM: one adapter slot, which every request uses from its first token to its last.

vLLM resolves an adapter by its number at every step, so a new adapter under the same number reaches requests in flight
as new weights do. Therefore there is always an adapter: for a whole policy it is a blank one, which adds zero. Without
one a request would stay on the base for good, whatever version its tokens claim.

vLLM is started with `--lora-target-modules`, because an adapted head makes `prompt_logprobs` kill the engine (0.32).
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from millrace.errors import InternalError, InvalidStateError
from millrace.inference.engine import require_fitting, spec_of
from millrace.models.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from millrace.policies.manifest import StagedPolicy
from millrace.policies.peft.config import HIGH, LOW, AdapterSpec, PeftConfig, Shape, parse_peft_config, published_name
from millrace.policies.tensors import TensorBytes, element_bytes, pack_safetensors
from millrace.storage.clean_up import TEMPORARY, remove

_NAME = "policy"
# Always the same, so that a new adapter reaches requests in flight.
_NUMBER = 1
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM 0.32 takes for --max-lora-rank

T = TypeVar("T")


def lora_argv(model_dir: Path) -> list[str]:
    """Return vLLM's arguments for a run that trains adapters, which a file in `model_dir` shows; [] for other runs.

    Raises InvalidStateError for adapters that vLLM cannot serve.
    """
    path = model_dir / ADAPTER_CONFIG
    if not path.is_file():
        return []
    spec = parse_adapter_config(path.read_bytes(), source=str(path))
    rank = next((rank for rank in _RANKS if rank >= spec.rank), None)
    if rank is None or spec.modules_to_save:
        what = f"modules_to_save ({', '.join(spec.modules_to_save)})" if rank else f"adapters of rank {spec.rank}"
        raise InvalidStateError(
            f"vLLM cannot serve {what}",
            reason="ADAPTER_NOT_SUPPORTED",
            remedy=f"train adapters of rank {_RANKS[-1]} at most without modules_to_save, or use the embedded engine",
        )
    flags = ["--enable-lora", f"--max-lora-rank={rank}", "--max-loras=1", "--max-cpu-loras=1"]
    ends = dict.fromkeys(name.rpartition(".")[2] for name in spec.target_modules)
    return [*flags, "--lora-target-modules", *ends]


class AdapterSlot:
    """The adapter that requests use. `directory` is where adapters are written for the workers, one at a time."""

    def __init__(self, client: Any, *, directory: Path) -> None:
        """Take vLLM's client, without an adapter so far, and the directory into which adapters are written for
        workers.
        """
        self._client = client
        self._directory = directory
        self._base: Mapping[str, Shape] = {}
        self._count = 0
        self._is_blank = False
        self.request: Any = None
        """vLLM's LoRARequest for every generation that begins; None where vLLM has no LoRA."""

    @property
    def is_enabled(self) -> bool:
        """Return whether vLLM was started with LoRA."""
        return self._client.vllm_config.lora_config is not None

    def set_base(self, staged: StagedPolicy) -> None:
        """Remember the shapes of the whole policy that the model has, against which adapters are checked."""
        self._base = {name: (tensor.dtype, tensor.shape) for name, tensor in staged.tensors.items()}

    def check(self, staged: StagedPolicy) -> None:
        """Raise InvalidStateError if vLLM cannot load the staged adapter on the model; changes nothing."""
        if not self.is_enabled:
            raise InvalidStateError(
                "this vLLM was started without LoRA, and the policy is an adapter",
                reason="LORA_NOT_ENABLED",
                remedy="start the replica without MILLRACE_MODEL, or with --enable-lora in its flags",
            )
        require_fitting(staged, self._base)
        entry, limit = staged.manifest.adapter, self._client.vllm_config.lora_config.max_lora_rank
        assert entry is not None, "it fits"
        if entry.rank > limit or entry.modules_to_save:
            raise InvalidStateError(
                f"vLLM takes adapters of rank {limit} at most without modules_to_save; this one has rank {entry.rank} "
                f"and saves {', '.join(entry.modules_to_save) or 'none'}",
                reason="ADAPTER_NOT_SUPPORTED",
                remedy="set inference.vllm.max_lora_rank, or use the embedded engine",
            )

    async def load(self, staged: StagedPolicy) -> None:
        """Load the staged adapter, which is checked, in place of the present one. Must be called while vLLM is
        paused.
        """
        assert staged.manifest.adapter is not None, "only adapters come here"
        await self._put(spec_of(staged.manifest.adapter), staged.tensors)
        self._is_blank = False

    async def unload(self) -> None:
        """Load a blank adapter in place of the present one, so that requests compute with the base alone."""
        if not self.is_enabled or self._is_blank:
            return
        layer, (dtype, (rows, columns)) = self._one_layer()
        spec = AdapterSpec(rank=1, alpha=1.0, target_modules=(layer.rpartition(".")[2],))
        tensors = {
            published_name(layer + LOW): _zeros(dtype, (1, columns)),
            published_name(layer + HIGH): _zeros(dtype, (rows, 1)),
        }
        await self._put(spec, tensors)
        self._is_blank = True

    async def remove(self) -> None:
        """Take the adapter out of vLLM, if there is one.

        Must be called while no request is in flight, which would load it again.
        """
        if self.request is not None:
            await self._client.remove_lora(_NUMBER)
            self.request, self._is_blank = None, False

    async def _put(self, spec: AdapterSpec, tensors: Mapping[str, TensorBytes]) -> None:
        """Write an adapter into a directory and load it into vLLM's only slot, in place of the one there.

        Raises InternalError if vLLM refuses it.
        """
        # vllm is in its own environment, which the type checker does not see.
        from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

        self._count += 1
        path, old = self._directory / f"adapter-{self._count}", self.request
        path.mkdir(parents=True)
        (path / ADAPTER_CONFIG).write_bytes(spec.to_config())
        (path / ADAPTER_WEIGHTS).write_bytes(pack_safetensors(tensors.items())[0])
        if not await self._client.add_lora(LoRARequest(_NAME, _NUMBER, str(path), load_inplace=True)):
            raise InternalError("vLLM did not take the adapter", reason="ADAPTER_REFUSED", remedy="see vLLM's log")
        # Without `load_inplace`, which would have every request load it again. The path sets prefix caches apart.
        self.request = LoRARequest(_NAME, _NUMBER, str(path))
        if old is not None:
            remove(Path(old.lora_path), what=TEMPORARY)

    def _one_layer(self) -> tuple[str, Shape]:
        """Return the name, and the dtype and shape, of a linear layer of the base that vLLM adapts.

        Raises InternalError if there is none.
        """
        targets: Sequence[str] = self._client.vllm_config.lora_config.target_modules or ("q_proj", "qkv_proj")
        for name, shape in self._base.items():
            layer = name.removesuffix(".weight")
            if layer != name and len(shape[1]) == 2 and layer.rpartition(".")[2] in targets:
                return layer, shape
        raise InternalError(
            f"none of vLLM's LoRA targets ({', '.join(targets)}) is a layer of the policy",
            reason="LORA_TARGET_UNKNOWN",
            remedy="leave lora_target_modules out of vLLM's flags",
        )


def on_base(method: Callable[..., T]) -> Callable[..., T]:
    """Return a method of the worker extension that runs with the model's own layers in place of LoRA wrappers."""

    @functools.wraps(method)
    def run(worker: Any, *args: Any) -> T:
        """Call the method with the model's own layers in place of LoRA wrappers, if vLLM has any."""
        if worker.vllm_config.lora_config is None:
            return method(worker, *args)
        with base_layers(worker.model_runner.get_model()):
            return method(worker, *args)

    return run


@contextmanager
def base_layers(model: Any) -> Iterator[None]:
    """Put the model's own layers in place of vLLM's LoRA wrappers during the block, as the model's loaders expect.

    Must be used between two steps, while nothing computes with the model.
    """
    # vllm is in its own environment, which the type checker does not see.
    from vllm.lora.layers import BaseLayerWithLoRA  # pyright: ignore[reportMissingImports]

    wrapped = [
        (parent, attribute, child)
        for parent in list(model.modules())
        for attribute, child in parent._modules.items()
        if isinstance(child, BaseLayerWithLoRA)
    ]
    for parent, attribute, child in wrapped:
        parent._modules[attribute] = child.base_layer
    try:
        yield
    finally:
        for parent, attribute, child in wrapped:
            parent._modules[attribute] = child


def _zeros(dtype: str, shape: tuple[int, int]) -> TensorBytes:
    """Return a tensor of zeros of this dtype and shape, as bytes."""
    data = np.zeros(shape[0] * shape[1] * element_bytes(dtype), np.uint8)
    return TensorBytes(dtype=dtype, shape=shape, data=data.data)


# Adapters of the one kind that Millrace trains and engines serve unmerged.


def parse_adapter_config(data: bytes, *, source: str) -> AdapterSpec:
    """Parse the `adapter_config.json` of a policy; `source` names it in messages.

    Raises as `parse_peft_config`, and InvalidStateError (ADAPTER_NOT_SUPPORTED) if it asks for more than plain LoRA.
    """
    config = parse_peft_config(data, source=source)
    names = config.target_modules
    plain = PeftConfig(r=config.r, lora_alpha=config.lora_alpha, target_modules=names)
    if isinstance(names, str) or replace(config, modules_to_save=()) != plain:
        raise InvalidStateError(
            f"{source} is no plain LoRA adapter of listed layers, which is what is served unmerged",
            reason="ADAPTER_NOT_SUPPORTED",
            remedy="merge it into its base and serve the result",
        )
    return AdapterSpec(
        rank=config.r, alpha=config.lora_alpha, target_modules=names, modules_to_save=config.modules_to_save
    )
