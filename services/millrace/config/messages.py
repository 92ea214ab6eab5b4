"""Notes on how a config was read, and the words of messages: did-you-mean, and values shortened without secrets."""

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, get_origin

from millrace.config.tree import Kind, Path, SchemaKey, dotted

_CUTOFF = 0.6
_CUTOFF_ELSEWHERE = 0.8
_MOST_KEYS = 24
_SECRET_KEY = re.compile(r"(^|_)(api_?key(_var)?|token|secret|password|credentials?)$")
_SECRET_VALUE = re.compile(r"^(sk-|hf_|ghp_|AKIA|Bearer )")
_LONGEST = 80


def close(word: str, words: Iterable[str], *, most: int = 3) -> list[str]:
    """Return the words most similar to `word`, the best first, at most `most`; empty if none is similar."""
    return difflib.get_close_matches(word, list(words), n=most, cutoff=_CUTOFF)


def unknown_key_message(
    key: str, value: Any, node: SchemaKey, path: Path, *, schema: SchemaKey
) -> tuple[str, set[Path]]:
    """Return the message about a key that a section does not have, and the paths of the section's keys it may be meant
    for.

    `node` is the section, at `path`; `schema` is the root of the document. `value` excludes keys of another form.
    """
    spelled = key.replace("-", "_")
    if (of_trl := trl_meaning(spelled, schema, below=path)) is not None:
        return of_trl, set()
    names = {name: child.name for child in node.children.values() for name in (child.name, *child.aliases)}
    # A table is no misspelt number: only keys of the same form are suggested.
    names = {name: meant for name, meant in names.items() if _fits(value, node.children[meant])}
    siblings = list(dict.fromkeys(names[name] for name in close(spelled, names)))
    meant: set[Path] = {(*path, name) for name in siblings}
    if siblings:
        return f"unknown key; did you mean {_or(dotted((*path, name)) for name in siblings)}?", meant
    elsewhere = _elsewhere(spelled, value, schema)
    if elsewhere:
        return f"unknown key; did you mean {_or(elsewhere)}?", meant
    return f"unknown key; the keys here are {', '.join(sorted(node.children)[:_MOST_KEYS])}", meant


def _elsewhere(key: str, value: Any, schema: SchemaKey) -> list[str]:
    """Return dotted paths of at most three keys anywhere in the schema that have this name, or else the most similar
    one.

    Only keys count that `value` fits in form.
    """
    everywhere = {dotted(other.path): other for other in schema.walk() if _fits(value, other)}
    exact = [name for name, other in everywhere.items() if key == other.name or key in other.aliases]
    if exact:
        return exact[:3]
    near = difflib.get_close_matches(key, {other.name for other in everywhere.values()}, n=1, cutoff=_CUTOFF_ELSEWHERE)
    return [name for name, other in everywhere.items() if near and other.name == near[0]][:3]


def _fits(value: Any, node: SchemaKey) -> bool:
    """Return whether a value has the form of a key: table, list or number.

    A text fits any, as it may be from a command line.
    """
    match value:
        case dict():
            return node.kind in (Kind.SECTION, Kind.FREE_TABLE)
        case list():
            return node.kind is Kind.SECTION_LIST or get_origin(node.annotation) is list
        case bool() | int() | float():
            return node.kind is Kind.LEAF and node.annotation is not str and get_origin(node.annotation) is not list
        case _:
            return True


def _or(names: Iterable[str]) -> str:
    """Return names as text: "`a` or `b`"."""
    return " or ".join(f"`{name}`" for name in names)


def shown(path: Path, value: Any) -> str | None:
    """Return the value of the key at `path` as JSON-like text of at most 80 characters.

    None if it looks like a secret.
    """
    if _is_secret(path, value):
        return None
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _is_secret(path: Path, value: Any) -> bool:
    """Return whether the name of the key at `path`, or the form of a text in the value, says that it is a secret."""
    match value:
        case dict():
            return any(_is_secret((*path, key), item) for key, item in value.items())
        case list():
            return any(_is_secret(path, item) for item in value)
        case str() if _SECRET_VALUE.match(value):
            return True
        case _:
            last = next((part for part in reversed(path) if isinstance(part, str)), "")
            return isinstance(value, str) and bool(_SECRET_KEY.search(last.lower().replace("-", "_")))


# What a config was taken to mean where that is not what its words say here: printed once, by the command.


