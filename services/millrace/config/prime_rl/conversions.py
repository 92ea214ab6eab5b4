"""Values of prime-rl that are written in another form here: environments, evaluations, counts of GPUs."""

from typing import TYPE_CHECKING, Any

from millrace.config.notes import Effect
from millrace.config.tree import Path

if TYPE_CHECKING:
    from millrace.config.prime_rl.translation import Translation

_TRAIN_ENVS: Path = ("orchestrator", "env")
_EVAL_ENVS: Path = ("orchestrator", "eval", "env")
_HARNESS, _RUNTIME = {"id": "null"}, {"type": "subprocess"}
_SOURCE_KEYS = {
    "curriculum": (Effect.LATER, "there is no curriculum yet; groups without any advantage are left out all the same"),
    "algo": (Effect.BLOCKS, "one algorithm for all environments: set `orchestrator.algo`; one per environment comes"),
    "sampling": (Effect.BLOCKS, "one sampling for all environments: set `orchestrator.sampling`"),
    "serve": (Effect.NOTHING, "env-servers start workers as they need them"),
    "address": (Effect.NOTHING, "env-servers register with the orchestrator by themselves"),
}


def train_sources(translation: "Translation", path: Path, value: Any) -> None:
    """`[[orchestrator.train.source]]` as `[[orchestrator.env]]`."""
    _sources(translation, path, value, to=_TRAIN_ENVS, kept=("ratio", "weight"))


def eval_sources(translation: "Translation", path: Path, value: Any) -> None:
    """`[[orchestrator.eval.source]]` as `[[orchestrator.eval.env]]`."""
    kept = ("num_examples", "group_size", "rollouts_per_example", "interval")
    _sources(translation, path, value, to=_EVAL_ENVS, kept=kept)


def _sources(translation: "Translation", path: Path, value: Any, *, to: Path, kept: tuple[str, ...]) -> None:
    if not isinstance(value, list):
        translation.put(path, value, source=path)
        return
    items = [item if isinstance(item, dict) else {} for item in value]
    translation.put(to, [{} for _ in items], source=path)
    for index, item in enumerate(items):
        here = (*path, index)
        env = dict(item["env"]) if isinstance(item.get("env"), dict) else {}
        taskset = dict(env.pop("taskset")) if isinstance(env.get("taskset"), dict) else {}
        roles = {role: rest for role, settings in env.items() if (rest := _without_defaults(settings)) != {}}
        native = {key: item[key] for key in ("name", *kept) if key in item}
        native["id"] = taskset.pop("id", env.get("id", item.get("id", "")))
        native["args"] = {**taskset, **({"env": roles} if roles else {})}
        for key, (effect, text) in _SOURCE_KEYS.items():
            if key in item:
                translation.note((*here, key), effect, text)
        if "group_size" in item and "group_size" not in kept:
            text = "one group size for all environments: set `orchestrator.group_size`"
            translation.note((*here, "group_size"), Effect.BLOCKS, text)
        for key, each in native.items():
            translation.put((*to, index, key), each, source=(*here, key))
    text = "is a verifiers environment: `id`, its taskset's keys as `args`, those of its roles as `args.env`"
    translation.note(path, Effect.MEANS, text)


def _without_defaults(settings: Any) -> Any:
    """Settings of a role without the harness and the runtime that env-servers use anyway."""
    if not isinstance(settings, dict):
        return settings
    defaults = {"harness": _HARNESS, "runtime": _RUNTIME}
    return {key: value for key, value in settings.items() if value != defaults.get(key)}


def environment(translation: "Translation", path: Path, value: Any) -> None:
    """`[environment]` of 2025 as the only `[[orchestrator.env]]`."""
    translation.note(path, Effect.MEANS, "is the first `[[orchestrator.env]]` here")
    translation.put(_TRAIN_ENVS, [value], source=path)


def evaluated_ids(translation: "Translation", path: Path, value: Any) -> None:
    """`eval.environment_ids`, whose neighbours may be lists with one entry each (see `finish`)."""
    translation.note(path, Effect.MEANS, "is `[[orchestrator.eval.env]]` here, one for each")
    ids = [value] if isinstance(value, str) else value
    translation.put(_EVAL_ENVS, [{"id": each} for each in ids], source=path)


def per_environment(translation: "Translation", path: Path, value: Any) -> None:
    """A count of evaluations, or a list with one for each environment."""
    if isinstance(value, list):
        translation.deferred[str(path[-1])] = (path, value)
    else:
        translation.put(path, value, source=path)


def ratios(translation: "Translation", path: Path, value: Any) -> None:
    """`env_ratios` as the `weight` of each environment."""
    translation.note(path, Effect.MEANS, "is `weight` of each `[[orchestrator.env]]` here")
    translation.deferred["env_ratios"] = (path, value)


def micro_batch_size(translation: "Translation", path: Path, value: Any) -> None:
    """Samples that go through the model at once; here that is counted in tokens."""
    translation.deferred["micro_batch_size"] = (path, value)


