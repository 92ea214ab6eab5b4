"""Values of Hosted Training, of verifiers' own trainer (`vf-rl`) and of `vf-eval` that are written otherwise here."""

import re
from pathlib import Path as FilePath
from typing import Any

from millrace.config.files import UnreadableFileError, read_file
from millrace.config.layers import MAX_SECTIONS, Layer, Strength
from millrace.config.messages import Effect
from millrace.config.prime_rl.meanings import Target, explained
from millrace.config.prime_rl.sources import TRAIN_ENVS
from millrace.config.tree import Path, dotted

HOSTED_DEFAULTS: dict[Path, Any] = {
    ("max_steps",): 100,
    ("orchestrator", "batch_size"): 128,
    ("orchestrator", "rollouts_per_example"): 8,
    ("trainer", "optim", "lr"): 1e-4,
    ("trainer", "model", "lora", "alpha"): 16.0,
}
"""What Hosted Training takes where its file is silent (prime 0.6, and its documentation of 2026-08)."""
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
_SEQ_LEN = 2048
"""Longest sample of Hosted Training in tokens, where its file has no `seq_len` and its replies are shorter."""
_ITEM = {"env_id": "id", "env_args": "args"}
_PER_EVAL = ("model", "endpoint_id", "provider", "api_base_url", "api_key_var", "api_client_type", "save")
"""Keys of one of several evaluations that one evaluation here has once."""
_FOR_ALL = ("max_concurrent", "timeout", "output_dir")
_SAMPLED = {"sampling_args": "sampling", "max_tokens": "sampling.max_tokens", "temperature": "sampling.temperature"}
_DIALECTS = (None, "openai_chat_completions", "openai_chat_completions_token", "renderer")
"""Kinds of endpoints of verifiers that are asked as ours are."""
_ENDPOINT_KEYS = ("endpoint_id", "model", "url", "api_base_url", "key", "api_key_var", "type", "api_client_type")


@explained("`model.name`")
def model_name(target: Target, path: Path, value: Any) -> None:
    """Translate the name of the model, written at `path`.

    Put it as `model.name`, and defer it as the mark of a flat file.
    """
    target.deferred["flat"] = (path, value)
    target.put(("model", "name"), value, source=path)


@explained('`orchestrator.algo.type`, unless "rl"')
def hosted_loss(target: Target, path: Path, value: Any) -> None:
    """Translate `loss`, written at `path`: "rl" is the default, "sft" and "opd" move to `orchestrator.algo.type`.

    Other values are refused.
    """
    if value == "rl":
        target.note(path, Effect.SAME, "")
    elif value in ("sft", "opd"):
        target.move(path, value, ("orchestrator", "algo", "type"))
    else:
        target.refuse(path, value, 'must be "rl", "sft" or "opd"')


@explained('"lora": `[trainer.model.lora]`; "full": all weights')
def adapters(target: Target, path: Path, value: Any) -> None:
    """Translate what is trained, written at `path`: put an empty `[trainer.model.lora]` for "lora".

    "full" and "full_finetune" are noted as the default; other values are refused.
    """
    if value == "lora":
        target.note(path, Effect.MEANS, "is `[trainer.model.lora]` here, with its rank and alpha")
        target.put(("trainer", "model", "lora"), {}, source=path)
    elif value in ("full", "full_finetune"):
        target.deferred["full"] = (path, value)
        target.note(path, Effect.SAME, "")
    else:
        target.refuse(path, value, 'must be "lora" or "full"')


@explained("`[[orchestrator.env]]`; `[[eval]]`: `[[env]]`")
def environments(target: Target, path: Path, value: Any) -> None:
    """Translate a table or a list of environments, written at `path`, key by key.

    At `env` they become `[[orchestrator.env]]`; at any other path, such as `eval`, they become `[[env]]` of an
    evaluation.
    """
    to = TRAIN_ENVS if path == ("env",) else ("env",)
    items = [value] if isinstance(value, dict) else value
    if to == TRAIN_ENVS and isinstance(value, list):
        target.deferred["hosted"] = (path, value)
    if not isinstance(items, list) or len(items) > MAX_SECTIONS:
        target.put(to, value, source=path)  # which is an error there
        return
    target.put(to, [{} if isinstance(item, dict) else item for item in items], source=path)
    for index, item in enumerate(items):
        here = path if isinstance(value, dict) else (*path, index)
        if isinstance(item, dict):
            _environment(target, here, item, (*to, index), is_alone=len(items) == 1)
    target.note(path, Effect.MEANS, f"is `[[{'.'.join(map(str, to))}]]` here")