class Effect(Enum):
    """What became of a key."""

    MEANS = "means"
    """It has its effect, here or under another key."""
    SAME = "same"
    """It says what is so anyway."""
    NOTHING = "nothing"
    """There is nothing to choose here: the run is the same without it."""
    LATER = "later"
    """A feature that is not there yet; the run learns the same without it."""
    BLOCKS = "blocks"
    """A feature that is not there yet, and without which the run would learn something else: it is not started."""
    REFUSED = "refused"
    """An error; the text says what to write instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What became of one key that was written somewhere."""

    path: Path
    source: str
    effect: Effect
    text: str
    inner: tuple[str, ...] = ()
    """Keys below ``path`` that it speaks for."""

    @property
    def where(self) -> str:
        """Return the key, its place, and the keys below it that the note is about.

        An example is `slurm (rl.toml:12; job_name, partition)`.
        """
        return f"{dotted(self.path)} ({'; '.join((self.source, *filter(None, [', '.join(self.inner)])))})"

    def __str__(self) -> str:
        """Return the note as a line: `trainer.model.ac (rl.toml:12): …`."""
        return f"{self.where}: {self.text}" if self.text else self.where


# What the commonest keys of TRL's `GRPOConfig` and `SFTConfig` are called here, for messages about unknown keys.

TRL_RL: Mapping[str, tuple[tuple[str, ...], str]] = MappingProxyType({
    "model_name_or_path": (("model.name",), ""),
    "per_device_train_batch_size": (("orchestrator.batch_size",), "the rollouts of a whole step, of all devices"),
    "gradient_accumulation_steps": (
        ("orchestrator.batch_size",),
        "the rollouts of a whole step; the trainer cuts it by `trainer.micro_batch_tokens`",
    ),
    "num_generations": (("orchestrator.rollouts_per_example",), ""),
    "max_completion_length": (("orchestrator.sampling.max_tokens",), ""),
    "max_prompt_length": (("seq_len",), "prompt and reply together"),
    "beta": (("trainer.loss.kl.coef",), "left out: no KL term"),
    "epsilon": (("trainer.loss.clip_low", "trainer.loss.clip_high"), "with `trainer.loss.type` = ppo"),
    "epsilon_high": (("trainer.loss.clip_high",), "with `trainer.loss.type` = ppo"),
    "learning_rate": (("trainer.optim.lr",), ""),
    "weight_decay": (("trainer.optim.weight_decay",), ""),
    "max_grad_norm": (("trainer.optim.max_norm",), ""),
    "lr_scheduler_type": (("trainer.scheduler.type",), ""),
    "warmup_ratio": (("trainer.scheduler.warmup_steps",), "in steps"),
    "warmup_steps": (("trainer.scheduler.warmup_steps",), ""),
    "num_train_epochs": (("max_steps",), "in steps: a run has no epochs"),
    "save_steps": (("ckpt.interval",), ""),
    "save_total_limit": (("ckpt.keep_last",), ""),
    "logging_steps": (("log.level",), "every step is logged and kept"),
    "loss_type": (("trainer.loss.type",), ""),
    "report_to": (("wandb.project",), "W&B; other tools read `millrace run export`"),
    "run_name": (("run.name",), ""),
})  # fmt: skip
"""By the name there: the keys here, and what they mean otherwise."""
_TRL_SFT: Mapping[str, tuple[tuple[str, ...], str]] = MappingProxyType({
    "per_device_train_batch_size": (("data.batch_size",), "the samples of a whole step, of all devices"),
    "gradient_accumulation_steps": (("data.batch_size",), "the samples of a whole step"),
    "max_length": (("data.seq_len",), ""),
    "max_seq_length": (("data.seq_len",), ""),
    "packing": (("data.pack_function",), "cat packs, stack does not"),
    "dataset_name": (("data.name",), ""),
    "num_train_epochs": (("max_steps",), "in steps; one pass over the data if left out"),
})  # fmt: skip
TRL_SFT = MappingProxyType({
    **{name: (tuple(key.removeprefix("trainer.") for key in keys), text) for name, (keys, text) in TRL_RL.items()},
    **_TRL_SFT,
})  # fmt: skip


def is_trl(names: Mapping[str, object]) -> bool:
    """Return whether the keys at the top of a file are TRL's, which has no tables: at least two have names of TRL."""
    return len(names.keys() & (TRL_RL.keys() | _TRL_SFT.keys())) > 1


def trl_meaning(name: str, schema: SchemaKey, *, below: Path = ()) -> str | None:
    """Return the message about an unknown key whose name is TRL's, with the key that it is here; None for other names.

    `schema` is the root of the document. `below` is the section that has the key: if not empty, only its keys are
    named.
    """
    there = {dotted(key.path) for key in schema.walk()}
    table = TRL_RL if "orchestrator.batch_size" in there else TRL_SFT
    keys, text = table.get(name, ((), ""))
    known = [key for key in keys if key in there and (not below or key.rpartition(".")[0] == dotted(below))]
    if not known:
        return None
    ours, more = " and ".join(f"`{key}`" for key in known), f" ({text})" if text else ""
    return f"unknown key; did you mean {ours}{more}? That is what TRL's `{name}` is here"
