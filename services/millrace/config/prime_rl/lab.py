"""Values of Hosted Training, of verifiers' own trainer (`vf-rl`) and of `vf-eval` that are written otherwise here."""

import re
from pathlib import Path as FilePath
from typing import Any

from millrace.config.files import UnreadableFileError, read_file
from millrace.config.layers import MAX_SECTIONS, Strength
from millrace.config.messages import Effect
from millrace.config.prime_rl.meanings import Target
from millrace.config.prime_rl.sources import TRAIN_ENVS, put_environment
from millrace.config.tree import Path

VF_RL_DEFAULTS: dict[Path, Any] = {
    ("max_steps",): 500,
    ("seq_len",): 2048,
    ("orchestrator", "batch_size"): 512,
    ("orchestrator", "rollouts_per_example"): 16,
    ("trainer", "optim", "lr"): 1e-5,
    ("trainer", "optim", "weight_decay"): 0.0,
    ("trainer", "model", "lora", "rank"): 8,
    ("trainer", "model", "lora", "alpha"): 32.0,
}
"""What verifiers' RLTrainer takes where its file is silent (verifiers 0.1.9)."""
_ENDPOINTS = "configs/endpoints.toml"
_ITEM = {"env_id": "id", "env_args": "args"}
_PER_EVAL = (
    "model",
    "endpoint_id",
    "sampling_args",
    "max_tokens",
    "temperature",
    "save",
    "extra_env_kwargs",
    "provider",
)


def model_name(target: Target, path: Path, value: Any) -> None:
    """`model = "NAME"` is `model.name`."""
    target.put(("model", "name"), value, source=path)


def adapters(target: Target, path: Path, value: Any) -> None:
    """`type = "lora"` trains adapters, as `[trainer.model.lora]` does; `full` all weights."""
    if value == "lora":
        target.note(path, Effect.MEANS, "is `[trainer.model.lora]` here, with its rank and alpha")
        target.put(("trainer", "model", "lora"), {}, source=path)
    elif value in ("full", "full_finetune"):
        target.note(path, Effect.SAME, "")
    else:
        target.refuse(path, value, 'must be "lora" or "full"')


def environments(target: Target, path: Path, value: Any) -> None:
    """`[[env]]`, or `[env]` alone, as `[[orchestrator.env]]`; `[[eval]]` as `[[env]]`."""
    to = TRAIN_ENVS if path == ("env",) else ("env",)
    items = [value] if isinstance(value, dict) else value
    if not isinstance(items, list) or len(items) > MAX_SECTIONS:
        target.put(to, value, source=path)  # which is an error there
        return
    target.put(to, [{} if isinstance(item, dict) else item for item in items], source=path)
    for index, item in enumerate(items):
        here = path if isinstance(value, dict) else (*path, index)
        if isinstance(item, dict):
            _environment(target, here, item, (*to, index))
    target.note(path, Effect.MEANS, f"is `[[{'.'.join(map(str, to))}]]` here")


def _environment(target: Target, path: Path, item: dict[str, Any], to: Path) -> None:
    for key, each in item.items():
        here = (*path, key)
        if key == "taskset" and isinstance(each, dict):
            put_environment(target, path, {"taskset": each}, to)
        elif key == "harness":
            target.put((*to, "args", "env", "agent", "harness"), each, source=here)
        elif key == "env" and to[0] == "env" and isinstance(each, dict):  # `[eval.env]` of 2025
            _environment(target, here, each, to)
        elif key in _PER_EVAL and to[0] == "env":
            target.refuse(
                here, each, "is one for a whole evaluation: write a file of its own, or set it above [[eval]]"
            )
        else:
            target.move(here, each, (*to, _ITEM.get(key, key)))


def run_name(target: Target, path: Path, value: Any) -> None:
    """The name of a run, in lower case with dashes."""
    name = re.sub(r"[^a-z0-9]+", "-", str(value).lower()).strip("-")[:63]
    if name != value:
        target.note(path, Effect.MEANS, f"is {name} here: lower-case letters, digits and dashes")
    target.put(("run", "name"), name, source=path)


def trainer_args(target: Target, path: Path, value: Any) -> None:
    """Settings of verifiers' RLTrainer."""
    if not isinstance(value, dict):
        target.refuse(path, value, "must be a table")
        return
    if target.layer.origin.strength is not Strength.FILE:  # whose defaults would overrule a file
        for key, each in value.items():
            target.refuse((*path, key), each, "unknown key; settings of vf-rl are read in a file of vf-rl")
        return
    target.deferred["vf_rl"] = (path, value)
    for key, each in value.items():
        target.move((*path, key), each, (*path, key))


def low_rank(target: Target, path: Path, value: Any) -> None:
    """`use_lora = true` trains adapters only, as `[model.lora]` does."""
    where: Path = ("trainer", "model", "lora") if path[0] == "trainer" else ("model", "lora")
    if value is True:
        target.put(where, {}, source=path)
        target.note(path, Effect.MEANS, f"is `[{'.'.join(map(str, where))}]` here")
    elif value is False:
        target.deferred["whole"] = (path, where)
        target.note(path, Effect.SAME, "")
    else:
        target.refuse(path, value, "must be true or false")


