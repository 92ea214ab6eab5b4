"""Values of prime-rl that are written in another form here: environments, evaluations, counts of GPUs."""

import math
from typing import Any

from millrace.config.layers import Strength
from millrace.config.messages import Effect
from millrace.config.prime_rl.lab import finish_lab
from millrace.config.prime_rl.meanings import Target, explained, finish_learning
from millrace.config.prime_rl.sources import EVAL_ENVS, TRAIN_ENVS, finish_sources
from millrace.config.tree import Path, dotted

ALL_GPUS = "a process takes the GPUs that it is started with"
MAX_GPUS = 1024
"""Most GPUs of one machine."""
_VALIDATION = {"num_examples": 16, "rollouts_per_example": 1, "interval": 10}
"""prime-rl's defaults of `orchestrator.val`."""


@explained("a table: true has its defaults, false leaves it out")
def switched(target: Target, path: Path, value: Any) -> None:
    """Translate a table that was a switch, written at `path`.

    Put {} there for true, None for false, another value as it is.
    """
    if isinstance(value, bool):
        target.note(path, Effect.MEANS, "is a table: write `{}` for its defaults, or leave it out")
        value = {} if value else None
    target.put(path, value, source=path)


@explained("the only `[[orchestrator.env]]`")
def environment(target: Target, path: Path, value: Any) -> None:
    """Translate the one environment of a file of 2025, written at `path`.

    Put it as the only entry of `orchestrator.env`.
    """
    target.note(path, Effect.MEANS, "is the first `[[orchestrator.env]]` here")
    target.put(TRAIN_ENVS, [value], source=path)


@explained("`[[env]]` beside it, one for each")
def evaluated_ids(target: Target, path: Path, value: Any) -> None:
    """Translate ids of evaluated environments, written at `path`: put an `env` table for each id beside that key.

    `value` is one id or a list; a value that is neither is put as it is, and is an error there.
    """
    to = (*path[:-1], "env")
    target.note(path, Effect.MEANS, f"is `[[{dotted(to)}]]` here, one for each")
    ids = [value] if isinstance(value, str) else value
    envs = [{"id": each} for each in ids] if isinstance(ids, list) else ids  # which is an error there
    target.put(to, envs, source=path)


@explained("may be a list, one for each environment")
def per_environment(target: Target, path: Path, value: Any) -> None:
    """Translate a count of the evaluations of a run, written at `path`.

    A number is put; a list with one number per environment is deferred to `finish`.
    """
    if isinstance(value, list):
        target.deferred[str(path[-1])] = (path, value)
    else:
        target.put(path, value, source=path)


@explained("`weight` of each environment")
def ratios(target: Target, path: Path, value: Any) -> None:
    """Translate `env_ratios`, written at `path`: defer the list to `finish`, which makes each number a `weight`."""
    target.note(path, Effect.MEANS, "is `weight` of each `[[orchestrator.env]]` here")
    target.deferred["env_ratios"] = (path, value)


@explained("`trainer.micro_batch_tokens` (SFT: `micro_batch_tokens`), which counts tokens")
def micro_batch_size(target: Target, path: Path, value: Any) -> None:
    """Translate a number of samples, written at `path`: defer it to `finish`, which makes it a number of tokens."""
    target.deferred["micro_batch_size"] = (path, value)


