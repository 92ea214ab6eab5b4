"""The reader of an `adapter_config.json` of PEFT.

The fields are those of `peft.LoraConfig`, versions 0.2 to 0.21. Known is what is listed here. Every other field may
be there with an empty value, which is what a newer PEFT writes for a kind of adapter that this one is not.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from millrace.decoding import Fields, decode_object, require_integer, require_number, require_text
from millrace.errors import CorruptObjectError, InvalidStateError

MAX_CONFIG_BYTES = 1 << 20
"""Most bytes of an `adapter_config.json` that are read."""
MAX_RANK = 1 << 20
"""Highest rank of an adapter that is read."""

T = TypeVar("T")

Start = Literal["base", "pissa", "olora"]
"""The weights that the adapter is added to: the base, or the base without the part that became the adapter's start."""

_NO_EFFECT = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "bias",  # the biases themselves are among the tensors
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "fan_in_fan_out",  # PEFT itself goes by the layer's class
        "inference_mode",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
    }
)
"""Fields that change nothing in a merge, whatever they say; the ways to start are decided by `init_lora_weights`."""
_STARTS_AT_BASE = ("gaussian", "eva", "orthogonal", "mica")
_MERGE = "merge it with PEFT (PeftModel.from_pretrained(…).merge_and_unload()), save the result and use that"
_CONVERT = (
    "save it as a plain adapter where it was trained (save_pretrained(…, path_initial_model_for_weight_conversion=…)), "
    "or merge it there"
)
_REMEDIES = {
    "init_lora_weights": _CONVERT,
    "alora_invocation_tokens": "it works from a token on, so that no weights can hold it: serve it unmerged",
    "peft_type": _MERGE + "; only LoRA is merged here",
    "task_type": "use an adapter of a causal language model",
    "target_parameters": _MERGE + "; only parameters of experts are known, of the families in docs/adapters.md",
    "target_modules": "list the layers there, as PEFT does when it saves an adapter",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftConfig:
    """The fields of a LoRA adapter that a merge depends on, named as PEFT names them."""

    r: int
    lora_alpha: float
    target_modules: tuple[str, ...] | str
    """Names or ends of names after a dot; a text is one regular expression for whole names."""
    target_parameters: tuple[str, ...] = ()
    """Names of parameters or ends of them after a dot."""
    exclude_modules: tuple[str, ...] | str = ()
    layers_to_transform: tuple[int, ...] = ()
    layers_pattern: tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    trainable_token_indices: tuple[int, ...] | Mapping[str, tuple[int, ...]] = ()
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    start: Start = "base"

    def rank(self, layer: str) -> int:
        """Return the rank of the adapter on the layer named `layer`."""
        return _pattern_value(self.rank_pattern, layer, self.r)

    def scaling(self, layer: str) -> float:
        """Return the factor by which the product B·A of a layer's adapter is multiplied."""
        rank = self.rank(layer)
        return _pattern_value(self.alpha_pattern, layer, self.lora_alpha) / (
            math.sqrt(rank) if self.use_rslora else rank
        )

    def saves(self, layer: str) -> bool:
        """Return whether the layer is, or is in, one that is trained whole.

        Trained whole is any layer whose name ends with one in `modules_to_save`.
        """
        # As PEFT 0.21 does, the ends of names are compared letter by letter: `norm` also means `input_layernorm`
        # (findings/peft_modules_to_save_suffix.sh).
        parts = layer.split(".")
        within = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
        return any(name.endswith(self.modules_to_save) for name in within) if self.modules_to_save else False

    def targets(self, layer: str) -> bool:
        """Return whether the layer with this name has an adapter, if it is of a class that can have one."""
        if _is_named(self.exclude_modules, layer) or not _is_named(self.target_modules, layer):
            return False
        if any(re.match(rf"(^|.*\.){name}($|\..*)", layer) for name in self.modules_to_save):
            return False
        return not self.layers_to_transform or self._number(layer) in self.layers_to_transform

    def targets_parameter(self, name: str) -> bool:
        """Return whether `target_parameters` names the parameter `name` (one that is not a layer's weight): it has an
        adapter.
        """
        return bool(self.target_parameters) and _is_named(self.target_parameters, name)

    def tokens(self, layer: str) -> tuple[int, ...]:
        """Return the token ids whose rows of the embedding named `layer` were trained alone; empty if none were."""
        if not isinstance(self.trainable_token_indices, Mapping):
            return self.trainable_token_indices
        named = [name for name in self.trainable_token_indices if _is_named((name,), layer)]
        return self.trainable_token_indices[named[0]] if named else ()

    def _number(self, layer: str) -> int | None:
        """Return the number of the block that a layer is in, from its name; None if it is in none."""
        patterns = [rf"(?:^|.*?\.){pattern}\.(?P<number>\d+)\." for pattern in self.layers_pattern]
        for pattern in patterns or [r".*?\.[^.]*\.(?P<number>\d+)\."]:
            if match := re.match(pattern, layer):
                return int(match["number"])
        return None


def parse_peft_config(data: bytes, *, source: str) -> PeftConfig:
    """Parse the bytes of an `adapter_config.json`; `source` names the file in errors.

    Raises CorruptObjectError (ADAPTER_CONFIG_INVALID) if it is malformed, and InvalidStateError
    (ADAPTER_NOT_SUPPORTED), with field and value, for a setting with which the merge could differ from PEFT's.
    """
    reason, remedy = "ADAPTER_CONFIG_INVALID", "copy or save the adapter again"
    raw = decode_object(data, what=source, reason=reason, remedy=remedy, max_bytes=MAX_CONFIG_BYTES)
    if raw.get("peft_type") != "LORA":
        raise not_supported(source, "peft_type", raw.get("peft_type"))
    try:
        config = _parse(_Raw(raw))
    except ValueError as error:
        raise CorruptObjectError(
            f"{source} is not an adapter config that this version reads: {error}", reason=reason, remedy=remedy
        ) from error
    for key, is_known in _decided(raw, config).items():
        if not is_known:
            raise not_supported(source, key, raw[key])
    return config


def _decided(raw: Mapping[str, Any], config: PeftConfig) -> dict[str, bool]:
    """Return for each field of the decoded file whether a merge here does with its value what PEFT does."""
    read = PeftConfig.__dataclass_fields__.keys()
    known = {key: key in read or key in _NO_EFFECT or _is_empty(value) for key, value in raw.items()}
    start, task = raw.get("init_lora_weights"), raw.get("task_type")
    return known | {
        "init_lora_weights": not isinstance(start, str) or start in _STARTS_AT_BASE or config.start != "base",
        "task_type": task in (None, "CAUSAL_LM"),
        "target_modules": config.target_modules != "all-linear",
        "peft_type": True,
    }


def _parse(raw: "_Raw") -> PeftConfig:
    """Decode the fields that are read; raise ValueError naming one that is malformed."""
    fields = Fields(raw.value)
    start = raw.value.get("init_lora_weights")
    # `pissa_niter_N` is not among them, and is refused: PEFT 0.21 computes its randomised decomposition anew at each
    # load, so that another model comes back (findings/peft_pissa_niter_reload.sh).
    starts: dict[str, Start] = {"pissa": "pissa", "olora": "olora"}
    return PeftConfig(
        r=fields.integer("r", least=1, most=MAX_RANK),
        lora_alpha=fields.number("lora_alpha"),
        target_modules=raw.names("target_modules", is_needed=not raw.value.get("target_parameters")),
        target_parameters=raw.listed("target_parameters"),
        exclude_modules=raw.names("exclude_modules"),
        layers_to_transform=raw.numbers("layers_to_transform"),
        layers_pattern=raw.patterns("layers_pattern"),
        modules_to_save=raw.patterns("modules_to_save"),
        rank_pattern={
            name: require_integer(value, what=f"rank_pattern[{name!r}]", least=1, most=MAX_RANK)
            for name, value in raw.table("rank_pattern").items()
        },
        alpha_pattern={
            name: require_number(value, what=f"alpha_pattern[{name!r}]")
            for name, value in raw.table("alpha_pattern").items()
        },
        trainable_token_indices=raw.tokens("trainable_token_indices"),
        use_rslora=raw.flag("use_rslora"),
        use_dora=raw.flag("use_dora"),
        lora_bias=raw.flag("lora_bias"),
        start=starts.get(start.lower(), "base") if isinstance(start, str) else "base",
    )


@dataclass(frozen=True, slots=True)
class _Raw:
    """A decoded config, whose optional fields are null or left out where they say nothing."""

    value: dict[str, Any]

    def flag(self, name: str) -> bool:
        """Return the truth value of a field; False if it is null or left out."""
        return Fields(self.value).flag(name) if self.value.get(name) is not None else False

    def names(self, name: str, *, is_needed: bool = False) -> tuple[str, ...] | str:
        """Return a field's list of names, or its text, one regular expression.

        Empty if it is left out and not `is_needed`. Raises ValueError if it is malformed.
        """
        found = self.value.get(name)
        if found is None and not is_needed:
            return ()
        if isinstance(found, str):
            return _compiled(found, what=name)
        return Fields(self.value).texts(name)

    def listed(self, name: str) -> tuple[str, ...]:
        """Return a field's list of names; empty if it is null or left out."""
        return Fields(self.value).texts(name) if self.value.get(name) is not None else ()

    def patterns(self, name: str) -> tuple[str, ...]:
        """Return a field's regular expressions; a text is one, and a field that is left out none."""
        found = self.names(name)
        patterns = (found,) if isinstance(found, str) else found
        return tuple(_compiled(pattern, what=name) for pattern in patterns)

    def numbers(self, name: str) -> tuple[int, ...]:
        """Return a field's whole numbers; a single one is a list of one, and a field that is left out none."""
        found = self.value.get(name)
        if found is None:
            return ()
        listed = found if isinstance(found, list) else [found]
        return tuple(require_integer(each, what=name) for each in listed)

    def table(self, name: str) -> dict[str, Any]:
        """Return a field's table as a dict, by regular expression; empty if the field is null or left out.

        Raises ValueError if the field is no table, or a key no regular expression.
        """
        found = self.value.get(name) or {}
        if not isinstance(found, dict):
            raise ValueError(f"{name} is a JSON {type(found).__name__} instead of an object")
        return {_compiled(pattern, what=name): value for pattern, value in found.items()}

    def tokens(self, name: str) -> tuple[int, ...] | dict[str, tuple[int, ...]]:
        """Return a field's token ids, or its token ids by the name of the embedding; empty if it is left out."""
        found = self.value.get(name)
        if not isinstance(found, dict):
            return self.numbers(name)
        return {key: _Raw(found).numbers(key) for key in found}


def _compiled(pattern: str, *, what: str) -> str:
    """Return the pattern; raise ValueError unless it is a regular expression. `what` names the field in the error."""
    try:
        re.compile(require_text(pattern, what=what))
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{what} has {pattern[:200]!r}, which is no regular expression: {error}") from error
    return pattern


def _is_named(names: tuple[str, ...] | str, layer: str) -> bool:
    """Return whether a layer's name is one of `names`, or ends with one after a dot: PEFT's rule for target_modules.

    A text instead of a tuple is a regular expression for the whole name.
    """
    if isinstance(names, str):
        return bool(names) and re.fullmatch(names, layer) is not None
    return any(layer == name or layer.endswith(f".{name}") for name in names)


def _pattern_value(patterns: Mapping[str, T], layer: str, default: T) -> T:
    """Return the value of the first pattern that fits the layer's name, or its end after a dot, else `default`.

    That is PEFT's rule for rank_pattern and alpha_pattern.
    """
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", layer):
            return value
    return default


def _is_empty(value: object) -> bool:
    """Return whether a field's value sets nothing: null, false, or an empty table, list or text."""
    return value is None or value is False or value in ({}, [], "")


def not_supported(source: str, key: str, value: object) -> InvalidStateError:
    """Make the error of an adapter whose field `key` has a value with which a merge could differ from PEFT's."""
    shown = json.dumps(value)
    return InvalidStateError(
        f"{source} is an adapter that is not merged here: {key} is {shown[:200]}{'…' if len(shown) > 200 else ''}",
        reason="ADAPTER_NOT_SUPPORTED",
        remedy=_REMEDIES.get(key, _MERGE),
        metadata={"field": key},
    )


# LoRA adapters as policies: their names, and the `adapter_config.json` that PEFT and vLLM read. No torch.

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
        """Return the factor by which the product B·A of an adapter is multiplied."""
        return self.alpha / self.rank

    def to_config(self, *, base_model: str = "") -> bytes:
        """Return the content of PEFT's `adapter_config.json`.

        `base_model` is the name or path of the base, or empty.
        """
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
    """Return the base's name for an adapter's config: the absolute path of a directory, else the name (a Hub id)."""
    path = Path(name).expanduser()
    return str(path.resolve()) if path.is_dir() else name


def published_name(name: str) -> str:
    """Return the name that PEFT gives the model's tensor `name` in an adapter's file."""
    return _PREFIX + name


def model_name(name: str, *, source: str) -> str:
    """Return the model's own name of the tensor that an adapter's file calls `name`.

    Raises CorruptObjectError if the name is not one of PEFT's; `source` names the adapter in the error.
    """
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
    """Return a sentence for each tensor of an adapter that does not fit its base; empty if all fit.

    `tensors` has (dtype, shape) by published name, and `base` by the model's own names. Raises CorruptObjectError
    (ADAPTER_NAME_INVALID), which names `source`, for a name that is not one of PEFT's.
    """
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
            # A weight W is [out, in]; the adapter's A is [rank, in], and its B is [out, rank].
            wanted = (spec.rank, wanted[1]) if name.endswith(LOW) else (wanted[0], spec.rank)
        if found != (dtype, wanted):
            problems.append(f"{name} is {found[0]}{list(found[1])}, the model takes {dtype}{list(wanted)}")
    return problems