def lora_targets(target: Target, path: Path, value: Any) -> None:
    """`all-linear`, or layers of adapters as a list; one name is a list of one."""
    where: Path = ("trainer", "model", "lora") if path[0] == "trainer" else ("model", "lora")
    if value == "all-linear":
        target.note(path, Effect.MEANS, "is the default of `target_modules` here: attention, MLP and experts")
    else:
        names = [value] if isinstance(value, str) else value
        target.put((*where, "target_modules"), names, source=path)


def recomputed(target: Target, path: Path, value: Any) -> None:
    """`gradient_checkpointing = true` is `[trainer.model.ac]`."""
    where: Path = ("trainer", "model", "ac") if path[0] == "trainer" else ("model", "ac")
    if value is True:
        target.note(path, Effect.MEANS, f"is `[{'.'.join(map(str, where))}]` here")
        target.put(where, {}, source=path)
    else:
        target.note(path, Effect.SAME, "")


def scaled(target: Target, path: Path, value: Any) -> None:
    """`scale_rewards` is `orchestrator.algo.std_norm`."""
    to = {False: "none", True: "group"}[value] if isinstance(value, bool) else value
    target.note(path, Effect.MEANS, "is `orchestrator.algo.std_norm` here")
    target.put(("orchestrator", "algo", "std_norm"), to, source=path)


def per_device(target: Target, path: Path, value: Any) -> None:
    """Samples per device and accumulated steps, whose product with the devices is `orchestrator.batch_size`."""
    if type(value) is int and value > 0:
        target.deferred[str(path[-1])] = (path, value)
    else:
        target.refuse(path, value, "must be an integer of at least 1")


def endpoint(target: Target, path: Path, value: Any) -> None:
    """An endpoint of `endpoints.toml`, as `[client]` and `model.name`."""
    if isinstance(value, str):
        target.deferred[str(path[-1])] = (path, value)
    else:
        target.refuse(path, value, "must be a string")


def finish_lab(target: Target) -> None:
    """Apply what needs the whole layer."""
    if "vf_rl" in target.deferred:
        _vf_rl(target)
    if "endpoint_id" in target.deferred:
        _endpoint(target)
    elif "endpoints_path" in target.deferred:
        path, _ = target.deferred["endpoints_path"]
        target.note(path, Effect.NOTHING, "no `endpoint_id` names one of them")


def _vf_rl(target: Target) -> None:
    path, _ = target.deferred["vf_rl"]
    tree = target.layer.tree
    accumulated = target.deferred.get("gradient_accumulation_steps", (path, 1))[1]
    if "per_device_train_batch_size" in target.deferred:
        source, each = target.deferred["per_device_train_batch_size"]
        devices = target.deferred.get("num_train_gpus", (path, 1))[1]
        size = each * accumulated * devices
        target.note(
            source, Effect.MEANS, f"is `orchestrator.batch_size = {size}` here: {each} x {accumulated} x {devices}"
        )
        target.put(("orchestrator", "batch_size"), size, source=source)
    elif "gradient_accumulation_steps" in target.deferred:
        source, _ = target.deferred["gradient_accumulation_steps"]
        target.note(source, Effect.NOTHING, "`batch_size` counts the rollouts of a step")
    filled = []
    for key, value in VF_RL_DEFAULTS.items():
        if "lora" in key and "whole" in target.deferred:
            continue
        here: Any = tree
        for part in key:
            here = here.get(part) if isinstance(here, dict) else None
        if here is None:
            target.put(key, value, source=path)
            filled.append(f"{'.'.join(map(str, key))} = {value}")
    text = (
        "is trained by vf-rl with CISPO and one step of overlap; the loss here is `trainer.loss`, and "
        "`--algo.preset cispo` is nearest"
    )
    target.note(path, Effect.MEANS, f"{text}. As vf-rl's defaults: {', '.join(filled)}" if filled else text)


def _endpoint(target: Target) -> None:
    path, name = target.deferred["endpoint_id"]
    source, listed = target.deferred.get("endpoints_path", (path, _ENDPOINTS))
    try:
        file = read_file(str(FilePath(target.layer.origin.label).parent / listed))
    except UnreadableFileError as error:
        message = f"{error.violation.message}; name the file with `[[endpoint]]`, or write [client]"
        target.refuse(source, listed, message)
        return
    found = file.tree.get("endpoint", [])
    found = found if isinstance(found, list) else []
    named = [each for each in found if isinstance(each, dict) and each.get("endpoint_id") == name]
    if not named:
        known = ", ".join(str(each.get("endpoint_id")) for each in found if isinstance(each, dict))
        target.refuse(path, name, f"is none of the endpoints of {listed}: {known}")
        return
    target.note(path, Effect.MEANS, f"is `[client]` and `model.name` here, as {listed} has them")
    if "model" not in target.layer.tree:
        target.put(("model", "name"), named[0].get("model"), source=path)
    urls = [each.get("url") for each in named]
    target.put(("client", "base_url"), urls, source=path)
    if key := named[0].get("key"):
        target.put(("client", "api_key_var"), key, source=path)
