"""Checks that ranks and model fit the layout of the config, before anything loads, and tensor parallelism."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from millrace.config.sections.trainer import ModelLayoutConfig
from millrace.decoding import decode_object
from millrace.errors import InvalidSpecError, Violation
from millrace.trainer.model import context_parallel
from millrace.trainer.model.mesh import RankLayout

_CONFIG_REMEDY = "restore config.json of the model that model.name says"
_SHARED_BY_TP = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_PIECEWISE = {"full_attention", "sliding_attention"}


def fit_layout(config: ModelLayoutConfig, directory: Path, *, world_size: int, prefix: str) -> RankLayout:
    """Return the layout of `world_size` ranks that `config` says, after checking that the model in `directory` fits it.

    Reads only config.json. `prefix` is the name of the config's table, for messages. Raises InvalidSpecError
    (LAYOUT_IMPOSSIBLE) with every key that does not fit, and an error for a config.json that is not valid.
    """
    model: dict[str, Any] = {}
    if config.tp > 1 or config.cp > 1 or config.ep > 1:
        path = directory / "config.json"
        model = decode_object(
            path.read_bytes(),
            what=str(path),
            reason="MODEL_CONFIG_INVALID",
            remedy=_CONFIG_REMEDY,
            allows_infinity=True,
        )
    require_layout(config, model, world_size=world_size, prefix=prefix)
    return RankLayout.of(config, world_size=world_size)


def require_layout(config: ModelLayoutConfig, model: Mapping[str, Any], *, world_size: int, prefix: str) -> None:
    """Raise InvalidSpecError (LAYOUT_IMPOSSIBLE) if a layout does not fit the number of ranks or the model.

    `model` is the content of config.json, and may be empty if neither tp, cp nor ep is above 1. `prefix` is the name of
    the config's table, for messages.
    """
    violations = RankLayout.violations(config, world_size=world_size, prefix=prefix)
    violations += [
        Violation(field=f"{prefix}.{key}", value=str(getattr(config, key)), message=message)
        for key, message in _misfits(config, model)
    ]
    if violations:
        raise InvalidSpecError(
            violations, reason="LAYOUT_IMPOSSIBLE", remedy="change the keys, or the number of ranks, as each line says"
        )


def _misfits(config: ModelLayoutConfig, model: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each of the keys tp, cp and ep that does not fit the model, with a sentence that says why and what to set.

    `model` is the content of config.json.
    """
    sizes = {name: model[name] for name in _SHARED_BY_TP if isinstance(model.get(name), int)}
    uneven = [f"{name} is {size}" for name, size in sizes.items() if size % config.tp]
    if config.tp > 1 and (unproved := _unproved(model, PROVED)):
        yield "tp", unproved
    elif uneven:
        # A divisor of all sizes at once, which is what the message recommends.
        divisor = math.gcd(*sizes.values())
        yield "tp", f"{' and '.join(uneven)}, which {config.tp} ranks cannot share: set it to a divisor of {divisor}"
    if config.cp > 1 and model.get("model_type") == "gpt_oss":
        yield "cp", "the attention of gpt_oss has sinks, which rows in pieces do not compute: leave it out"
    elif config.cp > 1 and (others := sorted(set(model.get("layer_types") or ()) - _PIECEWISE)):
        yield "cp", f"the model has layers of {', '.join(others)}, which need whole rows: leave it out"
    elif config.cp > 1 and (unproved := _unproved(model, context_parallel.PROVED)):
        yield "cp", unproved
    # Experts of another form than transformers' are refused when they are cut, once there is a model to look at.
    text = model.get("text_config") or model
    experts = next((text[name] for name in _NUM_EXPERTS if isinstance(text.get(name), int)), None)
    if config.ep > 1 and experts is None:
        yield "ep", "the model has no experts: leave it out"
    elif config.ep > 1 and experts and experts % config.ep:
        yield (
            "ep",
            f"the model has {experts} experts in a layer, which {config.ep} ranks cannot share: set it to a divisor",
        )


def _unproved(model: Mapping[str, Any], proved: Sequence[str]) -> str | None:
    """Return a sentence that this type of model is not supported; None if its `model_type` is in `proved`.

    `model` is the content of config.json. Other types may load, and then silently learn something else, because each
    type has its own code between the ranks' exchanges.
    """
    if (found := model.get("model_type")) in proved:
        return None
    return f"it is proved for models of type {', '.join(proved)} only, not {found}: leave it out"


# Layers cut over ranks that compute on the same samples, by the plan that transformers has for the model.
#
# Attention heads and the rows of the MLP are split; embeddings, norms and the head stay whole at every rank, so that
# log-probs are computed as without it. So do experts, which `expert_parallel` splits. The norms of queries and keys
# get a rank's heads only: the plan sums their gradients.

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
"""Types of models that are known to learn the same in layers that are cut.

A plan of known styles is not enough: a parameter that every rank has whole, and applies to its part of a layer (in the
activations of apertus), gets only a part of its gradient.
"""
_STYLES = {"colwise", "rowwise", "replicated_with_grad_allreduce"}
_WHOLE = ("embed_tokens", "lm_head", ".experts")


def cut_layers(model: Any, mesh: DeviceMesh, *, prefix: str = "trainer.model") -> None:
    """Split the layers of a whole model over the ranks of a one-dimensional mesh (tensor parallelism), in place.

    Call it before FSDP shards them further. Raises InvalidSpecError if transformers has no plan for the model's
    architecture, or a plan with styles that are not tested here. `prefix` is the name of the config's table, for
    messages.
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
    """Make the error that the model's layers cannot be split over `tp` ranks.

    `message` says why, `remedy` what helps.
    """
    violation = Violation(field=f"{prefix}.tp", value=str(tp), message=message)
    return InvalidSpecError([violation], reason="LAYOUT_IMPOSSIBLE", remedy=remedy)