@explained("`renderer` in the `args` of each environment")
def renderer(target: Target, path: Path, value: Any) -> None:
    """Translate the table of the renderer, written at `path`.

    Its `name` is deferred to `finish`, its `enable_thinking` becomes an argument of the run's chat template, other keys
    are noted as without effect. A value that is no table is refused.
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


@explained("`[orchestrator.eval]` with held-out tasks of the training environments")
def validation(target: Target, path: Path, value: Any) -> None:
    """Translate the table `orchestrator.val`, written at `path`: defer it to `finish`.

    Refuse a value that is no table.
    """
    if isinstance(value, dict):
        target.deferred["val"] = (path, value)
    else:
        target.refuse(path, value, "must be a table, as `[orchestrator.eval]`")


@explained('`[[orchestrator.filters]] type = "truncated"`')
def truncated_mask(target: Target, path: Path, value: Any) -> None:
    """Translate the switch that masks rollouts cut at a token limit, written at `path`.

    If it is on, `finish` gets a filter of type `truncated` with the action `mask`.
    """
    if _is_on(target, path, value):
        target.note(path, Effect.MEANS, 'is `[[orchestrator.filters]] type = "truncated"` here')
        target.deferred["truncated"] = (path, {"type": "truncated", "action": "mask"})
    else:
        target.note(path, Effect.SAME, "")


@explained('`[[orchestrator.filters]] type = "truncated", action = "drop"`')
def dropped_when_cut(target: Target, path: Path, value: Any) -> None:
    """Translate the switch that drops rollouts cut at a token limit, written at `path`.

    If it is on, `finish` gets a filter of type `truncated` with the action `drop`.
    """
    if _is_on(target, path, value):
        target.note(path, Effect.MEANS, 'is `[[orchestrator.filters]] type = "truncated", action = "drop"` here')
        target.deferred["truncated"] = (path, {"type": "truncated", "action": "drop"})
    else:
        target.note(path, Effect.SAME, "")


@explained("`[[orchestrator.filters]]`; `zero_advantage`: `orchestrator.filter_zero_advantages`")
def batch_filters(target: Target, path: Path, value: Any) -> None:
    """Translate a list of filters, written at `path`.

    Put `filter_zero_advantages` for `zero_advantage`, move all others. The others become entries of
    `orchestrator.filters`. Those of `pre_batch_filters` and `post_batch_filters` only count unless they say `enforce`.
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
    """Translate one `zero_advantage` filter, written at `path`, into `orchestrator.filter_zero_advantages`.

    `is_before` says that it is applied before a batch is cut: it becomes "refill" if enforced, and nothing if not. A
    later one becomes true or false. Keys beside `type` and `enforce` are refused.
    """
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


@explained("may be a list, one for each environment")
def evaluated_counts(target: Target, path: Path, value: Any) -> None:
    """Translate a count of a whole evaluation, such as `num_examples`, written at `path`.

    A number is put; a list with one number per environment is deferred to `finish`.
    """
    if isinstance(value, list):
        target.deferred[f"each {path[-1]}"] = (path, value)
    else:
        target.put(path, value, source=path)


@explained('`action = "mask"`, or "count" if false')
def enforced(target: Target, path: Path, value: Any) -> None:
    """Translate the switch of a filter, written at `path`: put `action` beside it, "mask" if it is on, else "count"."""
    target.put((*path[:-1], "action"), "mask" if _is_on(target, path, value) else "count", source=path)


