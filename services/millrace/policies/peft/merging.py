"""The arithmetic of a merge, each kind as PEFT has it: in float32, rounded once to the base's number format.

W + scaling · B·A                                        LoRA; transposed where the weight is [in, out]
m · (W + scaling · B·A) / |W + scaling · B·A|            DoRA, with the norm of each row; of an embedding: column
W − U_r·S_r·V_r, W − scaling · Q_r·R_r                   what the base of PiSSA and OLoRA is
"""

from collections.abc import Mapping

import numpy as np

from millrace.errors import InvalidStateError
from millrace.models.files import first_names
from millrace.policies.peft.config import PeftConfig
from millrace.policies.peft.plan import AdapterPart, BaseModel, MergePlan
from millrace.policies.tensors import TensorBytes, as_float32, from_float32


def merge_tensors(
    config: PeftConfig,
    plan: MergePlan,
    adapter: Mapping[str, TensorBytes],
    base: Mapping[str, TensorBytes],
    *,
    model: BaseModel,
    source: str,
) -> dict[str, TensorBytes]:
    """Return the tensors of the merged model by name, each in the base's number format.

    `plan` says where each tensor of the adapter goes; `source` names the adapter in errors. Raises InvalidStateError
    (ADAPTER_NOT_FINITE) if the adapter has a value that is not finite, or a sum overflows.
    """
    _require_finite(adapter, source=source)
    # Whole tensors first: an adapter is added to the weight that replaces the base's.
    merged = dict(base)
    if plan.head_of_base is not None:
        head, embedding = plan.head_of_base
        merged[head] = base[embedding]
    for name, stored in plan.whole.items():
        like = base.get(name)
        merged[name] = from_float32(as_float32(adapter[stored]), dtype=like.dtype if like else adapter[stored].dtype)
    changed: dict[str, TensorBytes] = {}
    for layer, parts in plan.layers.items():
        values = {part: as_float32(adapter[stored]) for part, stored in parts.items()}
        changed |= _merge_layer(config, layer, values, merged, is_transposed=model.is_transposed(layer))
    for fused, parts in plan.experts.values():
        low, high = (as_float32(adapter[parts[part]]) for part in (AdapterPart.LOW, AdapterPart.HIGH))
        changed |= fused.merged(low, high, merged, scaling=config.scaling(fused.name))
    _require_finite(changed, source=f"{source}, merged,")
    return merged | changed


def _merge_layer(
    config: PeftConfig,
    layer: str,
    parts: Mapping[AdapterPart, np.ndarray],
    tensors: Mapping[str, TensorBytes],
    *,
    is_transposed: bool,
) -> dict[str, TensorBytes]:
    """Return the layer's weight, and bias if it changes, with the adapter's `parts` merged, by name.

    `is_transposed` says that the layer stores its weight as [in, out].
    """
    name, scaling = f"{layer}.weight", config.scaling(layer)
    stored = tensors[name]
    # Everything below has the layout of nn.Linear, [out, in]; GPT-2's Conv1D stores [in, out].
    weight = as_float32(stored).T if is_transposed else as_float32(stored)
    if AdapterPart.ROWS in parts:
        weight = weight.copy()
        weight[list(config.tokens(layer))] = parts[AdapterPart.ROWS]
    if AdapterPart.LOW in parts:
        weight = _start(config, weight, dtype=stored.dtype, rank=config.rank(layer), scaling=scaling)
        # [out, rank] @ [rank, in]
        weight = weight + scaling * (parts[AdapterPart.HIGH] @ parts[AdapterPart.LOW])
        # DoRA: the merged direction is normalised by rows and scaled with the learned magnitude.
        if AdapterPart.MAGNITUDE in parts:
            weight = weight * (parts[AdapterPart.MAGNITUDE] / np.linalg.norm(weight, axis=1))[:, None]
    # PEFT transposes both factors of an embedding's adapter, whose rows are tokens.
    if AdapterPart.EMBEDDING_LOW in parts:
        # ([width, rank] @ [rank, tokens])ᵀ is [tokens, width], as the embedding.
        weight = weight + scaling * (parts[AdapterPart.EMBEDDING_HIGH] @ parts[AdapterPart.EMBEDDING_LOW]).T
        if AdapterPart.MAGNITUDE in parts:
            weight = weight * (parts[AdapterPart.MAGNITUDE] / np.linalg.norm(weight, axis=0))
    found = {name: from_float32(weight.T if is_transposed else weight, dtype=stored.dtype)}
    if AdapterPart.HIGH_BIAS in parts:
        bias = tensors[f"{layer}.bias"]
        found[f"{layer}.bias"] = from_float32(
            as_float32(bias) + scaling * parts[AdapterPart.HIGH_BIAS], dtype=bias.dtype
        )
    return found


def _start(config: PeftConfig, weight: np.ndarray, *, dtype: str, rank: int, scaling: float) -> np.ndarray:
    """Return the weight, float32, to which an adapter's product is added: less the adapter's start for PiSSA and OLoRA.

    PEFT computes it, and rounds it to `dtype`, each time that the adapter is loaded.
    """
    if config.start == "base":
        return weight
    if config.start == "pissa":
        left, values, right = np.linalg.svd(weight, full_matrices=False)
        # PiSSA begins with the `rank` largest singular values of the weight.
        part = (left[:, :rank] * values[:rank]) @ right[:rank]
    else:
        orthogonal, triangle = np.linalg.qr(weight)
        part = scaling * (orthogonal[:, :rank] @ triangle[:rank])
    return as_float32(from_float32(weight - part, dtype=dtype))


def _require_finite(tensors: Mapping[str, TensorBytes], *, source: str) -> None:
    """Raise InvalidStateError (ADAPTER_NOT_FINITE) if a tensor has a value that is not finite."""
    bad = [name for name, tensor in tensors.items() if not np.isfinite(as_float32(tensor)).all()]
    if bad:
        raise InvalidStateError(
            f"{source} has values that are not finite, in {first_names(bad)}",
            reason="ADAPTER_NOT_FINITE",
            remedy="use a checkpoint from before it diverged",
        )