def _environment(target: Target, path: Path, item: dict[str, Any], to: Path, *, is_alone: bool) -> None:
    """Move the keys of one environment from the table `item`, written at `path`, to `to`.

    `is_alone` says that it is the file's only environment: then keys of a whole evaluation in it move to the top.
    """
    for key, each in item.items():
        here = (*path, key)
        if key == "env" and to[0] == "env" and isinstance(each, dict):  # `[eval.env]` of 2025
            _environment(target, here, each, to, is_alone=is_alone)
        elif to[0] == "env" and key in (*_PER_EVAL, *_FOR_ALL):
            _of_evaluation(target, here, each, is_alone=is_alone)
        elif to[0] == "env" and key in _SAMPLED:
            target.move(here, each, (*to, *_SAMPLED[key].split(".")))
        else:
            target.move(here, each, (*to, _ITEM.get(key, key)))


def _of_evaluation(target: Target, path: Path, value: Any, *, is_alone: bool) -> None:
    """Translate a key in one `[[eval]]`, written at `path`, that a whole evaluation has once here.

    `is_alone` says that there is one `[[eval]]`: the key moves to the top. Of several, a key that changes no answer is
    noted as without effect, and another one is refused.
    """
    key = str(path[-1])
    if is_alone:
        target.move(path, value, (key,))
    elif key in _FOR_ALL:
        target.note(path, Effect.NOTHING, "is one for all environments: write it above [[eval]]", value=value)
    else:
        target.refuse(path, value, "is one for a whole evaluation: write a file of its own, or set it above [[eval]]")


@explained("`run.name`, in lower case with dashes")
def run_name(target: Target, path: Path, value: Any) -> None:
    """Translate the name of a run, written at `path`.

    Put it as `run.name` in lower case, other characters as dashes.
    """
    name = re.sub(r"[^a-z0-9]+", "-", str(value).lower()).strip("-")[:63]
    if name != value:
        target.note(path, Effect.MEANS, f"is {name} here: lower-case letters, digits and dashes")
    target.put(("run", "name"), name, source=path)


@explained("settings of verifiers' RLTrainer, below")
def trainer_args(target: Target, path: Path, value: Any) -> None:
    """Translate the table `trainer.args` of a file of vf-rl, written at `path`, key by key, and defer it to
    `finish_lab`.

    Its keys are refused outside of a file: vf-rl's defaults would overrule a file.
    """
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


@explained("OpenAI's chat alone")
def client_type(target: Target, path: Path, value: Any) -> None:
    """Translate the dialect of an endpoint, written at `path`: OpenAI's chat is what is asked anyway; refuse others."""
    if value in _DIALECTS:
        target.note(path, Effect.SAME, "")
    else:
        target.refuse(path, value, "only endpoints of OpenAI's chat are asked: leave it out, and name such a one")


@explained("`[model.lora]` (RL: `[trainer.model.lora]`)")
def low_rank(target: Target, path: Path, value: Any) -> None:
    """Translate the switch `use_lora`, written at `path`: put an empty table of adapters for true.

    False is deferred to `finish_lab`, which removes settings of adapters. Other values are refused.
    """
    where: Path = ("trainer", "model", "lora") if path[0] == "trainer" else ("model", "lora")
    if value is True:
        target.put(where, {}, source=path)
        target.note(path, Effect.MEANS, f"is `[{'.'.join(map(str, where))}]` here")
    elif value is False:
        target.deferred["whole"] = (path, where)
        target.note(path, Effect.SAME, "")
    else:
        target.refuse(path, value, "must be true or false")


@explained('`target_modules`; "all-linear": its default')
def lora_targets(target: Target, path: Path, value: Any) -> None:
    """Translate the layers that get adapters, written at `path`: put `target_modules`; `all-linear` is its default."""
    where: Path = ("trainer", "model", "lora") if path[0] == "trainer" else ("model", "lora")
    if value == "all-linear":
        target.note(path, Effect.MEANS, "is the default of `target_modules` here: attention, MLP and experts")
    else:
        names = [value] if isinstance(value, str) else value
        target.put((*where, "target_modules"), names, source=path)


@explained("`[model.ac]` (RL: `[trainer.model.ac]`)")
def recomputed(target: Target, path: Path, value: Any) -> None:
    """Translate `gradient_checkpointing`, written at `path`.

    Put an empty table `ac` for true, and nothing otherwise.
    """
    where: Path = ("trainer", "model", "ac") if path[0] == "trainer" else ("model", "ac")
    if value is True:
        target.note(path, Effect.MEANS, f"is `[{'.'.join(map(str, where))}]` here")
        target.put(where, {}, source=path)
    else:
        target.note(path, Effect.SAME, "")


@explained("`orchestrator.algo.std_norm`")
def scaled(target: Target, path: Path, value: Any) -> None:
    """Translate `scale_rewards`, written at `path`.

    Put `orchestrator.algo.std_norm`, "group" for true, "none" for false.
    """
    to = {False: "none", True: "group"}[value] if isinstance(value, bool) else value
    target.note(path, Effect.MEANS, "is `orchestrator.algo.std_norm` here")
    target.put(("orchestrator", "algo", "std_norm"), to, source=path)


@explained("factors of `orchestrator.batch_size`, with the devices")
def per_device(target: Target, path: Path, value: Any) -> None:
    """Translate a factor of the batch size, written at `path`: defer it to `finish_lab`.

    Refuse all but positive integers.
    """
    if type(value) is int and value > 0:
        target.deferred[str(path[-1])] = (path, value)
    else:
        target.refuse(path, value, "must be an integer of at least 1")


@explained("`[client]` and `model.name`, of `endpoints.toml`")
def endpoint(target: Target, path: Path, value: Any) -> None:
    """Translate a key of `endpoints.toml`, written at `path`: defer it to `finish_lab`.

    Refuse a value that is no text.
    """
    if isinstance(value, str):
        target.deferred[str(path[-1])] = (path, value)
    else:
        target.refuse(path, value, "must be a string")


def spread_arguments(layer: Layer) -> dict[str, Any]:
    """Return the tables of a layer, with the settings of a vf-rl file's processes below `args`.

    The first files of vf-rl had them beside `gpus`: those are moved, and their places in `layer` are noted for the new
    paths. Other layers are returned unchanged.
    """
    trainer = layer.tree.get("trainer")
    if not isinstance(trainer, dict) or "gpus" not in trainer or not isinstance(layer.tree.get("model"), str):
        return layer.tree
    tree = dict(layer.tree)
    for part in ("trainer", "inference"):
        table = tree.get(part)
        if not isinstance(table, dict):
            continue
        beside = {key: each for key, each in table.items() if key not in ("gpus", "gpu_offset", "args")}
        for key in beside:
            layer.origin.places.setdefault((part, "args", key), layer.origin.locate((part, key)))
        known = table.get("args", {})
        args = {**beside, **known} if isinstance(known, dict) else known
        tree[part] = {**{key: each for key, each in table.items() if key not in beside}, "args": args}
    return tree


def finish_lab(target: Target) -> None:
    """Translate the deferred values that need the whole layer.

    They are defaults of vf-rl or Hosted Training, adapters and endpoints.
    """
    if "vf_rl" in target.deferred:
        _vf_rl(target)
    elif "hosted" in target.deferred and "flat" in target.deferred:
        _hosted(target)
    if "whole" in target.deferred:
        _whole(target)
    if "endpoint_id" in target.deferred:
        _endpoint(target)
    elif "endpoints_path" in target.deferred:
        path, _ = target.deferred["endpoints_path"]
        target.note(path, Effect.NOTHING, "no `endpoint_id` names one of them")


