"""What a key of prime-rl means here: the kinds of meanings, and those of algorithms, losses and optimizers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from millrace.config.layers import Layer, Strength
from millrace.config.messages import Effect
from millrace.config.sections.algo import COMPARING, DISTILLING, PER_AGENT
from millrace.config.tree import Path, SchemaKey, dotted
from millrace.errors import Violation


class Target(Protocol):
    """The layer that a value is translated into."""

    layer: Layer
    schema: SchemaKey
    deferred: dict[str, tuple[Path, Any]]
    violations: list[Violation]

    def put(self, path: Path, value: Any, *, source: Path) -> None:
        """Set the key at `path` of the target schema to `value`.

        `source` is the path at which the user wrote it, for messages.
        """
        ...

    def move(self, path: Path, value: Any, to: Path) -> None:
        """Translate `value`, which is written at `path`, as if it had been written at `to`."""
        ...

    def note(self, path: Path, effect: Effect, text: str, *, value: Any = None) -> None:
        """Record for the user what became of the key at `path`.

        The keys within a table `value` are named in the note.
        """
        ...

    def refuse(self, path: Path, value: Any, text: str) -> None:
        """Record an error of `value` at `path`; `text` says what is wrong and what to write instead."""
        ...


Act = Callable[[Target, Path, Any], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """What becomes of a key. Values in ``neutral`` ask for what happens here anyway."""

    effect: Effect
    text: str = ""
    to: str = ""
    neutral: tuple[Any, ...] = ()
    act: Act | None = None
    is_native: bool = False
    """Whether it also holds where our own schema has the key; else the schema's key counts."""
    form: type = object
    """The type of the values that it holds for; any other value is our own key's."""


_EXPLAINED: dict[Act, str] = {}
"""The text for users of each function that translates a value."""


def explained(text: str) -> Callable[[Act], Act]:
    """Return a decorator that gives a translating function its text for users, who read it in the list of keys."""

    def with_text(act: Act) -> Act:
        _EXPLAINED[act] = text
        return act

    return with_text


def moved(to: str, text: str = "", *, neutral: tuple[Any, ...] = (), is_native: bool = False) -> Meaning:
    """Return the meaning of a key that has another path here, `to`.

    `text` replaces the note about it. `neutral` are values that ask for what happens here anyway. `is_native`: it also
    holds if our schema has the key.
    """
    said = text or f"is `{to}` here"
    return Meaning(effect=Effect.MEANS, to=to, text=said, neutral=neutral, is_native=is_native)


def nothing(text: str, *neutral: Any) -> Meaning:
    """Return the meaning of a key whose choice does not exist here: a note with `text` that it has no effect.

    `neutral` are values that ask for what happens here anyway: they get no such note.
    """
    return Meaning(effect=Effect.NOTHING, text=text, neutral=neutral)


def later(text: str, *neutral: Any) -> Meaning:
    """Return the meaning of a feature that is missing here and changes nothing that is learned: a warning with `text`.

    `neutral` are values that ask for what happens here anyway: they get no warning.
    """
    return Meaning(effect=Effect.LATER, text=text, neutral=neutral)


def blocks(text: str, *neutral: Any) -> Meaning:
    """Return the meaning of a feature that is missing here and changes what is learned: the run is not started.

    `text` says so to the user. `neutral` are values that ask for what happens here anyway: they block nothing.
    """
    return Meaning(effect=Effect.BLOCKS, text=text, neutral=neutral)


def refused(text: str, *neutral: Any) -> Meaning:
    """Return the meaning of a key that is an error; `text` says what to write instead.

    `neutral` are values that ask for what happens here anyway: they are no error.
    """
    return Meaning(effect=Effect.REFUSED, text=text, neutral=neutral)


