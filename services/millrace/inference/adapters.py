"""Whether an adapter fits the model that an engine holds. No torch."""

from collections.abc import Mapping

from millrace.inference.engine import require_fit
from millrace.policies.adapter import AdapterSpec, Shape, adapter_problems
from millrace.policies.manifest import AdapterEntry
from millrace.policies.staged import StagedPolicy


def spec_of(entry: AdapterEntry) -> AdapterSpec:
    """What a manifest says of its adapter."""
    return AdapterSpec(
        rank=entry.rank, alpha=entry.alpha, target_modules=entry.target_modules, modules_to_save=entry.modules_to_save
    )


def require_fitting(staged: StagedPolicy, base: Mapping[str, Shape]) -> None:
    """Raise InvalidStateError, naming tensors, unless the adapter fits weights `base` (dtype and shape by name)."""
    entry = staged.manifest.adapter
    problems = ["it is none"]
    if entry is not None:
        tensors = {name: (tensor.dtype, tensor.shape) for name, tensor in staged.tensors.items()}
        problems = adapter_problems(spec_of(entry), tensors, base, source="the adapter")
    require_fit(
        problems,
        what="adapter",
        reason="ADAPTER_MODEL_MISMATCH",
        remedy="publish the adapter with the base model and the number format that it was trained on",
    )
