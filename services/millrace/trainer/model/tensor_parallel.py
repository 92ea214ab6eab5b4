"""Layers cut over ranks that compute on the same samples, by the plan that transformers has for the model.

Attention heads and the rows of the MLP are shared out; embeddings, norms and the head stay whole at every rank, so that
log-probs are computed as they are everywhere. So do experts, which `expert_parallel` shares out. The norms of queries
and keys see a rank's heads only: the plan sums their gradients.
"""

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from millrace.errors import InvalidSpecError, Violation

PROVED = (
    "arcee",
    "cohere",
    "cohere2",
    "ernie4_5",
    "exaone4",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gpt_neox",
    "granite",
    "helium",
    "llama",
    "ministral",
    "mistral",
    "mixtral",
    "nemotron",
    "olmo",
    "phi",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
    "starcoder2",
)
"""Types of models that learn the same in layers that are cut.

A plan of known styles is not enough: what every rank has, and sees its part of a layer with (the activations of
apertus), gets a part of its gradient.
"""
_STYLES = {"colwise", "rowwise", "replicated_with_grad_allreduce"}
_WHOLE = ("embed_tokens", "lm_head", ".experts")


def cut_layers(model: Any, mesh: DeviceMesh, *, prefix: str = "trainer.model") -> None:
    """Cut the layers of a whole model over a mesh of one dimension, in place; before FSDP cuts what is left.

    InvalidSpecError if there is no plan for its architecture that is proved here.
    """
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    whole: dict[str, str] = model.tp_plan or {}
    plan = {name: style for name, style in whole.items() if not any(part in name for part in _WHOLE)}
    name = type(model).__name__
    if not plan:
        raise _impossible(f"transformers has no plan for {name}", "set it to 1", tp=mesh.size(), prefix=prefix)
    if unknown := sorted(set(plan.values()) - _STYLES):
        what = f"the plan of {name} cuts layers as {', '.join(unknown)}, which is not proved here"
        raise _impossible(what, "set it to 1", tp=mesh.size(), prefix=prefix)
    apply_tensor_parallelism(model, mesh, model._expand_parallel_plan(plan))


def _impossible(message: str, remedy: str, *, tp: int, prefix: str) -> InvalidSpecError:
    violation = Violation(field=f"{prefix}.tp", value=str(tp), message=message)
    return InvalidSpecError([violation], reason="LAYOUT_IMPOSSIBLE", remedy=remedy)