def renderer(translation: "Translation", path: Path, value: Any) -> None:
    """The renderer of all environments, which is an argument of each here."""
    translation.deferred["renderer"] = (path, value)


def eval_base_model(translation: "Translation", path: Path, value: Any) -> None:
    """`eval_base_model = false` leaves out the evaluation before the first step."""
    translation.put(("orchestrator", "eval", "skip_first_step"), value is False, source=path)


def algorithm(translation: "Translation", path: Path, value: Any) -> None:
    """The algorithm stays what is asked for; a run with one that is not there yet is refused when it is submitted."""
    translation.put(path, value, source=path)
    if isinstance(value, str) and value in UNBUILT_ALGORITHMS:
        translation.note(path, Effect.BLOCKS, f"{value} is not there yet; grpo and opd are")


UNBUILT_ALGORITHMS = ("max_rl", "rae", "echo", "hierarchical_grpo", "opsd", "sft")
"""Names that the schema knows and no algorithm bears yet."""


def gpus(translation: "Translation", path: Path, value: Any) -> None:
    """`deployment.num_infer_gpus` and `num_train_gpus` as the ids of the GPUs, those of inference first."""
    if isinstance(value, int) and not isinstance(value, bool):
        translation.deferred[str(path[-1])] = (path, value)


def resume(translation: "Translation", path: Path, value: Any) -> None:
    """`[resume]` and `ckpt.resume_step`: the step to go on from, the newest where none is named."""
    step = value.get("step") if isinstance(value, dict) else value
    if translation.schema.find(("ckpt", "resume_step")) is not None:
        translation.note(path, Effect.MEANS, "is `ckpt.resume_step` here, -1 for the newest")
        translation.put(("ckpt", "resume_step"), -1 if step is None else step, source=path)
    elif step is None:
        text = "a run goes on from its newest checkpoint by itself; one that FAILED with `millrace run resume RUN`"
        translation.note(path, Effect.NOTHING, text)
    else:
        text = "begin there with `millrace run fork RUN --step N`, which makes a run of its own"
        translation.note(path, Effect.BLOCKS, text)


def finish(translation: "Translation") -> None:
    """Apply what needs the whole layer."""
    tree, deferred = translation.layer.tree, translation.deferred
    training, evaluated = _list(tree, *_TRAIN_ENVS), _list(tree, *_EVAL_ENVS)
    for key in ("num_examples", "rollouts_per_example"):
        if key in deferred:
            path, values = deferred[key]
            for env, each in zip(evaluated, values, strict=False):
                env[key] = each
            translation.note(path, Effect.MEANS, f"is `{key}` of each `[[orchestrator.eval.env]]` here")
    if "env_ratios" in deferred and isinstance(deferred["env_ratios"][1], list):
        for env, each in zip(training, deferred["env_ratios"][1], strict=False):
            env.setdefault("weight", each)
    if "renderer" in deferred:
        path, name = deferred["renderer"]
        text = "the engine's own chat template counts here"
        if name not in ("auto", "default"):
            text = "is `renderer` in the `args` of each environment here"
            for env in (*training, *evaluated):
                if isinstance(env.setdefault("args", {}), dict):
                    env["args"].setdefault("renderer", name)
        translation.note(path, Effect.MEANS, text)
    if "micro_batch_size" in deferred:
        _micro_batch(translation, *deferred["micro_batch_size"])
    _gpu_ids(translation)


def _micro_batch(translation: "Translation", path: Path, value: Any) -> None:
    tree = translation.layer.tree
    is_sft = path[0] == "data"
    places = [("data", "seq_len")] if is_sft else [("orchestrator", "seq_len"), ("seq_len",)]
    seq_len = next((found for place in places if isinstance(found := _at(tree, *place), int)), None)
    if isinstance(value, int) and seq_len:
        to: Path = ("micro_batch_tokens",) if is_sft else ("trainer", "micro_batch_tokens")
        translation.put(to, value * seq_len, source=path)
        translation.note(
            path, Effect.MEANS, f"counts tokens here: {value} samples of {seq_len} are `micro_batch_tokens`"
        )
    else:
        text = "micro-batches are counted in tokens: set `trainer.micro_batch_tokens`"
        translation.note(path, Effect.NOTHING, text)


def _gpu_ids(translation: "Translation") -> None:
    first = 0
    for key, to in (("num_infer_gpus", "inference_gpu_ids"), ("num_train_gpus", "trainer_gpu_ids")):
        if key not in translation.deferred:
            continue
        path, count = translation.deferred[key]
        if translation.schema.child(to) and to not in translation.layer.tree:
            translation.put((to,), list(range(first, first + count)), source=path)
            translation.note(path, Effect.MEANS, f"is `{to}` here")
        first += count


def _list(tree: dict[str, Any], *path: str | int) -> list[dict[str, Any]]:
    found = _at(tree, *path)
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []


def _at(tree: Any, *path: str | int) -> Any:
    for part in path:
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree
