"""Values of prime-rl that are written in another form here: environments, evaluations, counts of GPUs."""

import math
from typing import Any

from millrace.config.layers import Strength
from millrace.config.messages import Effect
from millrace.config.prime_rl.lab import finish_lab
from millrace.config.prime_rl.meanings import Target, finish_learning
from millrace.config.prime_rl.sources import EVAL_ENVS, TRAIN_ENVS, finish_sources
from millrace.config.tree import Path, dotted

ALL_GPUS = "a process takes the GPUs that it is started with"
MAX_GPUS = 1024
"""Most GPUs of one machine."""
_VALIDATION = {"num_examples": 16, "rollouts_per_example": 1, "interval": 10}
"""prime-rl's defaults of `orchestrator.val`."""


def switched(target: Target, path: Path, value: Any) -> None:
    """`true` is the table with its defaults, as prime-rl had it in 2025; `false` leaves it out.

    Puts a table without keys for true, None for false, and other values as they are.
    """
    if isinstance(value, bool):
        target.note(path, Effect.MEANS, "is a table: write `{}` for its defaults, or leave it out")
        value = {} if value else None
    target.put(path, value, source=path)


def environment(target: Target, path: Path, value: Any) -> None:
    """`[environment]` of 2025 as the only `[[orchestrator.env]]`.

    Puts the table as the first of `[[orchestrator.env]]`.
    """
    target.note(path, Effect.MEANS, "is the first `[[orchestrator.env]]` here")
    target.put(TRAIN_ENVS, [value], source=path)


def evaluated_ids(target: Target, path: Path, value: Any) -> None:
    """`eval.environment_ids`, whose neighbours may be lists with one entry each.

    Puts an `[[env]]` table beside the key for each id.
    """
    to = (*path[:-1], "env")
    target.note(path, Effect.MEANS, f"is `[[{dotted(to)}]]` here, one for each")
    ids = [value] if isinstance(value, str) else value
    envs = [{"id": each} for each in ids] if isinstance(ids, list) else ids  # which is an error there
    target.put(to, envs, source=path)


def per_environment(target: Target, path: Path, value: Any) -> None:
    """A count of evaluations, or a list with one for each environment.

    Puts a count, and keeps a list for `finish`.
    """
    if isinstance(value, list):
        target.deferred[str(path[-1])] = (path, value)
    else:
        target.put(path, value, source=path)


def ratios(target: Target, path: Path, value: Any) -> None:
    """`env_ratios` as the `weight` of each environment.

    Keeps the value for `finish`.
    """
    target.note(path, Effect.MEANS, "is `weight` of each `[[orchestrator.env]]` here")
    target.deferred["env_ratios"] = (path, value)


def micro_batch_size(target: Target, path: Path, value: Any) -> None:
    """Samples that go through the model at once; here that is counted in tokens.

    Keeps the value for `finish`.
    """
    target.deferred["micro_batch_size"] = (path, value)


def renderer(target: Target, path: Path, value: Any) -> None:
    """The renderer of all environments, which is an argument of each here.

    Keeps its name for `finish`, and puts `enable_thinking` into the sampling of the run.
    """
    if not isinstance(value, dict):
        target.refuse(path, value, "must be a table with the `name` of a renderer")
        return
    if "name" in value:
        target.deferred["renderer"] = ((*path, "name"), value["name"])
    thinks: Path = ("orchestrator", "sampling", "extra_body", "chat_template_kwargs", "enable_thinking")
    if "enable_thinking" in value and target.schema.find(thinks[:2]) is not None:
        target.note((*path, "enable_thinking"), Effect.MEANS, f"is `{dotted(thinks)}` here")
        target.put(thinks, value["enable_thinking"], source=(*path, "enable_thinking"))
        value = {key: each for key, each in value.items() if key != "enable_thinking"}
    for key in value.keys() - {"name"}:
        target.note((*path, key), Effect.LATER, "the renderer is chosen by its name alone: no effect", value=value[key])


def validation(target: Target, path: Path, value: Any) -> None:
    """Validation plays held-out tasks of the training environments, as `[orchestrator.eval]` does.

    Keeps the table for `finish`, or refuses another value.
    """
    if isinstance(value, dict):
        target.deferred["val"] = (path, value)
    else:
        target.refuse(path, value, "must be a table, as `[orchestrator.eval]`")