def converted(act: Act, *, is_native: bool = False, form: type = object) -> Meaning:
    """Return the meaning of a key whose value the function `act` translates; `explained` has its text for users.

    `is_native`: it also holds if our schema has the key. `form` is the type of the values that it holds for, and
    implies `is_native`; a value of another type is our own key's.
    """
    is_native = is_native or form is not object
    return Meaning(effect=Effect.MEANS, text=_EXPLAINED[act], act=act, is_native=is_native, form=form)


def only(text: str, *known: Any, other: Mapping[str, Act] | None = None) -> Meaning:
    """Return the meaning of a key that takes the values `known`; they are put under the same key, if our schema has it.

    ``other`` has values that are written differently here, each with what reads it. Another text blocks with the note
    `text`, and leaves our default. A value that is no text is treated as a known one.
    """

    def act(target: Target, path: Path, value: Any) -> None:
        """Put a known value, translate one of `other`, and block the run with a note for another text."""
        if isinstance(value, str) and other and value in other:
            other[value](target, path, value)
        elif value in known or not isinstance(value, str):
            if target.schema.find(path):
                target.put(path, value, source=path)
            else:
                target.note(path, Effect.SAME, "", value=value)
        else:
            target.note(path, Effect.BLOCKS, text.format(value=value))

    return Meaning(effect=Effect.MEANS, text=text.format(value="…"), act=act, is_native=True)


def same(meaning: Meaning, prefix: str, names: str) -> dict[str, Meaning]:
    """Return one meaning for several keys, by path: each of `names`, which spaces separate, after `prefix`."""
    return {f"{prefix}{name}": meaning for name in names.split()}


# What prime-rl learns by, in our words: algorithms, losses, and what an optimizer or a layout leaves to be chosen.

SAMPLED_BY_OTHERS = (
    "rollouts of another model are no part of a run: play them with "
    "`millrace eval --tasks train --client.base-url URL`, and train on them with `millrace sft` (docs/evaluations.md)"
)
ROWS_ALONE = (
    "training on the rows of a dataset, without rollouts, is a run of its own: give the rows to `millrace sft` "
    "(docs/guides/sft.md); `[trainer.dataset]` learns them beside the rollouts of a run"
)
UNBUILT_ALGORITHMS = ("dataset_sft", "debug", "sft")
"""Names of algorithms that prime-rl has and no run bears yet."""
_NAMED = ("sft",)
"""Those that our schema has the names of."""
_LOSS: Path = ("trainer", "loss")
_RATIOS = {"icepop": (0.2, 5.0), "ppo": (0.8, 1.2), "cispo": (0.0, 5.0)}
"""prime-rl's bounds of the ratio where a loss has no others, at 2026-10."""
_AUTUMN_IPO_EPS = 0.3


@explained("the same; one that is not built is refused when the run is submitted")
def algorithm(target: Target, path: Path, value: Any) -> None:
    """Translate the type of an algorithm, written at `path`: put it.

    For an algorithm that is not built here, a note blocks the run.
    """
    is_unbuilt = isinstance(value, str) and value in UNBUILT_ALGORITHMS
    if is_unbuilt:
        target.note(path, Effect.BLOCKS, unbuilt_algorithm(value))
    if not is_unbuilt or value in _NAMED:  # else what another algorithm needs would be missed
        target.put(path, value, source=path)


@explained("`orchestrator.algo.type`, unless `rl`")
def training_mode(target: Target, path: Path, value: Any) -> None:
    """Translate `training_mode`, written at `path`: move "opd" and "sft" to `orchestrator.algo.type`.

    "rl" is the default; other values are refused.
    """
    if value == "rl":
        target.note(path, Effect.SAME, "")
    elif value in ("opd", "sft"):
        target.note(path, Effect.MEANS, f'is `orchestrator.algo.type = "{value}"` here')
        target.move(path, value, ("orchestrator", "algo", "type"))
    else:
        target.refuse(path, value, 'must be "rl", "opd" or "sft"')


@explained("`trainer.optim`")
def own_optimizer(target: Target, path: Path, value: Any) -> None:
    """Translate the table of an optimizer, written at `path`: move it to `trainer.optim`.

    If the schema has no trainer, a note blocks the run.
    """
    if target.schema.find(("trainer", "optim")) is not None:
        target.note(path, Effect.MEANS, "is `trainer.optim` here")
        target.move(path, value, ("trainer", "optim"))
    else:
        target.note(path, Effect.BLOCKS, "is the trainer's here: give it `[trainer.optim]`", value=value)


@explained("its keys in the table above")
def nested_type(target: Target, path: Path, value: Any) -> None:
    """Translate the table `advantage` of an algorithm, written at `path`: move each key into the table above it."""
    if not isinstance(value, dict):
        target.refuse(path, value, 'must be a table, such as { type = "grpo" }')
        return
    target.note(path, Effect.MEANS, f"is `{dotted(path[:-1])}` here")
    for key, each in value.items():
        is_default = key == "type" and each == "default"
        target.move((*path, key), "grpo" if is_default else each, (*path[:-1], key))


@explained('0 in a linear schedule: `type = "constant"`')
def no_decay(target: Target, path: Path, value: Any) -> None:
    """Translate `decay_steps`, written at `path`: put it.

    In a file it is also deferred to `finish_learning`, which makes a linear schedule with 0 steps of decay a constant
    one.
    """
    if target.layer.origin.strength is Strength.FILE:
        target.deferred[f"no decay {dotted(path[:-1])}"] = (path[:-1], value)
    target.put(path, value, source=path)


def _undecayed(target: Target) -> None:
    """Make each deferred linear schedule whose `decay_steps` is 0 a constant one with warm-up, with a note."""
    for path, value in [found for key, found in target.deferred.items() if key.startswith("no decay ")]:
        schedule = _table(target, *path)
        if value == 0 and type(value) is int and schedule.get("type") == "linear":
            schedule.pop("decay_steps")
            if "min_lr" in schedule:
                schedule.pop("min_lr")
                target.note((*path, "min_lr"), Effect.NOTHING, "the rate comes down to nothing: `decay_steps` is 0")
            target.put((*path, "type"), "constant", source=(*path, "type"))
            # As long as a linear schedule warms up by default; a constant one does not.
            schedule.setdefault("warmup_steps", 10)
            text = f'is `type = "constant"` here, with {schedule["warmup_steps"]} steps of warm-up: nothing decays'
            target.note((*path, "decay_steps"), Effect.MEANS, text)


def unbuilt_algorithm(name: str) -> str:
    """Return what to do instead of the algorithm `name`, which is not built here: text for a message."""
    there = f"{', '.join((*COMPARING, *PER_AGENT))}, {' and '.join(DISTILLING)} are"
    instead = {"sft": SAMPLED_BY_OTHERS, "dataset_sft": ROWS_ALONE}
    return instead.get(name, f"{name} is not there yet; {there}")


@explained('`type = "opo"`')
def length_weighted(target: Target, path: Path, value: Any) -> None:
    """Translate `length_weighted_baseline`, written at `path`: defer `type = "opo"` to `finish_learning`.

    Values other than true are refused.
    """
    if value is True:
        target.deferred[dotted((*path[:-1], "type"))] = ((*path[:-1], "type"), "opo")
    else:
        target.refuse(path, value, "must be true or false")


@explained('"prompt": `trainer.loss.aggregation = "prompt"`')
def loss_aggregation(target: Target, path: Path, value: Any) -> None:
    """Translate `loss_aggregation` of an algorithm, written at `path`: put "prompt" as that of the trainer's loss.

    "token" is the default; other values are refused. If the schema has no trainer, a note blocks the run.
    """
    to: Path = (*_LOSS, "aggregation")
    if value == "token":
        target.note(path, Effect.SAME, "", value=value)
    elif value != "prompt":
        target.refuse(path, value, 'must be "token" or "prompt"')
    elif target.schema.find(to):
        target.note(path, Effect.MEANS, f'is `{dotted(to)} = "prompt"` here')
        target.put(to, value, source=path)
    else:
        target.note(path, Effect.BLOCKS, f'is the trainer\'s here: give it `{dotted(to)} = "prompt"`')


@explained("one URL, or a list")
def as_list(target: Target, path: Path, value: Any) -> None:
    """Translate one URL or a list of them, written at `path`: put it there as a list."""
    target.put(path, [value] if isinstance(value, str) else value, source=path)


@explained("the bounds of the chosen loss")
def loss_part(target: Target, path: Path, value: Any) -> None:
    """Translate a bound of the loss, written at `path`: defer it to `finish_learning`.

    Refuse all but numbers of at least 0.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0:
        target.deferred[f"loss.{path[-1]}"] = (path, value)
    else:
        target.refuse(path, value, "must be a number of at least 0")


def icepop(target: Target, path: Path, value: Any) -> None:
    """Translate the loss type "icepop", written at `path`: defer it to `finish_learning`, which needs its bounds."""
    target.deferred["loss.icepop"] = (path, value)


@explained('"auto": 0 in RL, 0.01 in SFT')
def weight_decay(target: Target, path: Path, value: Any) -> None:
    """Translate `weight_decay`, written at `path`: put the number; "auto" is 0 in RL and 0.01 in SFT."""
    if value == "auto":
        value = 0.0 if path[0] == "trainer" else 0.01
        target.note(path, Effect.MEANS, f"is {value} here, as prime-rl resolves it")
    target.put(path, value, source=path)


@explained('"auto": the default')
def automatic(target: Target, path: Path, value: Any) -> None:
    """Translate a value that may be "auto", written at `path`: put any other; "auto" is noted as without effect."""
    if value == "auto":
        target.note(path, Effect.NOTHING, "is not chosen by the model: the default counts")
    else:
        target.put(path, value, source=path)


@explained('`orchestrator.filter_zero_advantages`, "refill" or "shrink"')
def constant_batch(target: Target, path: Path, value: Any) -> None:
    """Translate whether batches have a constant size, written at `path`: put `orchestrator.filter_zero_advantages`.

    It is "refill" for true and "shrink" for false; other values are refused.
    """
    if isinstance(value, bool):
        to = "refill" if value else "shrink"
        target.note(path, Effect.MEANS, f'is `filter_zero_advantages = "{to}"` here')
        target.put(("orchestrator", "filter_zero_advantages"), to, source=path)
    else:
        target.refuse(path, value, "must be true or false")


def finish_learning(target: Target) -> None:
    """Translate the deferred values that need the whole layer: baselines, bounds of losses, schedules, compilation."""
    for path, value in [found for key, found in target.deferred.items() if key.endswith("algo.type")]:
        source = (*path[:-1], "length_weighted_baseline")
        other = _table(target, *path[:-1]).get("type")
        # Of the other algorithms a baseline weighted by length would be another algorithm.
        if other in (None, "grpo"):
            instead = f", in the place of {other}" if other else ""
            target.note(source, Effect.MEANS, f'is `type = "{value}"` here{instead}')
            target.put(path, value, source=source)
        else:
            target.refuse(source, True, f"is a baseline of grpo, and the algorithm is {other}")
    loss = _table(target, *_LOSS)
    ratios = {side: target.deferred.get(f"loss.ratio_{side}") for side in ("low", "high")}
    if "loss.icepop" in target.deferred:
        _icepop(target, loss, ratios)
    elif any(ratios.values()):
        _clips(target, loss, ratios)
    if "loss.eps" in target.deferred or (loss.get("type") == "ipo" and "max_importance_ratio" in loss):
        _ipo(target, loss)
    _undecayed(target)
    for where in (("trainer", "model"), ("model",)):
        _layout(target, where)


def _layout(target: Target, where: Path) -> None:
    """Remove from the model's table `where` what does not go with its layout or adapters, and note it.

    Only keys are removed without which the run learns the same.
    """
    model = _table(target, *where)
    layouts = [key for key in ("tp", "cp", "ep") if isinstance(model.get(key), int) and model[key] > 1]
    compiled = model.get("compile")
    if "tp" in layouts and compiled is not None:
        model.pop("compile")
        text = "is left out with tp above 1, whose exchanges are not proved in compiled blocks: slower, no more"
        target.note((*where, "compile"), Effect.LATER, text)
    elif layouts and isinstance(compiled, dict) and compiled.get("fullgraph"):
        model["compile"] = {**compiled, "fullgraph": False}
        text = f"is false with {' and '.join(layouts)} above 1, whose exchanges divide the graphs: slower, no more"
        target.note((*where, "compile", "fullgraph"), Effect.LATER, text)
    if model.get("lora") is not None and model.get("optimization_dtype") == "bfloat16":
        model.pop("optimization_dtype")
        text = "is left out: adapters, which are small, are optimised in float32"
        target.note((*where, "optimization_dtype"), Effect.LATER, text)


def _icepop(target: Target, loss: dict[str, Any], ratios: dict[str, Any]) -> None:
    """Put importance sampling with the correction `token_mask` for the deferred loss "icepop".

    `loss` is the table of the loss. `ratios` has (path, bound) by "low" and "high", None where the default counts.
    """
    path, _ = target.deferred["loss.icepop"]
    default = dict(zip(("low", "high"), _RATIOS["icepop"], strict=True))
    bounds = {side: found[1] if (found := ratios[side]) else default[side] for side in default}
    target.note(path, Effect.MEANS, "is importance_sampling with the correction token_mask here")
    target.put(path, "importance_sampling", source=path)
    correction = {"type": "token_mask", **bounds}
    target.put((*_LOSS, "correction"), [*loss.get("correction", []), correction], source=path)


def _clips(target: Target, loss: dict[str, Any], ratios: dict[str, Any]) -> None:
    """Put `clip_low` and `clip_high`, distances from 1, for bounds of the ratio.

    Refuse them with other losses than ppo, cispo. `loss` is the table of the loss. `ratios` has (path, bound) by "low"
    and "high", None where none is written.
    """
    for side, sign, found in (("low", -1, ratios["low"]), ("high", 1, ratios["high"])):
        if found is None:
            continue
        path, value = found
        if loss.get("type") in ("ppo", "cispo"):
            target.note(path, Effect.MEANS, f"is `clip_{side}` here, the distance from 1")
            # Rounded, because 1.2 - 1 is 0.19999999999999996 in floating point.
            target.put((*_LOSS, f"clip_{side}"), round(sign * (value - 1), 12), source=path)
        else:
            target.refuse(path, value, "bounds the ratio of ppo, cispo or icepop: set `trainer.loss.type`")


def _ipo(target: Target, loss: dict[str, Any]) -> None:
    """Put what ipo has in prime-rl since autumn 2026 into the table `loss`.

    That is no penalty, and a bound, 0.3 if none is written. A bound beside another loss is refused.
    """
    path, eps = target.deferred.get("loss.eps", ((*_LOSS, "type"), _AUTUMN_IPO_EPS))
    if loss.get("type", "ipo") != "ipo":
        target.refuse(path, eps, 'bounds ipo: set `trainer.loss.type = "ipo"`')
        return
    loss_type = "" if "type" in loss else ' and `type = "ipo"`'
    target.note(path, Effect.MEANS, f"is `ipo_threshold` here, which is {eps:g}, with `kl_tau = 0`{loss_type}")
    # What the file itself says goes first.
    for key, value in (("type", "ipo"), ("ipo_threshold", eps), ("kl_tau", 0.0)):
        if key not in loss:
            target.put((*_LOSS, key), value, source=path)


def _table(target: Target, *path: str | int) -> dict[str, Any]:
    """Return the table at `path` of the translated layer, to be changed in place; an empty one if there is none."""
    found: Any = target.layer.tree
    for part in path:
        if isinstance(part, int):
            found = found[part] if isinstance(found, list) and part < len(found) else None
        else:
            found = found.get(part) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}