@explained("`logprob_threshold`, of a vocabulary of 151,936 tokens")
def logprob_offset(target: Target, path: Path, value: Any) -> None:
    """Translate an offset in nats, written at `path`.

    Put `logprob_threshold` beside it, or refuse a value that is no number. The offset is subtracted from the log-prob
    of one of 151,936 equally likely tokens.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        # -ln(V) is the log-prob of a token in a uniform choice of V; prime-rl's threshold is `value` below it.
        target.put((*path[:-1], "logprob_threshold"), round(-math.log(151_936) - value, 3), source=path)
        target.note(path, Effect.MEANS, "is `logprob_threshold` here, for a vocabulary of 151,936 tokens")
    else:
        target.refuse(path, value, "must be a number")


@explained("`output_dir`; a service by itself writes into the object store")
def output_dir(target: Target, path: Path, value: Any) -> None:
    """Translate a service's output directory, written at `path`.

    Move it to the top if the schema has `output_dir` there. Else it is noted as without effect: a service by itself
    writes into the object store.
    """
    if target.schema.find(("output_dir",)) is not None:
        target.note(path, Effect.MEANS, "is `output_dir` here")
        target.move(path, value, ("output_dir",))
    else:
        target.note(path, Effect.NOTHING, "a service by itself writes into the object store alone")


@explained("`skip_first_step` if false")
def eval_base_model(target: Target, path: Path, value: Any) -> None:
    """Translate whether the base model is evaluated, written at `path`.

    Put the opposite as `skip_first_step` beside it.
    """
    target.put((*path[:-1], "skip_first_step"), value is False, source=path)


@explained("`trainer.token_log.share`, 1 or 0")
def token_export(target: Target, path: Path, value: Any) -> None:
    """Translate the switch of the token log, written at `path`.

    Put `trainer.token_log.share`, 1 if it is on, else 0.
    """
    is_on = _is_on(target, path, value)
    target.put(("trainer", "token_log", "share"), 1.0 if is_on else 0.0, source=path)


@explained("`inference_gpu_ids`, `trainer_gpu_ids`, those of inference first")
def gpus(target: Target, path: Path, value: Any) -> None:
    """Translate a number of GPUs, written at `path`: defer it to `finish`, which makes it ids; refuse other values."""
    if type(value) is int and 0 <= value <= MAX_GPUS:
        target.deferred[str(path[-1])] = (path, value)
    else:
        target.refuse(path, value, f"must be an integer from 0 to {MAX_GPUS}")


@explained("`ckpt.resume_step`, -1 for the newest (SFT); a run goes on by `millrace run resume` or `fork`")
def resume(target: Target, path: Path, value: Any) -> None:
    """Translate where a run resumes, written at `path`: `value` is a step, a table with `step`, or None for the newest.

    Put `ckpt.resume_step` if the schema has it, with -1 for the newest; else note how a run is resumed or forked.
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
    """Translate the values in `target.deferred`, which need the whole layer: environments, evaluations, sizes, GPUs."""
    tree, deferred = target.layer.tree, target.deferred
    # The environments first: what follows writes keys into their tables.
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
            # A weight of its own counts more.
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
    """Put `seq_len` at the top if a file of a whole run has that of the orchestrator alone, so that the trainer has
    it, too.
    """
    tree = target.layer.tree
    own = _at(tree, "orchestrator", "seq_len")
    is_whole = target.schema.child("trainer") is not None and target.schema.child("orchestrator") is not None
    is_alone = is_whole and "seq_len" not in tree and _at(tree, "trainer", "model", "seq_len") is None
    if is_alone and isinstance(own, int) and target.layer.origin.strength is Strength.FILE:
        path: Path = ("orchestrator", "seq_len")
        target.note(path, Effect.MEANS, "is `seq_len` here, of the trainer too")
        target.put(("seq_len",), own, source=path)


def _validation(target: Target, path: Path, value: dict[str, Any], training: list[dict[str, Any]]) -> None:
    """Put `orchestrator.val` (`value`, written at `path`) into `orchestrator.eval`, which evaluates on held-out tasks.

    If `orchestrator.eval` has no environments, the values become its settings. If it has some, all of `training` are
    added to them; if one of these has the id of one of them, none is added, and the key is noted as without effect.
    """
    evaluation = _at(target.layer.tree, "orchestrator", "eval")
    if evaluation is None:
        evaluation = {}
    elif not isinstance(evaluation, dict):
        return  # the schema refuses it, and with it the file
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
    """Put `micro_batch_tokens`: `value` samples, written at `path`, times the length of a sample.

    If that length is unknown, the key is noted as without effect.
    """
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
    """Put the ids of GPUs for the deferred numbers of them: those of inference from 0 on, then those of the trainer.

    A number is noted as without effect if the file has the ids, or the schema has no such key.
    """
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
        # Also of GPUs that are not named: the trainer's ids come after those of inference.
        first += count


def _is_on(target: Target, path: Path, value: Any) -> bool:
    """Return whether a switch, written at `path`, is on; an empty text is a flag without a value, which is on.

    A value that is no switch's is refused in `target`, and False is returned.
    """
    if value not in (True, False, "", "true", "false"):
        target.refuse(path, value, "must be true or false")
    return value in (True, "", "true")


def _list(tree: dict[str, Any], *path: str | int) -> list[dict[str, Any]]:
    """Return the tables in the list at `path` of a tree; empty if there is no list."""
    found = _at(tree, *path)
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []


def _at(tree: Any, *path: str | int) -> Any:
    """Return the value at `path` of nested tables; None if there is none."""
    for part in path:
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree
