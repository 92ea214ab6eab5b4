"""Whether ranks and model fit what the config says of their layout: everything that does not, before anything loads."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from millrace.config.sections.trainer import ModelLayoutConfig
from millrace.decoding import decode_object
from millrace.errors import InvalidSpecError, Violation
from millrace.trainer.model import context_parallel, expert_parallel, tensor_parallel
from millrace.trainer.model.mesh import RankLayout

_CONFIG_REMEDY = "restore config.json of the model that model.name says"
_SHARED_BY_TP = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_PIECEWISE = {"full_attention", "sliding_attention"}


def fit_layout(config: ModelLayoutConfig, directory: Path, *, world_size: int, prefix: str) -> RankLayout:
    """The layout of `world_size` ranks for the model in a directory, of which only config.json is read.

    `prefix` is the table of the config's keys. InvalidSpecError (LAYOUT_IMPOSSIBLE) has all that contradicts.
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
    """The same refusals for a model of which this is the config; it may be empty where no rank shares a layer."""
    violations = RankLayout.violations(config, world_size=world_size, prefix=prefix)
    violations += [
        Violation(field=f"{prefix}.{key}", value=str(getattr(config, key)), message=message)
        for key, message in _of_model(config, model)
    ]
    if violations:
        raise InvalidSpecError(
            violations, reason="LAYOUT_IMPOSSIBLE", remedy="change the keys, or the number of ranks, as each line says"
        )


def _of_model(config: ModelLayoutConfig, model: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Keys and what the model does not let them be."""
    sizes = {name: model[name] for name in _SHARED_BY_TP if isinstance(model.get(name), int)}
    uneven = [f"{name} is {size}" for name, size in sizes.items() if size % config.tp]
    if config.tp > 1 and (unproved := _unproved(model, tensor_parallel.PROVED)):
        yield "tp", unproved
    elif uneven:
        divisor = math.gcd(*sizes.values())
        yield "tp", f"{' and '.join(uneven)}, which {config.tp} ranks cannot share: set it to a divisor of {divisor}"
    if config.cp > 1 and model.get("model_type") == "gpt_oss":
        yield "cp", "the attention of gpt_oss has sinks, which rows in pieces do not compute: leave it out"
    elif config.cp > 1 and (others := sorted(set(model.get("layer_types") or ()) - _PIECEWISE)):
        yield "cp", f"the model has layers of {', '.join(others)}, which need whole rows: leave it out"
    elif config.cp > 1 and (unproved := _unproved(model, context_parallel.PROVED)):
        yield "cp", unproved
    experts = next((model[name] for name in _NUM_EXPERTS if isinstance(model.get(name), int)), None)
    if config.ep > 1 and experts is None:
        yield "ep", "the model has no experts: leave it out"
    elif config.ep > 1 and (unproved := _unproved(model, expert_parallel.PROVED)):
        yield "ep", unproved
    elif config.ep > 1 and experts and experts % config.ep:
        yield (
            "ep",
            f"the model has {experts} experts in a layer, which {config.ep} ranks cannot share: set it to a divisor",
        )


def _unproved(model: Mapping[str, Any], proved: Sequence[str]) -> str | None:
    """Why a key is not for this type of model; None if it is proved for it.

    Others may load, and then learn something else without a word: what a type computes between the ranks' exchanges is
    its own code.
    """
    if (found := model.get("model_type")) in proved:
        return None
    return f"it is proved for models of type {', '.join(proved)} only, not {found}: leave it out"
