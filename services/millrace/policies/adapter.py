"""LoRA adapters as policies: their names, and the `adapter_config.json` that PEFT and vLLM read. No torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from millrace.errors import CorruptObjectError

LOW, HIGH = ".lora_A.weight", ".lora_B.weight"
"""Ends of the names of A [rank, in] and B [out, rank]."""
_PREFIX = "base_model.model."

Shape = tuple[str, tuple[int, ...]]
"""Dtype tag and shape of a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """What an adapter is, besides its tensors. Names are the last parts of the layers' names, as PEFT matches them."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    modules_to_save: tuple[str, ...] = ()

    @property
    def scaling(self) -> float:
        """Factor of B·A."""
        return self.alpha / self.rank

    def to_config(self, *, base_model: str = "") -> bytes:
        """`adapter_config.json` of PEFT."""
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_model,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "init_lora_weights": True,
            "target_modules": list(self.target_modules),
            "modules_to_save": list(self.modules_to_save) or None,
            "use_dora": False,
            "use_rslora": False,
        }
        return json.dumps(config, indent=2, sort_keys=True).encode() + b"\n"


def base_model_name(name: str) -> str:
    """How an adapter names its base, so that it is found from everywhere: a Hub id, or a directory's whole path."""
    path = Path(name).expanduser()
    return str(path.resolve()) if path.is_dir() else name


def published_name(name: str) -> str:
    """PEFT's name of one of the model's trained tensors."""
    return _PREFIX + name


def model_name(name: str, *, source: str) -> str:
    """The model's own name of a published tensor; CorruptObjectError if it is not PEFT's."""
    if not name.startswith(_PREFIX):
        raise CorruptObjectError(
            f"tensor {name} of {source} is not named as an adapter's: {_PREFIX}<layer>.lora_A.weight",
            reason="ADAPTER_NAME_INVALID",
            remedy="publish the adapter again",
        )
    return name.removeprefix(_PREFIX)


def adapter_problems(
    spec: AdapterSpec, tensors: Mapping[str, Shape], base: Mapping[str, Shape], *, source: str
) -> list[str]:
    """What is wrong with an adapter's tensors on a base, in words; both by published name, as (dtype, shape)."""
    own = {model_name(name, source=source): shape for name, shape in tensors.items()}
    problems: list[str] = []
    for name, found in own.items():
        layer = name.removesuffix(LOW).removesuffix(HIGH)
        whole = base.get(name if layer == name else f"{layer}.weight")
        if whole is None or (layer != name and len(whole[1]) != 2):
            problems.append(f"{name} belongs to no layer of the model")
            continue
        if layer != name and layer + (HIGH if name.endswith(LOW) else LOW) not in own:
            problems.append(f"{layer} has half an adapter")
            continue
        dtype, wanted = whole
        if layer != name:
            wanted = (spec.rank, wanted[1]) if name.endswith(LOW) else (wanted[0], spec.rank)
        if found != (dtype, wanted):
            problems.append(f"{name} is {found[0]}{list(found[1])}, the model takes {dtype}{list(wanted)}")
    return problems