def _vf_rl(target: Target) -> None:
    """Put the batch size of a vf-rl file, from its factors, and the defaults of vf-rl for what the file leaves out."""
    path, _ = target.deferred["vf_rl"]
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
    filled = _filled(target, VF_RL_DEFAULTS, path, has_adapters="whole" not in target.deferred)
    text = (
        "is trained by vf-rl with CISPO and one step of overlap; the loss here is `trainer.loss`, and "
        "`--algo.preset cispo` is nearest"
    )
    target.note(path, Effect.MEANS, f"{text}. As vf-rl's defaults: {', '.join(filled)}" if filled else text)


def _filled(target: Target, defaults: dict[Path, Any], path: Path, *, has_adapters: bool) -> list[str]:
    """Put each of `defaults` that the layer has no value for; return them as texts `KEY = VALUE`.

    `path` is the key that they are attributed to. Defaults of adapters are left out without `has_adapters`.
    """
    filled = []
    for key, value in defaults.items():
        if "lora" in key and not has_adapters:
            continue
        here: Any = target.layer.tree
        for part in key:
            here = here.get(part) if isinstance(here, dict) else None
        if here is None:
            target.put(key, value, source=path)
            filled.append(f"{'.'.join(map(str, key))} = {value}")
    return filled


def _hosted(target: Target) -> None:
    """Put the defaults of Hosted Training for what a config file leaves out; a layer that is no file is left as it is.

    A missing `seq_len` becomes the smallest power of two that is at least twice `max_tokens` of the sampling, if that
    is 2048 or more.
    """
    path, _ = target.deferred["flat"]
    if target.layer.origin.strength is not Strength.FILE:
        return
    filled = _filled(target, HOSTED_DEFAULTS, path, has_adapters="full" not in target.deferred)
    sampled = target.layer.tree.get("orchestrator", {}).get("sampling", {})
    most = sampled.get("max_tokens") if isinstance(sampled, dict) else None
    if "seq_len" not in target.layer.tree and isinstance(most, int) and most >= _SEQ_LEN:
        # The smallest power of two that holds twice as much: the prompt, too.
        seq_len = 1 << (2 * most - 1).bit_length()
        target.put(("seq_len",), seq_len, source=path)
        filled.append(f"seq_len = {seq_len}, which the platform chooses")
    if filled:
        target.note(path, Effect.MEANS, f"is `model.name` here. As Hosted Training's defaults: {', '.join(filled)}")


def _whole(target: Target) -> None:
    """Remove the settings of adapters from the layer, where `use_lora = false` trains all weights, and note their
    names.
    """
    path, where = target.deferred["whole"]
    table: Any = target.layer.tree
    for part in where[:-1]:
        table = table.get(part) if isinstance(table, dict) else None
    if isinstance(table, dict) and (left := table.pop("lora", None)):
        target.note(path, Effect.NOTHING, f"trains all weights: {', '.join(left)} of adapters have no effect")


def _endpoint(target: Target) -> None:
    """Put `[client]` and `model.name` from the entry of `endpoints.toml` that `endpoint_id` names.

    The file is looked for relative to the config file. A missing file or entry, and an entry with keys that cannot be
    sent, are refused.
    """
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
    for each in named:
        unknown = [key for key in each if key not in _ENDPOINT_KEYS]
        dialect = each.get("type", each.get("api_client_type"))
        if dialect not in _DIALECTS:
            target.refuse(path, dialect, f"{name} of {listed} speaks {dialect}: only OpenAI's chat is asked")
        elif unknown:
            target.refuse(path, name, f"{listed} has {', '.join(unknown)} for it, which is not sent: leave it out")
        elif not isinstance(each.get("url", each.get("api_base_url")), str):
            target.refuse(path, name, f"{listed} has no `url` for it")
    # One of its entries was refused above.
    if any(wrong.field == dotted(path) for wrong in target.violations):
        return
    target.note(path, Effect.MEANS, f"is `[client]` and `model.name` here, as {listed} has them")
    if "model" not in target.layer.tree:
        target.put(("model", "name"), named[0].get("model"), source=path)
    # Entries of one id are replicas of one endpoint: all of them are asked, with the first one's model and key.
    urls = [each.get("url", each.get("api_base_url")) for each in named]
    target.put(("client", "base_url"), urls, source=path)
    if key := named[0].get("key", named[0].get("api_key_var")):
        target.put(("client", "api_key_var"), key, source=path)
