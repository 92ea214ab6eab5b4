"""`[[orchestrator.train.source]]` and `[[orchestrator.eval.source]]` as environments of ours.

A source is a verifiers environment (`env`) and what the run does with it. What the tables around it say, such as
`[orchestrator.train.algo]`, holds for every source that does not say otherwise.
"""

from typing import Any

from millrace.config.layers import MAX_SECTIONS
from millrace.config.messages import Effect
from millrace.config.prime_rl.meanings import UNBUILT_ALGORITHMS, Target, explained, unbuilt_algorithm
from millrace.config.sections.algo import DISTILLING
from millrace.config.tree import Path, dotted

TRAIN_ENVS: Path = ("orchestrator", "env")
EVAL_ENVS: Path = ("orchestrator", "eval", "env")
_HARNESS, _RUNTIME = {"id": "null"}, {"type": "subprocess"}
_FOR_ALL = {"train": {"sampling": "sampling", "group_size": "rollouts_per_example"}, "eval": {"sampling": "sampling"}}
"""Keys of a source that are the run's here where all sources agree; the key of ours."""
_Sources = list[tuple[Path, dict[str, Any]]]


@explained("`[[orchestrator.env]]`")
def train_sources(target: Target, path: Path, value: Any) -> None:
    """Translate `[[orchestrator.train.source]]`, written at `path`.

    Put each source as an entry of `orchestrator.env`.
    """
    _sources(target, path, value, to=TRAIN_ENVS, later=("algo", *_FOR_ALL["train"]))


@explained("`extra_body` of its sampling")
def thinking(target: Target, path: Path, value: Any) -> None:
    """Translate a key of sampling that only requests have, written at `path`: put it into `extra_body` beside it."""
    to = {
        "seed": ("seed",),
        "reasoning_effort": ("reasoning_effort",),
        "enable_thinking": ("chat_template_kwargs", "enable_thinking"),
    }
    target.note(path, Effect.MEANS, f"is `{dotted((*path[:-1], 'extra_body', *to[str(path[-1])]))}` here")
    target.put((*path[:-1], "extra_body", *to[str(path[-1])]), value, source=path)


@explained("`[[env]]` beside it")
def eval_sources(target: Target, path: Path, value: Any) -> None:
    """Translate a list of evaluated sources, written at `path`: put each as an entry of `env` beside that key."""
    _sources(target, path, value, to=(*path[:-1], "env"), later=tuple(_FOR_ALL["eval"]))


@explained("`id`, and `args` of the environment")
def own_taskset(target: Target, path: Path, value: Any) -> None:
    """Translate `taskset` in an environment's table, written at `path`.

    Its `id` is the environment's, its other keys `args`.
    """
    if not isinstance(value, dict):
        target.refuse(path, value, 'must be a table, such as { id = "reverse-text" }')
        return
    target.deferred[f"v1 {dotted(path[:-1])}"] = (path, True)
    target.note(path, Effect.MEANS, "is `id` and `args` of the environment here")
    put_environment(target, path[:-1], {"taskset": value}, path[:-1])


@explained("`id`, and `args.env` of the environment")
def own_env(target: Target, path: Path, value: Any) -> None:
    """Translate `env` in an environment's table, written at `path`: put `id` and `args` of the environment from it."""
    if not isinstance(value, dict):
        target.refuse(path, value, 'must be a table, such as { taskset = { id = "reverse-text" } }')
        return
    target.note(path, Effect.MEANS, "is `id` and `args` of the environment here")
    put_environment(target, path, value, path[:-1])


@explained("`args.env.agent`, with its `runtime`")
def own_harness(target: Target, path: Path, value: Any) -> None:
    """Translate `harness` in an environment's table, written at `path`: put it into `args.env.agent`.

    A `runtime` in it becomes a setting beside it.
    """
    target.deferred[f"v1 {dotted(path[:-1])}"] = (path, True)
    settings = {"harness": value}
    if isinstance(value, dict) and "runtime" in value:
        settings = {"harness": {key: each for key, each in value.items() if key != "runtime"}}
        settings["runtime"] = value["runtime"]
    target.note(path, Effect.MEANS, "is `args.env.agent` of the environment here")
    _role(target, path[:-1], settings, (*path[:-1], "args", "env", "agent"))


@explained("`args.env.agent.runtime`")
def own_runtime(target: Target, path: Path, value: Any) -> None:
    """Translate `runtime` in an environment's table, written at `path`: put it into `args.env.agent`."""
    target.deferred[f"v1 {dotted(path[:-1])}"] = (path, True)
    target.note(path, Effect.MEANS, "is `args.env.agent` of the environment here")
    _role(target, path[:-1], {"runtime": value}, (*path[:-1], "args", "env", "agent"))


@explained("`args.env.agent`, beside a taskset or a harness")
def own_limit(target: Target, path: Path, value: Any) -> None:
    """Translate a limit in an environment's table, written at `path`.

    Defer it to `finish_sources`, which knows its kind.
    """
    target.deferred[f"limit {dotted(path)}"] = (path, value)


@explained("the default alone: that of the run")
def own_advantage(target: Target, path: Path, value: Any) -> None:
    """Translate `advantage` in an environment's table, written at `path`: the default is the run's.

    Others block the run.
    """
    if isinstance(value, dict) and value.get("type", "default") == "default" and not value.keys() - {"type"}:
        target.note(path, Effect.SAME, "", value=value)
    else:
        text = "write `algo` of the environment: its type, or `import_path` of an advantage of your own"
        target.note(path, Effect.BLOCKS, text, value=value)


def _versions(target: Target) -> None:
    """Remove the version from ids of environments such as `owner/name@1.2`, and note that the installed one counts."""
    for envs in (TRAIN_ENVS, EVAL_ENVS, ("env",), ("eval", "env")):
        for index, env in enumerate(_envs(target, envs)):
            name, _, version = env["id"].partition("@") if isinstance(env.get("id"), str) else ("", "", "")
            if version:
                env["id"] = name
                text = f"is {name} here, in the version that is installed: install {version}"
                target.note((*envs, index, "id"), Effect.NOTHING, text)


def _limits(target: Target) -> None:
    """Put the deferred limits into `args.env.agent` of environments that have a taskset or a harness.

    In other environments (v0), -1 means no limit, and another value blocks the run with a note.
    """
    for path, value in [found for key, found in target.deferred.items() if key.startswith("limit ")]:
        if f"v1 {dotted(path[:-1])}" in target.deferred:
            target.put((*path[:-1], "args", "env", "agent", path[-1]), value, source=path)
            target.note(path, Effect.MEANS, f"is `args.env.agent.{path[-1]}` of the environment here")
        # As prime-rl writes "no limit".
        elif value == -1:
            target.note(path, Effect.SAME, "")
        else:
            text = (
                "is no argument of an environment without a taskset: give its own in `args`, such as `max_turns`; "
                "`sampling.max_tokens` bounds each turn, and `seq_len` the whole"
            )
            target.note(path, Effect.BLOCKS, text, value=value)


@explained("inherited by every source; a list: `[[orchestrator.env]]`")
def train_env(target: Target, path: Path, value: Any) -> None:
    """Translate `orchestrator.train.env`, written at `path`.

    Defer a table, which every source inherits, to `finish_sources`. A list moves to `orchestrator.env`.
    """
    if isinstance(value, dict):
        target.deferred["train.env"] = (path, value)
    else:
        target.note(path, Effect.MEANS, "is `[[orchestrator.env]]` here")
        target.move(path, value, TRAIN_ENVS)


@explained("inherited by every source; without sources the only environment")
def eval_defaults(target: Target, path: Path, value: Any) -> None:
    """Translate a table of evaluated environments, written at `path`: defer it to `finish_sources`.

    There every source inherits it; without sources it is the only environment.
    """
    target.deferred["eval.env"] = (path, value)


@explained("the only `[[env]]`")
def only_environment(target: Target, path: Path, value: Any) -> None:
    """Translate a key of the only environment, written at the top of a file of vf-eval.

    Move it into the first `[[env]]`. That table is made if there is none.
    """
    if not _envs(target, ("env",)):
        target.put(("env",), [{}], source=path)
    target.move(path, value, ("env", 0, str(path[-1]).removeprefix("env_")))


@explained("`select` of each environment; `{ limit = n }` alone: `num_examples = n`, where training selects nothing")
def selected(target: Target, path: Path, value: Any) -> None:
    """Translate `select` of an evaluation, written at `path`: defer the table to `finish_sources`.

    Refuse other values.
    """
    if isinstance(value, dict):
        target.deferred[f"select of {dotted(path[:-1])}"] = (path, value)
    else:
        target.refuse(path, value, "must be a table, such as { limit = 16 }")


@explained("`select` of each environment")
def shuffled(target: Target, path: Path, value: Any) -> None:
    """Translate `shuffle` or `shuffle_seed`, written at `path`: defer it to `finish_sources`."""
    target.deferred[str(path[-1])] = (path, value)


@explained("`select` of each environment that has none")
def train_select(target: Target, path: Path, value: Any) -> None:
    """Translate `orchestrator.train.select`, written at `path`: defer the table to `finish_sources`.

    Refuse other values.
    """
    if isinstance(value, dict):
        target.deferred["train.select"] = (path, value)
    else:
        target.refuse(path, value, "must be a table, such as { limit = 16 }")


def _shuffle(target: Target) -> None:
    """Put `select` with shuffle and seed into each `[[env]]`, if the deferred `shuffle` is true.

    Note what became of both.
    """
    path, value = target.deferred.get("shuffle", ((), False))
    seed_path, seed = target.deferred.get("shuffle_seed", ((), 0))
    if value is True:
        target.note(path, Effect.MEANS, "is `select.shuffle` of each `[[env]]` here")
        for index, _ in enumerate(_envs(target, ("env",))):
            target.put(("env", index, "select"), {"shuffle": True, "seed": seed}, source=path)
    elif path:
        target.note(path, Effect.SAME, "")
    if seed_path:
        is_used = value is True
        text = "is `select.seed` of each `[[env]]` here" if is_used else "nothing is shuffled"
        target.note(seed_path, Effect.MEANS if is_used else Effect.NOTHING, text)


def _select(target: Target) -> None:
    """Give each environment its deferred selection of tasks: its own, or else the one for all.

    A selection that only limits the number of tasks becomes `num_examples`, unless the training environments select,
    too.
    """
    _shuffle(target)
    if "train.select" in target.deferred:
        path, value = target.deferred["train.select"]
        _select_all(target, path, value, TRAIN_ENVS)
    envs: Path = EVAL_ENVS if target.schema.child("orchestrator") else ("eval", "env")
    # The schema of SFT has `[eval]`; a file of `millrace eval` has its environments at the top.
    if target.schema.child("eval") is None and envs != EVAL_ENVS:
        envs = ("env",)
    is_split = any(env.get("select") for env in _envs(target, TRAIN_ENVS))
    if shared := target.deferred.get(f"select of {dotted(envs[:-1])}"):
        if _is_count(shared[1]) and not is_split:
            _selected(target, *shared, envs[:-1], is_split=is_split)
        else:
            _select_all(target, *shared, envs)
    for index, env in enumerate(_envs(target, envs)):
        if own := target.deferred.get(f"select of {dotted((*envs, index))}"):
            if shared and _is_count(shared[1]) and not is_split and "num_examples" not in env:
                # Its own selection has its own limit, which the number for all must not cut.
                target.put((*envs, index, "num_examples"), -1, source=own[0])
            _selected(target, *own, (*envs, index), is_split=is_split)


def _selected(target: Target, path: Path, value: dict[str, Any], to: Path, *, is_split: bool) -> None:
    """Put one selection `value`, written at `path`, into the table `to`.

    It becomes `num_examples` if it is only a limit and `is_split` is false; a selection of everything is left out.
    `is_split` says that training selects tasks, too, so that a limit alone would not name the same tasks.
    """
    chosen = _chosen(value)
    if not chosen.keys() - {"seed"}:
        target.note(path, Effect.SAME, "", value=value)
    elif _is_count(value) and not is_split:
        target.note(path, Effect.MEANS, "is `num_examples` here", value=value)
        target.put((*to, "num_examples"), chosen["limit"], source=(*path, "limit"))
    else:
        target.put((*to, "select"), value, source=path)


def _is_count(value: dict[str, Any]) -> bool:
    """Return whether a selection is nothing but a number of tasks, or none at all."""
    return not _chosen(value).keys() - {"limit"}


def _chosen(value: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a selection that choose something: those whose value is not the default."""
    neutral = {"skip": 0, "seed": 0, "shuffle": False, "limit": None, "include": {}, "exclude": {}}
    return {key: each for key, each in value.items() if key not in neutral or each != neutral[key]}


def _select_all(target: Target, path: Path, value: dict[str, Any], envs: Path) -> None:
    """Put the shared selection `value`, written at `path`, into each environment of the list `envs` that has none of
    its own.

    An evaluation without environments gets copies of the training environments; no environments at all are refused.
    """
    listed = _envs(target, envs)
    if not listed and envs == EVAL_ENVS:  # the training environments are evaluated
        kept = ("id", "name", "args", "judge", "python", "image")
        listed = [{key: env[key] for key in kept if key in env} for env in _envs(target, TRAIN_ENVS)]
        target.put(envs, listed, source=path)
    if not listed:
        target.refuse(path, value, "chooses tasks of the environments of the same file, and there are none")
        return
    for index, env in enumerate(listed):
        if "select" not in env and f"select of {dotted((*envs, index))}" not in target.deferred:
            target.put((*envs, index, "select"), value, source=path)
    text = f"is `select` of each `[[{dotted(envs)}]]` here that has none of its own"
    target.note(path, Effect.MEANS, text, value=value)


def _envs(target: Target, path: Path) -> list[dict[str, Any]]:
    """Return the environments at `path` of the translated layer, to be changed in place.

    Empty unless all are tables.
    """
    found: Any = target.layer.tree
    for part in path:
        found = found.get(part) if isinstance(found, dict) else None
    return found if isinstance(found, list) and all(isinstance(each, dict) for each in found) else []


def _sources(target: Target, path: Path, value: Any, *, to: Path, later: tuple[str, ...]) -> None:
    """Put the sources in the list `value`, written at `path`, as environments at `to`, and defer them to
    `finish_sources`.

    `later` are keys that are not moved now: `finish_sources` decides whether they are the run's or the environment's.
    """
    if not isinstance(value, list) or len(value) > MAX_SECTIONS:
        target.put(to, value, source=path)  # which is an error there
        return
    target.put(to, [{} if isinstance(item, dict) else item for item in value], source=path)
    sources: _Sources = [((*path, index), item) for index, item in enumerate(value) if isinstance(item, dict)]
    for here, item in sources:
        there = (*to, here[-1])
        for key, each in item.items():
            if key in ("env", "legacy") and isinstance(each, dict):
                put_environment(target, (*here, key), each, there)
            elif key not in later:
                target.move((*here, key), each, (*there, key))
    text = "is a verifiers environment: `id`, its taskset's keys as `args`, those of its roles as `args.env`"
    target.note(path, Effect.MEANS, text)
    target.deferred["train" if to == TRAIN_ENVS else "eval"] = (to, sources)


def put_environment(target: Target, path: Path, env: dict[str, Any], to: Path) -> None:
    """Put the id and the arguments of a verifiers environment `env`, written at `path`, into the environment's table
    `to`.

    A `legacy` table has `id` and `args` as they are here.
    """
    if path[-1] == "legacy":
        for key, each in env.items():
            target.move((*path, key), each, (*to, key))
        return
    taskset = env.get("taskset")
    named = ("taskset", "id") if isinstance(taskset, dict) and "id" in taskset else ("id",)
    if named[0] in env:
        target.put((*to, "id"), env["id"] if named == ("id",) else env["taskset"]["id"], source=(*path, *named))
    for role, settings in env.items():
        if role == "taskset" and isinstance(taskset, dict):
            for key, each in taskset.items():
                if key != "id":
                    target.put((*to, "args", key), each, source=(*path, role, key))
        elif (role,) != named:
            _role(target, (*path, role), settings, (*to, "args", "env", role))


def _role(target: Target, path: Path, settings: Any, to: Path) -> None:
    """Put the settings of one role of an environment, written at `path`, at `to`.

    A harness and a runtime that env-servers use anyway are left out, with a note.
    """
    defaults = {"harness": _HARNESS, "runtime": _RUNTIME}
    if not isinstance(settings, dict):
        target.put(to, settings, source=path)
        return
    same = {key: each for key, each in settings.items() if each == defaults.get(key)}
    if same or not settings:
        target.note(path, Effect.SAME, "", value=same)
    if "harness" in settings and "harness" not in same and "runtime" not in settings:
        text = "runs in a subprocess of the env-server here, where prime-rl takes a sandbox: write `runtime` to choose"
        target.note((*path, "harness"), Effect.MEANS, text)
    for key, each in settings.items():
        if key not in same:
            target.put((*to, key), each, source=(*path, key))


def finish_sources(target: Target) -> None:
    """Translate the deferred values of environments.

    They are limits, versions, algorithms, what sources inherit and select, and names.
    """
    _limits(target)
    _versions(target)
    for group in _FOR_ALL:
        evaluated: Path = EVAL_ENVS if target.schema.child("orchestrator") else ("env",)
        envs, sources = target.deferred.get(group, (TRAIN_ENVS if group == "train" else evaluated, []))
        for key, name in _FOR_ALL[group].items() if sources else ():
            _for_all(target, sources, key, envs, name)
        if group == "train" and sources:
            _algorithms(target, sources)
        if f"{group}.env" in target.deferred:
            _inherited(target, *target.deferred[f"{group}.env"], envs)
    _select(target)
    _unique_names(target)


def _for_all(target: Target, sources: _Sources, key: str, envs: Path, name: str) -> None:
    """Move `key` of the sources to the run, or to its evaluations, if all sources have the same value.

    Else to each of them. `envs` is the path of their environments here, and `name` the name of the key here.
    """
    # A source that does not have the key follows its default, so only if all have it is it the run's.
    said = [((*path, key), item[key]) for path, item in sources if key in item]
    is_one = len(said) == len(sources) and all(value == said[0][1] for _, value in said)
    to = (*envs[:-1], name)
    for path, value in said:
        if is_one:
            target.note(path, Effect.MEANS, f"is `{dotted(to)}` here", value=value)
        target.move(path, value, to if is_one else (*envs, path[-2], name))


def _algorithms(target: Target, sources: _Sources) -> None:
    """Move `algo` of the sources to the run if all have the same one and the run has none, else to their environments.

    An environment's algorithm that is not built, or that only a whole run can have, blocks the run with a note.
    """
    orchestrator: dict[str, Any] = target.layer.tree["orchestrator"]
    said = [(path, item["algo"]) for path, item in sources if "algo" in item]
    is_shared = len(said) == len(sources) and all(value == said[0][1] for _, value in said)
    if said and is_shared and "algo" not in orchestrator:
        for path, value in said:
            target.move((*path, "algo"), value, ("orchestrator", "algo"))
        return
    for path, value in said:
        if isinstance(value, dict):
            inherited = orchestrator.get("algo") if "type" not in value else None
            value = {"type": "grpo", **(inherited or {}), **value} if "type" not in value else value
        name = value.get("type") if isinstance(value, dict) else None
        if name in (*UNBUILT_ALGORITHMS, *DISTILLING):
            is_there = name in DISTILLING
            text = f"{name} is the algorithm of a whole run" if is_there else unbuilt_algorithm(str(name))
            target.note((*path, "algo"), Effect.BLOCKS, text, value=value)
        else:
            target.move((*path, "algo"), value, (*TRAIN_ENVS, path[-1], "algo"))


def _unique_names(target: Target) -> None:
    """Put numbered names for evaluated environments that would have equal names, as where one is played with other
    arguments.
    """
    seen: dict[str, int] = {}
    for index, env in enumerate(_envs(target, ("env",)) if target.schema.child("orchestrator") is None else ()):
        name = env.get("name", env.get("id"))
        if not isinstance(name, str):
            continue
        seen[name] = seen.get(name, 0) + 1
        if seen[name] > 1 and "name" not in env:
            path: Path = ("env", index, "name")
            target.put(path, f"{name}-{seen[name]}", source=("env", index))
            target.note(path, Effect.MEANS, f"is {name}-{seen[name]} here: another environment is called {name}")


def _inherited(target: Target, path: Path, value: Any, to: Path) -> None:
    """Give each environment of the list at `to` the settings of the table `value`, written at `path`, that it lacks.

    Without environments, the table is the only environment in a file of vf-eval, and refused in others.
    """
    envs: Any = target.layer.tree
    for part in to:
        envs = envs.get(part, []) if isinstance(envs, dict) else []
    if not envs and to == ("env",) and isinstance(value, dict):  # a file of `vf-eval`, which names no sources
        target.put(to, [{}], source=path)
        put_environment(target, path, value, (*to, 0))
        target.note(path, Effect.MEANS, "is `[[env]]` here")
        return
    if not isinstance(envs, list) or not envs:
        text = "is inherited by the sources of the same file, and there are none: write it beside them"
        target.refuse(path, value, text)
        return
    shared = value if isinstance(value, dict) else {}
    taskset = shared.get("taskset", {})
    for env in (env for env in envs if isinstance(env, dict)):
        args = env.setdefault("args", {})
        if isinstance(args, dict):
            own = args.setdefault("env", {})
            for key, each in shared.items():
                own.setdefault(key, each) if key != "taskset" and isinstance(own, dict) else None
            for key, each in taskset.items() if isinstance(taskset, dict) else ():
                args.setdefault(key, each)
    target.note(path, Effect.MEANS, "is inherited: `args.env` of each environment here", value=value)
