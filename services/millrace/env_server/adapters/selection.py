"""Which tasks of an environment are played: `select` of the run config, applied to the tasks that were loaded.

Every name and every position must exist, and evaluated tasks may not be trained on: else a typing error would silently
train on other tasks than those that were meant.
"""

import hashlib
import itertools
import json
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.decoding import decode_object
from millrace.errors import CorruptObjectError, InvalidSpecError, Violation
from millrace.internal.v1.play_pb2 import EnvSpec
from millrace.rollouts.requests import TaskSet

# The arguments of an environment, and those among them that are the env-server's own.

# Keys of an environment's args that are the env-server's own and not passed to the environment.
RENDERER = "renderer"  # name of a `renderers` renderer, such as "qwen3"; tokenizes on the client side
NO_RENDERER = "off"  # its value where the engine shall tokenize (v0 only; v1 has no other way to exact tokens)
V1_ENV = "env"  # v1: further keys of the environment's config, such as {"agent": {"timeout": {"setup": 30}}}
V1_EVAL_ARGS = "eval_args"  # v1: taskset args of the held-out set, merged over the others
MAX_ARGS_BYTES = 1 << 20
"""Largest JSON document in a request."""
V1_NUM_TASKS = "num_tasks"  # v1: how many tasks of an endless taskset
OURS = "millrace"  # a table of the same keys, for environments that have an option of such a name themselves


def parse_args(env: EnvSpec) -> dict[str, Any]:
    """Return the environment's arguments, decoded from `env.args_json`; {} if that is empty.

    Raises InvalidSpecError if they are no JSON object or larger than MAX_ARGS_BYTES.
    """
    what = f"what environment {env.id!r} shall be loaded with"
    try:
        return decode_object(env.args_json or "{}", what=what, reason="ENV_ARGS_INVALID", max_bytes=MAX_ARGS_BYTES)
    except CorruptObjectError as error:
        message = f"the args of environment {env.id!r} must be a JSON object ({error})"
        wrong = Violation(field="env.args_json", value=env.args_json[:200], message=message, source="request")
        raise InvalidSpecError([wrong]) from error


def split_args(
    args: Mapping[str, Any], *, keys: Collection[str], options: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the arguments into (those that are passed to the environment, those that the env-server uses itself).

    `keys` are the names of the env-server's arguments, and `options` those of the environment's. A key that is in both
    goes to the environment. The env-server's own may always be in a table `millrace`, and must be for such a key.
    Raises InvalidSpecError if that table is no table or has a key that is not in `keys`.
    """
    own = dict(args)
    ours = table_of(own.pop(OURS, None), where=f"args.{OURS}") if OURS not in options else {}
    if unknown := sorted(ours.keys() - set(keys)):
        message = f"has no key {unknown[0]!r}; it has {', '.join(keys)}"
        raise InvalidSpecError([Violation(field=f"args.{OURS}", value=unknown[0], message=message)])
    for key in keys:
        if key not in options and key in own:
            # The table `millrace` has precedence, as the more explicit place.
            ours.setdefault(key, own.pop(key))
    return own, ours


def table_of(value: Any, *, where: str) -> dict[str, Any]:
    """Return a copy of the mapping `value`, or {} if `value` is None.

    Raises InvalidSpecError that names the key `where` if `value` is anything else.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidSpecError([Violation(field=where, value=f"{value!r:.100}", message="must be a table")])
    return dict(value)


_SHOWN = 3
_IDENTITIES = ("ids", "keys", "names")


# Task sets: ids of tasks and a digest of the whole set, by content.
#
# The env-server owns the data. The orchestrator sees a count and a digest, so two env-servers that disagree about the
# tasks (another version of the package, another seed) are noticed instead of mixed.

# Hex digits of a task id: 64 bits, so a collision within a million tasks has a chance of about 3e-8.
TASK_ID_DIGITS = 16


def canonical_json(value: Any) -> bytes:
    """Return a value as canonical JSON: sorted keys, no spaces, UTF-8.

    A value that JSON does not have is written as type and repr.
    """
    text = json.dumps(
        value,
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=False,
        default=lambda thing: f"{type(thing).__name__}:{thing!r}",
    )
    return text.encode("utf-8", "surrogatepass")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTable(TaskSet):
    """The tasks of one set with their ids. `row` gives task i in the environment's own form."""

    row: Callable[[int], Any]


def build_task_table(num_tasks: int, *, row: Callable[[int], Any], content: Callable[[int], Any]) -> TaskTable:
    """Return a table of tasks 0 to `num_tasks` - 1, with the id of each and a digest of the whole set.

    `row` gives task i in the environment's own form. Ids and digest are hashes of `content(i)`, task i as plain data.
    """
    whole = hashlib.sha256()
    ids: list[str] = []
    for index in range(num_tasks):
        data = canonical_json(content(index))
        whole.update(data + b"\n")
        ids.append(hashlib.sha256(data).hexdigest()[:TASK_ID_DIGITS])
    return TaskTable(ids=ids, digest=whole.hexdigest(), row=row)


def no_tasks() -> TaskTable:
    """Return a table without tasks."""
    return build_task_table(0, row=lambda index: index, content=lambda index: index)


@dataclass(frozen=True, slots=True, kw_only=True)
class EveryTask:
    """All tasks of one set, in the environment's order."""

    size: int
    row: Callable[[int], Any]
    content: Callable[[int], Any]
    """Gives task i as plain data, whose digest is the task's id."""
    named: Callable[[int, str], Iterable[str]] = lambda index, kind: ()
    """Gives the `ids`, `keys` or `names` of task i, by which it can be selected."""
    mixed: Sequence[int] | None = None
    """Another order, in which the first tasks are of every environment of a group."""

    def table(self, positions: Sequence[int]) -> TaskTable:
        """Return the table of the tasks at these positions, in the order of `positions`."""
        return build_task_table(
            len(positions),
            row=lambda index: self.row(positions[index]),
            content=lambda index: self.content(positions[index]),
        )

    def names_of(self, kind: str, ids: Sequence[str]) -> list[set[str]]:
        """Return for each task, by position, the names by which a selection can choose it.

        `kind` is `ids`, `keys` or `names`. Of the kind `keys` a task also has the hash in `ids`, its id by content.
        """
        own = [{str(name) for name in self.named(index, kind)} for index in range(self.size)]
        return [names | {ids[index]} for index, names in enumerate(own)] if kind == "keys" else own


NO_TASKS = EveryTask(size=0, row=lambda index: index, content=lambda index: index)
"""The set of an environment without tasks."""


def selected_tables(
    text: str, *, train: EveryTask, held_out: EveryTask | None, is_mixed: bool
) -> tuple[TaskTable, TaskTable]:
    """Return the tables of (training tasks, evaluated tasks) that the JSON `text` of `EnvSpec.select_json` chooses.

    A set without a selection is whole. `held_out` is the set for evaluation; where it is None, evaluated tasks are
    chosen from `train`, and there are none without such a selection. `is_mixed`: evaluations play training tasks, so
    these are in the order `train.mixed`, as they are with any selection. Raises InvalidSpecError for an empty
    selection, unknown names or positions, and evaluated tasks that are trained on.
    """
    tables = decode_object(text or "{}", what="select", reason="ENV_ARGS_INVALID", max_bytes=MAX_ARGS_BYTES)
    every = list(train.mixed if train.mixed is not None and (is_mixed or tables) else range(train.size))
    whole = train.table(every)
    if not tables:
        return whole, no_tasks() if held_out is None else held_out.table(_order(held_out))
    ids = train.table(range(train.size)).ids if train.mixed is not None else whole.ids
    chosen = [_choose(train, tables[key], ids, of="training tasks") for key in ("train",) if key in tables]
    trained = train.table(chosen[0]) if chosen else whole
    if "eval" not in tables:
        return trained, no_tasks() if held_out is None else held_out.table(_order(held_out))
    source, of = (train, "tasks") if held_out is None else (held_out, "held-out tasks")
    known = ids if held_out is None else held_out.table(range(held_out.size)).ids
    evaluated = source.table(_choose(source, tables["eval"], known, of=of, key="orchestrator.eval.env.select"))
    for other in tables.get("apart_from", ()):
        _require_apart(evaluated, {ids[at] for at in _choose(train, other, ids, of="training tasks")})
    return trained, evaluated


def stop_of(text: str) -> int:
    """Return how many tasks an environment must have for a selection: one past the last position that it names.

    `text` is the JSON of `EnvSpec.select_json`. Slices without an end do not count; 0 if nothing is left.
    """
    tables = decode_object(text or "{}", what="select", reason="ENV_ARGS_INVALID", max_bytes=MAX_ARGS_BYTES)
    selections = [tables[key] for key in ("train", "eval") if key in tables] + tables.get("apart_from", [])
    stops = [stop for each in selections for _, stop, _ in each["include"]["idx"] if stop is not None]
    return max(stops, default=0)


def tasks_of(taskset: Any, num_tasks: int) -> EveryTask:
    """Return all tasks of a v1 taskset, or the first `num_tasks` of an endless one, with the names that they have."""
    tasks = list(itertools.islice(taskset, num_tasks) if taskset.INFINITE else taskset)

    def named(index: int, kind: str) -> Iterable[str]:
        """Return the task's name of that kind (`ids`, `keys` or `names`); () if it has none."""
        task = tasks[index]
        found = {"ids": getattr(task.data, "id", None), "keys": getattr(task, "key", None), "names": task.data.name}
        return (str(found[kind]),) if found[kind] is not None else ()

    return EveryTask(
        size=len(tasks),
        row=tasks.__getitem__,
        content=lambda index: tasks[index].data.model_dump(mode="json"),
        named=named,
    )


def _order(whole: EveryTask) -> Sequence[int]:
    """Return the positions of all tasks in the order in which they are played without a selection."""
    return range(whole.size) if whole.mixed is None else whole.mixed


def _choose(
    whole: EveryTask, select: Mapping[str, Any], ids: Sequence[str], *, of: str, key: str = "orchestrator.env.select"
) -> list[int]:
    """Return the positions of `whole` that the selection `select` chooses, in the order in which they are played.

    `ids` are the tasks' ids by position; `of` (the kind of tasks) and `key` (of the selection) are for messages. Raises
    InvalidSpecError, also for an empty choice.
    """
    kept, dropped = (_matched(whole, select[side], ids, of=of, key=f"{key}.{side}") for side in ("include", "exclude"))
    left = [at for at in _order(whole) if (kept is None or at in kept) and not (dropped and at in dropped)]
    if select["shuffle"]:
        # The order before a shuffle must not depend on how tasks were mixed, or a seed would not give the same choice.
        left.sort()
        random.Random(select["seed"]).shuffle(left)
    limit = select["limit"]
    chosen = left[select["skip"] :][:limit]
    if not chosen:
        counts = {"include": whole.size if kept is None else len(kept), "exclude": len(dropped or ())}
        message = (
            f"leaves none of the {whole.size} {of}: include keeps {counts['include']}, exclude names "
            f"{counts['exclude']}, skip drops {select['skip']} of the {len(left)} that are left"
        )
        raise _refused([Violation(field=key, message=message)])
    return chosen


def _matched(whole: EveryTask, match: Mapping[str, Any], ids: Sequence[str], *, of: str, key: str) -> set[int] | None:
    """Return the positions that any list of `match` (`idx`, `ids`, `keys`, `names`) names; None if all lists are empty.

    `ids` are the tasks' ids by position. `of` (the kind of tasks) and `key` (of `match`) are for messages. Raises
    InvalidSpecError for positions and names that do not exist.
    """
    if not any(match.values()):
        return None
    found: set[int] = set()
    wrong: list[Violation] = []
    for start, stop, step in match["idx"]:
        # A slice without an end names at least its first position.
        last = start if stop is None else range(start, stop, step)[-1]
        if last >= whole.size:
            shown = f"{last}" if stop is None or stop == start + 1 else f"{start} to {last}"
            message = f"names positions {shown}, and there are {whole.size} {of}: {_positions(whole.size)}"
            wrong.append(Violation(field=f"{key}.idx", value=shown, message=message))
        found.update(range(start, whole.size if stop is None else min(stop, whole.size), step))
    for kind in _IDENTITIES:
        if not (sought := match[kind]):
            continue
        names = whole.names_of(kind, ids)
        there = set().union(*names)
        if missing := [name for name in sought if name not in there]:
            message = f"names {len(missing)} of {len(sought)} tasks that are not there: {_shown(missing)}; " + (
                f"the {whole.size} {of} have {kind} such as {_shown(sorted(there))}" if there else _nameless(kind)
            )
            wrong.append(Violation(field=f"{key}.{kind}", value=_shown(missing), message=message))
        found.update(at for at, own in enumerate(names) if own & set(sought))
    if wrong:
        raise _refused(wrong)
    return found


def _require_apart(evaluated: TaskTable, trained: set[str]) -> None:
    """Raise InvalidSpecError if an evaluated task has one of the task ids `trained`."""
    if shared := list(dict.fromkeys(task for task in evaluated.ids if task in trained)):
        message = (
            f"chooses {len(shared)} of its {len(evaluated)} tasks that are trained on, too: the first are "
            f"{_shown(shared)}; leave these out here, or write what is chosen here as "
            "`orchestrator.env.select.exclude`"
        )
        raise _refused([Violation(field="orchestrator.eval.env.select", message=message)])


def _refused(wrong: Sequence[Violation]) -> InvalidSpecError:
    """Make the error that refuses a selection for these violations."""
    return InvalidSpecError(
        wrong, reason="ENV_SELECT_INVALID", remedy="correct `select` of the environment, then submit the run again"
    )


def _positions(size: int) -> str:
    """Return the valid positions of `size` tasks as text."""
    return f"0 to {size - 1}" if size else "none"


def _nameless(kind: str) -> str:
    """Return the part of a message that no task has a name of that kind."""
    return f"the tasks of this environment have no {kind}: choose by `idx` or `keys`"


def _shown(names: Sequence[str]) -> str:
    """Return the first three names, quoted, as text."""
    more = ", …" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more
