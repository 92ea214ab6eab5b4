"""LoRA on the fused parameters of experts (`target_parameters`), and where a base's files have these parameters.

    ΔW_e = scaling · B_e·A_e          A: [experts · rank, in], one expert behind the other
                                      B: [out, rank · experts], the experts of one rank side by side

transformers 5 holds the projections of all experts of a block in one parameter. Its files have a tensor for each
expert, or the parameter itself. PEFT nests the adapters of several parameters of one module, in the order in which the
module has the parameters: the file's names say how deep an adapter lies, and not which parameter it is on.
"""

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from millrace.policies.adapter import Shape
from millrace.policies.numbers import as_float32, from_float32
from millrace.policies.peft.config import PeftConfig
from millrace.policies.tensors import FLOATS, TensorBytes

_MODULE = "mlp.experts"
_PARAMETERS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
"""Of a module of experts, in its order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """Where a family's files have its experts, and which tensors of one make up a parameter."""

    module: str = _MODULE
    joined: Mapping[str, tuple[str, ...]]
    is_transposed: bool = False
    """Whether a parameter is [experts, in, out]."""


_GATED = _Layout(joined={"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)})
_LAYOUTS = {
    "deepseek_v3": _GATED,
    "ernie4_5_moe": _GATED,
    "glm4_moe": _GATED,
    "gpt_oss": _Layout(joined={}, is_transposed=True),
    "mixtral": _Layout(module="block_sparse_moe.experts", joined={"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}),
    "qwen2_moe": _GATED,
    "qwen3_moe": _GATED,
}
"""By `model_type`; each is compared with PEFT's own merge in a test."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """A parameter of experts: [experts, rows, columns], or [rows, columns] for the biases of all."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    is_transposed: bool
    stored: tuple[tuple[str, ...], ...]
    """For each expert the base's tensors whose rows stand one behind the other; empty if the base has it whole."""

    def wanted(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the shapes of A and B."""
        *experts, rows, columns = self.shape
        count = prod(experts) * rank
        return ((count, rows), (columns, count)) if self._is_turned else ((count, columns), (rows, count))

    def merged(
        self, low: np.ndarray, high: np.ndarray, base: Mapping[str, TensorBytes], *, scaling: float
    ) -> dict[str, TensorBytes]:
        """Return the base's tensors of this parameter with an adapter A, B added."""
        num_experts = prod(self.shape[:-2])
        lows = low.reshape(num_experts, -1, low.shape[1])
        highs = high.reshape(high.shape[0], -1, num_experts)
        changes = (scaling * (highs[:, :, expert] @ lows[expert]) for expert in range(num_experts))
        if not self.stored:
            change = np.stack([each.T if self._is_turned else each for each in changes]).reshape(self.shape)
            return {self.name: _sum(base[self.name], change)}
        found: dict[str, TensorBytes] = {}
        for names, change in zip(self.stored, changes, strict=True):
            at = 0
            for name in names:
                end = at + base[name].shape[0]
                found[name] = _sum(base[name], change[at:end])
                at = end
        return found

    @property
    def _is_turned(self) -> bool:
        return self.is_transposed and len(self.shape) == 3


def fused_parameters(config: PeftConfig, model_type: str, base: Mapping[str, Shape]) -> dict[str, Fused]:
    """Return the parameters of experts that `target_parameters` names, by how the adapter's file names their layers.

    Empty for a family whose experts are not known here.
    """
    layout = _LAYOUTS.get(model_type)
    if layout is None:
        return {}
    found: dict[str, Fused] = {}
    for module, prefix in _modules(layout, base).items():
        named = [name for name in _PARAMETERS if config.targets_parameter(f"{module}.{name}")]
        fused = [each for name in named if (each := _fused(layout, module, prefix, name, base))]
        found |= {module + ".base_layer" * (len(fused) - at): each for at, each in enumerate(fused, 1)}
    return found


def fits_experts(config: PeftConfig, fused: Mapping[str, Fused]) -> bool:
    """Whether every name in `target_parameters` is of such a parameter, and the adapter is one that PEFT has there."""
    names = [each.name for each in fused.values()]
    is_known = all(any(_is_end(target, name) for name in names) for target in config.target_parameters)
    return is_known and config.start == "base" and not (config.use_dora or config.lora_bias)


def _is_end(target: str, name: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _modules(layout: _Layout, base: Mapping[str, Shape]) -> dict[str, str]:
    """Return what the modules of experts are called in the model, and in its files."""
    found: dict[str, str] = {}
    for name in base:
        if match := re.match(rf"(.*\.)({re.escape(layout.module)}|{re.escape(_MODULE)})\.", name):
            found[f"{match[1]}{_MODULE}"] = match[1] + match[2]
    return found


def _fused(layout: _Layout, module: str, prefix: str, name: str, base: Mapping[str, Shape]) -> Fused | None:
    """A parameter of a module; None if the base has nothing that could be it, or parts that do not go together."""
    own = f"{module}.{name}"
    if own in base:
        dtype, shape = base[own]
        is_known = len(shape) == (2 if name.endswith("_bias") else 3)
        found = Fused(name=own, shape=shape, dtype=dtype, is_transposed=layout.is_transposed, stored=())
        return found if is_known and dtype in FLOATS else None
    stored = tuple(_stored(prefix, layout.joined.get(name, ()), base))
    shapes = {tuple(base[each] for each in names) for names in stored}
    if len(shapes) != 1:
        return None
    (parts,) = shapes
    if any(len(shape) != 2 for _, shape in parts):
        return None
    dtypes, widths = {dtype for dtype, _ in parts}, {shape[1] for _, shape in parts}
    if len(dtypes) != 1 or not dtypes.issubset(FLOATS) or len(widths) != 1:
        return None
    shape = (len(stored), sum(shape[0] for _, shape in parts), *widths)
    return Fused(name=own, shape=shape, dtype=dtypes.pop(), is_transposed=False, stored=stored)


def _stored(prefix: str, joined: tuple[str, ...], base: Mapping[str, Shape]) -> Iterator[tuple[str, ...]]:
    """Yield the tensors of each expert, as long as there is a next one."""
    for expert in itertools.count():
        names = tuple(f"{prefix}.{expert}.{each}.weight" for each in joined)
        if not names or any(name not in base for name in names):
            return
        yield names


def _sum(tensor: TensorBytes, change: np.ndarray) -> TensorBytes:
    return from_float32(as_float32(tensor) + change, dtype=tensor.dtype)
