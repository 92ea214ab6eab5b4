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
        """Set a key of the target schema; `source` is where the value is written."""
        ...

    def move(self, path: Path, value: Any, to: Path) -> None:
        """Translate a value as if it had been written at `to`."""
        ...

    def note(self, path: Path, effect: Effect, text: str, *, value: Any = None) -> None:
        """Say what became of a key; of a table `value` that is left out, with the keys in it."""
        ...

    def refuse(self, path: Path, value: Any, text: str) -> None:
        """Report a key as an error."""
        ...


Act = Callable[[Target, Path, Any], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """What becomes of a key. Values in ``neutral`` say what is so anyway."""

    effect: Effect
    text: str = ""
    to: str = ""
    neutral: tuple[Any, ...] = ()
    act: Act | None = None
    is_native: bool = False
    """Whether it also holds where our own schema has the key; else the schema's key counts."""
    form: type = object
    """The type of the values that it holds for; any other value is our own key's."""


def moved(to: str, text: str = "", *, neutral: tuple[Any, ...] = (), is_native: bool = False) -> Meaning:
    """Return the same key in another place."""
    said = text or f"is `{to}` here"
    return Meaning(effect=Effect.MEANS, to=to, text=said, neutral=neutral, is_native=is_native)


def nothing(text: str, *neutral: Any) -> Meaning:
    """Mark a key whose choice does not exist here."""
    return Meaning(effect=Effect.NOTHING, text=text, neutral=neutral)


def later(text: str, *neutral: Any) -> Meaning:
    """Return a feature that is not there yet, and that changes nothing that is learned."""
    return Meaning(effect=Effect.LATER, text=text, neutral=neutral)


def blocks(text: str, *neutral: Any) -> Meaning:
    """Return a feature that is not there yet, and that changes what is learned."""
    return Meaning(effect=Effect.BLOCKS, text=text, neutral=neutral)


def refused(text: str, *neutral: Any) -> Meaning:
    """Return an error; the text says what to write instead."""
    return Meaning(effect=Effect.REFUSED, text=text, neutral=neutral)


def converted(act: Act, *, is_native: bool = False, form: type = object) -> Meaning:
    """Return the meaning of a value that a function reads; the function's docstring states it for users."""
    text = " ".join((act.__doc__ or "").partition("\n\n")[0].split())
    is_native = is_native or form is not object
    return Meaning(effect=Effect.MEANS, text=text, act=act, is_native=is_native, form=form)


def only(text: str, *known: Any, other: Mapping[str, Act] | None = None) -> Meaning:
    """Return the meaning of a key that takes the values `known`; they are put under the same key, if our schema has it.

    ``other`` has values that are written differently here, each with what reads it. Another text blocks with the note
    `text`, and leaves our default. A value that is no text is treated as a known one.
    """

    def act(target: Target, path: Path, value: Any) -> None:
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
    """Return several keys of one table with the same meaning."""
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


def algorithm(target: Target, path: Path, value: Any) -> None:
    """The algorithm stays what is asked for; a run with one that is not there yet is refused when it is submitted.

    Puts the value, and notes an algorithm that is not built as one that blocks the run.
    """
    is_unbuilt = isinstance(value, str) and value in UNBUILT_ALGORITHMS
    if is_unbuilt:
        target.note(path, Effect.BLOCKS, unbuilt_algorithm(value))
    if not is_unbuilt or value in _NAMED:  # else what another algorithm needs would be missed
        target.put(path, value, source=path)


def training_mode(target: Target, path: Path, value: Any) -> None:
    """`training_mode` of the spring of 2026: `rl`, or the algorithm that learns from the teacher.

    Moves an algorithm to `orchestrator.algo.type`, and refuses unknown values.
    """
    if value == "rl":
        target.note(path, Effect.SAME, "")
    elif value in ("opd", "sft"):
        target.note(path, Effect.MEANS, f'is `orchestrator.algo.type = "{value}"` here')
        target.move(path, value, ("orchestrator", "algo", "type"))
    else:
        target.refuse(path, value, 'must be "rl", "opd" or "sft"')


def own_optimizer(target: Target, path: Path, value: Any) -> None:
    """The optimizer of a run whose trainer has several, which is the trainer's.

    Moves the table to `trainer.optim` if the schema has that, else blocks the run with a note.
    """
    if target.schema.find(("trainer", "optim")) is not None:
        target.note(path, Effect.MEANS, "is `trainer.optim` here")
        target.move(path, value, ("trainer", "optim"))
    else:
        target.note(path, Effect.BLOCKS, "is the trainer's here: give it `[trainer.optim]`", value=value)


def nested_type(target: Target, path: Path, value: Any) -> None:
    """`[algo.advantage]` of the summer of 2026, whose keys are the algorithm's own.

    Moves each key of the table to the table above it.
    """
    if not isinstance(value, dict):
        target.refuse(path, value, 'must be a table, such as { type = "grpo" }')
        return
    target.note(path, Effect.MEANS, f"is `{dotted(path[:-1])}` here")
    for key, each in value.items():
        is_default = key == "type" and each == "default"
        target.move((*path, key), "grpo" if is_default else each, (*path[:-1], key))


def no_decay(target: Target, path: Path, value: Any) -> None:
    """`decay_steps = 0` of a linear schedule: its rate stays after the warm-up, as that of a constant one.

    Puts the value, and keeps one of a file for `finish_learning`.
    """
    if target.layer.origin.strength is Strength.FILE:
        target.deferred[f"no decay {dotted(path[:-1])}"] = (path[:-1], value)
    target.put(path, value, source=path)


def _undecayed(target: Target) -> None:
    for path, value in [found for key, found in target.deferred.items() if key.startswith("no decay ")]:
        schedule = _table(target, *path)
        if value == 0 and type(value) is int and schedule.get("type") == "linear":
            schedule.pop("decay_steps")
            if "min_lr" in schedule:
                schedule.pop("min_lr")
                target.note((*path, "min_lr"), Effect.NOTHING, "the rate comes down to nothing: `decay_steps` is 0")
            target.put((*path, "type"), "constant", source=(*path, "type"))
            schedule.setdefault("warmup_steps", 10)
            text = f'is `type = "constant"` here, with {schedule["warmup_steps"]} steps of warm-up: nothing decays'
            target.note((*path, "decay_steps"), Effect.MEANS, text)


def unbuilt_algorithm(name: str) -> str:
    """Return what to do instead of an algorithm that is not there yet."""
    there = f"{', '.join((*COMPARING, *PER_AGENT))}, {' and '.join(DISTILLING)} are"
    instead = {"sft": SAMPLED_BY_OTHERS, "dataset_sft": ROWS_ALONE}
    return instead.get(name, f"{name} is not there yet; {there}")


def length_weighted(target: Target, path: Path, value: Any) -> None:
    """`length_weighted_baseline = true` is `type = "opo"`, whose baseline is that mean.

    Keeps the algorithm's type for `finish_learning`, or refuses another value than true.
    """
    if value is True:
        target.deferred[dotted((*path[:-1], "type"))] = ((*path[:-1], "type"), "opo")
    else:
        target.refuse(path, value, "must be true or false")


def loss_aggregation(target: Target, path: Path, value: Any) -> None:
    """`loss_aggregation = "prompt"` is `trainer.loss.aggregation = "prompt"`: every task weighs the same.

    Puts the key of the trainer if the schema has it, else blocks the run with a note.
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


def as_list(target: Target, path: Path, value: Any) -> None:
    """One URL is a list of one.

    Puts a list of the one text, and other values as they are.
    """
    target.put(path, [value] if isinstance(value, str) else value, source=path)


def loss_part(target: Target, path: Path, value: Any) -> None:
    """`eps`, `ratio_low` and `ratio_high` as the bounds of the loss that is chosen.

    Keeps the number for `finish_learning`, or refuses another value.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0:
        target.deferred[f"loss.{path[-1]}"] = (path, value)
    else:
        target.refuse(path, value, "must be a number of at least 0")


def icepop(target: Target, path: Path, value: Any) -> None:
    """The loss `icepop` is importance sampling that drops tokens whose ratio is out of bounds.

    Keeps the value for `finish_learning`.
    """
    target.deferred["loss.icepop"] = (path, value)


def weight_decay(target: Target, path: Path, value: Any) -> None:
    """`weight_decay = "auto"` is 0 in RL and 0.01 in SFT.

    Puts the number.
    """
    if value == "auto":
        value = 0.0 if path[0] == "trainer" else 0.01
        target.note(path, Effect.MEANS, f"is {value} here, as prime-rl resolves it")
    target.put(path, value, source=path)


def automatic(target: Target, path: Path, value: Any) -> None:
    """`auto` leaves the choice to the trainer, whose default counts.

    Puts another value as it is, and nothing for `auto`.
    """
    if value == "auto":
        target.note(path, Effect.NOTHING, "is not chosen by the model: the default counts")
    else:
        target.put(path, value, source=path)


def constant_batch(target: Target, path: Path, value: Any) -> None:
    """Whether samples without an advantage are replaced before a batch is cut: `filter_zero_advantages`.

    Puts "refill" for true and "shrink" for false, and refuses other values.
    """
    if isinstance(value, bool):
        to = "refill" if value else "shrink"
        target.note(path, Effect.MEANS, f'is `filter_zero_advantages = "{to}"` here')
        target.put(("orchestrator", "filter_zero_advantages"), to, source=path)
    else:
        target.refuse(path, value, "must be true or false")


def finish_learning(target: Target) -> None:
    """Apply what needs the whole layer: baselines, bounds of losses, and compilation beside a layout without it."""
    for path, value in [found for key, found in target.deferred.items() if key.endswith("algo.type")]:
        source = (*path[:-1], "length_weighted_baseline")
        other = _table(target, *path[:-1]).get("type")
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
    """Leave out what does not go with a layout or with adapters, where the run learns the same without it."""
    model = _table(target, *where)
    layouts = [key for key in ("tp", "cp", "ep") if isinstance(model.get(key), int) and model[key] > 1]
    if layouts and model.get("compile") is not None:
        model.pop("compile")
        shared = " and ".join(layouts)
        text = f"is left out with {shared} above 1, whose exchanges are not proved in compiled blocks: slower, no more"
        target.note((*where, "compile"), Effect.LATER, text)
    if model.get("lora") is not None and model.get("optimization_dtype") == "bfloat16":
        model.pop("optimization_dtype")
        text = "is left out: adapters, which are small, are optimised in float32"
        target.note((*where, "optimization_dtype"), Effect.LATER, text)


def _icepop(target: Target, loss: dict[str, Any], ratios: dict[str, Any]) -> None:
    path, _ = target.deferred["loss.icepop"]
    default = dict(zip(("low", "high"), _RATIOS["icepop"], strict=True))
    bounds = {side: found[1] if (found := ratios[side]) else default[side] for side in default}
    target.note(path, Effect.MEANS, "is importance_sampling with the correction token_mask here")
    target.put(path, "importance_sampling", source=path)
    correction = {"type": "token_mask", **bounds}
    target.put((*_LOSS, "correction"), [*loss.get("correction", []), correction], source=path)


def _clips(target: Target, loss: dict[str, Any], ratios: dict[str, Any]) -> None:
    for side, sign, found in (("low", -1, ratios["low"]), ("high", 1, ratios["high"])):
        if found is None:
            continue
        path, value = found
        if loss.get("type") in ("ppo", "cispo"):
            target.note(path, Effect.MEANS, f"is `clip_{side}` here, the distance from 1")
            target.put((*_LOSS, f"clip_{side}"), round(sign * (value - 1), 12), source=path)
        else:
            target.refuse(path, value, "bounds the ratio of ppo, cispo or icepop: set `trainer.loss.type`")


def _ipo(target: Target, loss: dict[str, Any]) -> None:
    """Set what ipo has since the autumn of 2026: no penalty, and a bound of 0.3."""
    path, eps = target.deferred.get("loss.eps", ((*_LOSS, "type"), _AUTUMN_IPO_EPS))
    if loss.get("type", "ipo") != "ipo":
        target.refuse(path, eps, 'bounds ipo: set `trainer.loss.type = "ipo"`')
        return
    loss_type = "" if "type" in loss else ' and `type = "ipo"`'
    target.note(path, Effect.MEANS, f"is `ipo_threshold` here, which is {eps:g}, with `kl_tau = 0`{loss_type}")
    for key, value in (("type", "ipo"), ("ipo_threshold", eps), ("kl_tau", 0.0)):
        if key not in loss:
            target.put((*_LOSS, key), value, source=path)


def _table(target: Target, *path: str | int) -> dict[str, Any]:
    found: Any = target.layer.tree
    for part in path:
        if isinstance(part, int):
            found = found[part] if isinstance(found, list) and part < len(found) else None
        else:
            found = found.get(part) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}