def truncated_mask(target: Target, path: Path, value: Any) -> None:
    """Rollouts that were cut at a token limit are not trained on: `[[orchestrator.filters]] type = "truncated"`.

    Keeps a filter with `action = "mask"` for `finish` if the key is on.
    """
    if _is_on(target, path, value):
        target.note(path, Effect.MEANS, 'is `[[orchestrator.filters]] type = "truncated"` here')
        target.deferred["truncated"] = (path, {"type": "truncated", "action": "mask"})
    else:
        target.note(path, Effect.SAME, "")


def dropped_when_cut(target: Target, path: Path, value: Any) -> None:
    """Rollouts that were cut are not compared either: `[[orchestrator.filters]] type = "truncated"`, dropped.

    Keeps a filter with `action = "drop"` for `finish` if the key is on.
    """
    if _is_on(target, path, value):
        target.note(path, Effect.MEANS, 'is `[[orchestrator.filters]] type = "truncated", action = "drop"` here')
        target.deferred["truncated"] = (path, {"type": "truncated", "action": "drop"})
    else:
        target.note(path, Effect.SAME, "")


def batch_filters(target: Target, path: Path, value: Any) -> None:
    """Filters before and after a batch is made; `zero_advantage` is `orchestrator.filter_zero_advantages`.

    Moves the other filters to `[[orchestrator.filters]]`, where those of before and after a batch only count by
    default.
    """
    to = ("orchestrator", "filters")
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        target.put(to, value, source=path)  # which is an error there
        return
    when = str(path[-1]).partition("_")[0]
    known = _list(target.layer.tree, *to)
    kept = [(index, each) for index, each in enumerate(value) if each.get("type") != "zero_advantage"]
    if kept or not value:
        target.put(to, [*known, *({} for _ in kept)], source=path)
    if when != "filters":
        target.note(path, Effect.MEANS, "is `[[orchestrator.filters]]` here")
    for number, (index, each) in enumerate(kept, start=len(known)):
        if when != "filters" and "enforce" not in each:  # which only count by default
            target.put((*to, number, "action"), "count", source=(*path, index))
        for key, item in each.items():
            target.move((*path, index, key), item, (*to, number, key))
    for index, each in enumerate(value):
        if each.get("type") == "zero_advantage":
            _zero_advantage(target, (*path, index), each, is_before=when == "pre")


def _zero_advantage(target: Target, path: Path, value: dict[str, Any], *, is_before: bool) -> None:
    """Leave out samples without advantage before a batch is cut, after it, or not at all."""
    for key in value.keys() - {"type", "enforce"}:
        target.refuse((*path, key), value[key], "unknown key; zero_advantage has `enforce` alone")
    is_on = _is_on(target, (*path, "enforce"), value.get("enforce", not is_before))
    to: Path = ("orchestrator", "filter_zero_advantages")
    if is_before and not is_on:
        target.note(path, Effect.SAME, "", value=value)
        return
    means = "refill" if is_before else is_on
    target.note(path, Effect.MEANS, f"is `{dotted(to)} = {str(means).lower()}` here", value=value)
    target.put(to, means, source=path)


def evaluated_counts(target: Target, path: Path, value: Any) -> None:
    """A count of an evaluation, or a list with one for each environment.

    Puts a count, and keeps a list for `finish`.
    """
    if isinstance(value, list):
        target.deferred[f"each {path[-1]}"] = (path, value)
    else:
        target.put(path, value, source=path)


def enforced(target: Target, path: Path, value: Any) -> None:
    """`enforce = true` is `action = "mask"`, and false is `action = "count"`.

    Puts `action` beside the key.
    """
    target.put((*path[:-1], "action"), "mask" if _is_on(target, path, value) else "count", source=path)


def logprob_offset(target: Target, path: Path, value: Any) -> None:
    """Nats below a uniform choice among 151,936 tokens; here that is one number, `logprob_threshold`.

    Puts `logprob_threshold` beside the key, or refuses a value that is no number.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        target.put((*path[:-1], "logprob_threshold"), round(-math.log(151_936) - value, 3), source=path)
        target.note(path, Effect.MEANS, "is `logprob_threshold` here, for a vocabulary of 151,936 tokens")
    else:
        target.refuse(path, value, "must be a number")


def output_dir(target: Target, path: Path, value: Any) -> None:
    """`output_dir` of a service is that of the whole run; a service by itself writes into the object store.

    Moves the value to the top if the schema has the key there, else notes that it has no effect.
    """
    if target.schema.find(("output_dir",)) is not None:
        target.note(path, Effect.MEANS, "is `output_dir` here")
        target.move(path, value, ("output_dir",))
    else:
        target.note(path, Effect.NOTHING, "a service by itself writes into the object store alone")


def eval_base_model(target: Target, path: Path, value: Any) -> None:
    """`eval_base_model = false` leaves out the evaluation before the first step.

    Puts `skip_first_step` beside the key.
    """
    target.put((*path[:-1], "skip_first_step"), value is False, source=path)


def token_export(target: Target, path: Path, value: Any) -> None:
    """The tokens of all samples are logged, those of none with false: `trainer.token_log.share` is 1 or 0.

    Puts `trainer.token_log.share`.
    """
    is_on = _is_on(target, path, value)
    target.put(("trainer", "token_log", "share"), 1.0 if is_on else 0.0, source=path)


def gpus(target: Target, path: Path, value: Any) -> None:
    """`deployment.num_infer_gpus` and `num_train_gpus` as the ids of the GPUs, those of inference first.

    Keeps the number for `finish`, or refuses another value.
    """
    if type(value) is int and 0 <= value <= MAX_GPUS:
        target.deferred[str(path[-1])] = (path, value)
    else:
        target.refuse(path, value, f"must be an integer from 0 to {MAX_GPUS}")


def resume(target: Target, path: Path, value: Any) -> None:
    """`[resume]` and `ckpt.resume_step`: the step to go on from, the newest where none is named.

    Puts `ckpt.resume_step` if the schema has it (-1: the newest), else notes how to resume or fork a run.
    """
    step = value.get("step") if isinstance(value, dict) else value
    for key in value.keys() - {"step"} if isinstance(value, dict) else ():
        target.refuse((*path, key), value[key], "only a step of the run itself can be gone on from: `resume.step`")
    if target.schema.find(("ckpt", "resume_step")) is not None:
        target.note(path, Effect.MEANS, "is `ckpt.resume_step` here, -1 for the newest")
        target.put(("ckpt", "resume_step"), -1 if step is None else step, source=path)
    elif step is None:
        text = "a run goes on from its newest checkpoint by itself; one that FAILED with `millrace run resume RUN`"
        target.note(path, Effect.NOTHING, text)
    else:
        text = "begin there with `millrace run fork RUN --step N`, which makes a run of its own"
        target.note(path, Effect.BLOCKS, text)


def finish(target: Target) -> None:
    """Apply what needs the whole layer."""
    tree, deferred = target.layer.tree, target.deferred
    finish_sources(target)
    finish_lab(target)
    finish_learning(target)
    training, evaluated = _list(tree, *TRAIN_ENVS), _list(tree, *EVAL_ENVS)
    for key in ("num_examples", "rollouts_per_example"):
        if key in deferred:
            path, values = deferred[key]
            for env, each in zip(evaluated, values, strict=False):
                env[key] = each
            target.note(path, Effect.MEANS, f"is `{key}` of each `[[orchestrator.eval.env]]` here")
    for path, values in [deferred[key] for key in deferred if key.startswith("each ")]:
        if path == ("max_concurrent",):
            most = max((each for each in values if type(each) is int), default=1)
            target.put(path, most, source=path)
            target.note(path, Effect.MEANS, f"is {most} for all environments here")
            continue
        for env, each in zip(_list(tree, "env"), values, strict=False):
            env[str(path[-1])] = each
        target.note(path, Effect.MEANS, f"is `{path[-1]}` of each `[[env]]` here")
    if "env_ratios" in deferred and isinstance(deferred["env_ratios"][1], list):
        for env, each in zip(training, deferred["env_ratios"][1], strict=False):
            env.setdefault("weight", each)
    if "val" in deferred:
        _validation(target, *deferred["val"], training)
    if "truncated" in deferred:
        path, each = deferred["truncated"]
        target.put(("orchestrator", "filters"), [*_list(tree, "orchestrator", "filters"), each], source=path)
    if "renderer" in deferred:
        path, name = deferred["renderer"]
        text = "the engine's own chat template counts here"
        if name not in ("auto", "default"):
            text = "is `renderer` in the `args` of each environment here"
            for env in (*training, *evaluated):
                if isinstance(env.setdefault("args", {}), dict):
                    env["args"].setdefault("renderer", name)
        target.note(path, Effect.MEANS, text)
    if "micro_batch_size" in deferred:
        _micro_batch(target, *deferred["micro_batch_size"])
    _gpu_ids(target)
    _length(target)


def _length(target: Target) -> None:
    """Let the trainer take what the orchestrator cuts where a file says that length alone."""
    tree = target.layer.tree
    own = _at(tree, "orchestrator", "seq_len")
    is_whole = target.schema.child("trainer") is not None and target.schema.child("orchestrator") is not None
    is_alone = is_whole and "seq_len" not in tree and _at(tree, "trainer", "model", "seq_len") is None
    if is_alone and isinstance(own, int) and target.layer.origin.strength is Strength.FILE:
        path: Path = ("orchestrator", "seq_len")
        target.note(path, Effect.MEANS, "is `seq_len` here, of the trainer too")
        target.put(("seq_len",), own, source=path)


def _validation(target: Target, path: Path, value: dict[str, Any], training: list[dict[str, Any]]) -> None:
    evaluation = _at(target.layer.tree, "orchestrator", "eval") or {}
    evaluated = _list(target.layer.tree, *EVAL_ENVS)
    settings = {**_VALIDATION, **value}
    if not evaluated:  # the training environments are evaluated
        for key in settings.keys() - evaluation.keys():
            target.put(("orchestrator", "eval", key), settings[key], source=(*path, key))
        target.note(path, Effect.MEANS, "is `[orchestrator.eval]` here, which plays held-out tasks", value=value)
    elif not any(env.get("id") == other.get("id") for env in training for other in evaluated):
        evaluation["env"] += [
            {**{key: env[key] for key in ("id", "name", "args") if key in env}, **settings} for env in training
        ]
        target.note(path, Effect.MEANS, "is an `[[orchestrator.eval.env]]` for each training environment here")
    else:
        text = "`[orchestrator.eval]` plays held-out tasks of the training environments"
        target.note(path, Effect.NOTHING, text, value=value)


def _micro_batch(target: Target, path: Path, value: Any) -> None:
    tree = target.layer.tree
    is_sft = path[0] == "data"
    places = [("data", "seq_len")] if is_sft else [("orchestrator", "seq_len"), ("seq_len",)]
    written = next((found for place in places if isinstance(found := _at(tree, *place), int)), None)
    default = target.schema.find(places[0])
    seq_len = written or (default.default if default else None)
    is_alone = not is_sft and target.schema.child("trainer") is None  # the orchestrator's part by itself
    if isinstance(value, int) and seq_len and not is_alone:
        if not is_sft and written and "seq_len" not in tree:  # trainers of 2025 took what the orchestrator cut
            target.put(("seq_len",), seq_len, source=("orchestrator", "seq_len"))
        to: Path = ("micro_batch_tokens",) if is_sft else ("trainer", "micro_batch_tokens")
        target.put(to, value * seq_len, source=path)
        target.note(path, Effect.MEANS, f"counts tokens here: {value} samples of {seq_len} are `micro_batch_tokens`")
    else:
        text = "micro-batches are counted in tokens: set `trainer.micro_batch_tokens`"
        target.note(path, Effect.NOTHING, text)


def _gpu_ids(target: Target) -> None:
    first = 0
    for key, to in (("num_infer_gpus", "inference_gpu_ids"), ("num_train_gpus", "trainer_gpu_ids")):
        if key not in target.deferred:
            continue
        path, count = target.deferred[key]
        if target.schema.child(to) and to not in target.layer.tree:
            target.put((to,), list(range(first, first + count)), source=path)
            target.note(path, Effect.MEANS, f"is `{to}` here")
        else:
            target.note(path, Effect.NOTHING, f"`{to}` says which" if to in target.layer.tree else ALL_GPUS)
        first += count


def _is_on(target: Target, path: Path, value: Any) -> bool:
    """Return the value of a switch; a flag without a value is on."""
    if value not in (True, False, "", "true", "false"):
        target.refuse(path, value, "must be true or false")
    return value in (True, "", "true")


def _list(tree: dict[str, Any], *path: str | int) -> list[dict[str, Any]]:
    found = _at(tree, *path)
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []


def _at(tree: Any, *path: str | int) -> Any:
    for part in path:
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree
