"""`docs/prime_rl_keys.md`, made from the tables of the import. This script prints it; a test compares."""

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from configuration_reference import wrapped

from millrace.config.messages import Effect
from millrace.config.prime_rl.keys import EVAL_KEYS, RL_KEYS, SFT_KEYS
from millrace.config.prime_rl.meanings import Meaning
from millrace.config.sections.eval import EvalRunConfig
from millrace.config.sections.rl import RLConfig
from millrace.config.sections.sft import SFTConfig
from millrace.config.tree import SchemaKey, dotted, schema_tree

_INTRODUCTION = """# Keys of prime-rl

<!-- Made by `python scripts/prime_rl_reference.py > docs/prime_rl_keys.md`; a test fails where the two differ. -->

Millrace reads prime-rl's files, flags and `PRIME_*` variables unchanged: the split files of 2025, the single file of
early 2026, and the schemas of August and October 2026 ([guide](guides/bring_your_prime_rl_config.md)). Of 119 public
files, 107 import. Only what is sent to a server must have Millrace's own keys.

Below are the keys that Millrace's schema lacks, or reads differently. Those without an effect, unsupported ones and
errors are only listed: `millrace config import FILE` says why of each, and what to write instead. `table`: `a`, `b`
means `table.a` and `table.b`; `*.a` means `a` at the top and in `trainer`, `orchestrator` and `inference`; `…` is the
value.
"""

_RL = """
## `millrace rl`

A key of all environments (`orchestrator.algo`) means the same in a single one (`orchestrator.env[].algo`), and one of
`orchestrator.env[]` the same in `orchestrator.eval.env[]`, unless that has a line of its own.
"""

_SFT = """
## `millrace sft`

Keys of prime-rl's `trainer` are at the top here, those of `orchestrator.eval` in `eval`, and those of `trainer.args` in
`sft`. The rest:
"""

_EVAL = """
## `millrace eval`

Keys of `orchestrator.eval` are at the top here. The rest:
"""

_DIFFERENCES = """
## What differs

* `orchestrator.rollouts_per_example` has prime-rl's default of 1, but grpo with 1 is an error: every advantage would be
  0 and the run would train nothing.
* `trainer.scheduler`: a constant schedule may have `warmup_steps` (prime-rl ignores it), and `decay_steps = 1` works.
* `inference.server.port` is any free port by default, not 8000: engines are found by registration.
* A file that names no loss learns by `default`.

## Two names of one key

Both work; the resolved config has the first.

| Name | Other name | In |
|---|---|---|
"""

_EFFECTS = {
    Effect.MEANS: "Read",
    Effect.NOTHING: "Without effect, and without need",
    Effect.LATER: "Without effect so far: accepted with a warning; what is learned is the same",
    Effect.BLOCKS: "Unsupported, and would change what is learned: imported and shown, but the run does not start",
    Effect.REFUSED: "Errors",
}
_SERVICES = ("trainer", "orchestrator", "inference")
_REPEATED = {"sft": ("trainer.", "orchestrator."), "eval": ("orchestrator.", "orchestrator.eval.")}
"""Tables of an RL run whose keys another command has without that beginning."""


def render() -> str:
    """Return the whole page; keys of the other commands that mean what they mean in RL are not repeated."""
    rl = _asked(RL_KEYS, schema_tree(RLConfig))
    sft = _asked(SFT_KEYS, schema_tree(SFTConfig))
    evaluation = _asked(EVAL_KEYS, schema_tree(EvalRunConfig))
    return "".join(
        (
            _INTRODUCTION,
            _RL,
            *_lists({key: meaning for key, meaning in rl.items() if not _is_of_environment(key, meaning, rl)}),
            _SFT,
            *_lists(_new(sft, rl, _REPEATED["sft"])),
            _EVAL,
            *_lists(_new(evaluation, rl, _REPEATED["eval"])),
            _DIFFERENCES,
            *_aliases(),
        )
    )


def _aliases() -> Iterator[str]:
    """Yield a row for each pair of names."""
    places: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for node in schema_tree(RLConfig).walk():
        for alias in node.aliases:
            places[node.name, alias].append(f"`{dotted(node.path[:-1])}`" if node.path[1:] else "the top")
    for (name, alias), tables in places.items():
        yield f"| `{name}` | `{alias}` | {', '.join(tables)} |\n"


def _asked(keys: Mapping[str, Meaning], schema: SchemaKey) -> dict[str, Meaning]:
    """Return the keys whose meaning counts: those that the schema lacks, and those that it reads otherwise."""
    return {
        key: meaning
        for key, meaning in keys.items()
        if meaning.is_native or not schema.find(tuple(key.replace("[]", "").split(".")))
    }


def _new(keys: Mapping[str, Meaning], known: Mapping[str, Meaning], tables: Sequence[str]) -> dict[str, Meaning]:
    """Return the keys that `known` lacks, both under their own name and with the name of a table in front."""
    return {
        key: meaning
        for key, meaning in keys.items()
        if not any(
            _is_same(meaning, known.get(name), table)
            for table in ("", *tables)
            for name in (table + key, key.replace("sft.", "trainer.args."))
        )
    }


def _is_same(meaning: Meaning, other: Meaning | None, table: str) -> bool:
    """Return whether the other key has the same effect; one that is moved, to the same place within the table."""
    if other is None or meaning.effect is not other.effect:
        return False
    return meaning.text == other.text or (bool(meaning.to) and other.to == table + meaning.to)


def _is_of_environment(key: str, meaning: Meaning, keys: Mapping[str, Meaning]) -> bool:
    """Return whether a key of an environment means what it means of all environments, or of one that is trained on."""
    trained = key.replace("orchestrator.eval.env[]", "orchestrator.env[]")
    is_of_all = ".env[]." in key and _is_same(meaning, keys.get(key.replace(".env[]", "")), "")
    return is_of_all or (trained != key and _is_same(meaning, keys.get(trained), ""))


def _lists(keys: Mapping[str, Meaning]) -> Iterator[str]:
    """Yield a list for each effect."""
    return (_list(effect, keys) for effect in _EFFECTS)


def _list(effect: Effect, keys: Mapping[str, Meaning]) -> str:
    """Return the keys of one effect, an item for each meaning."""
    by_text: defaultdict[str, list[str]] = defaultdict(list)
    for key, meaning in keys.items():
        if meaning.effect is effect:
            by_text[_here(key, meaning)].append(key)
    if not by_text:
        return ""
    if effect is not Effect.MEANS:
        names = (name for names in by_text.values() for name in names)
        return f"\n{_EFFECTS[effect]}:\n\n{wrapped(_folded(list(names)) + '.', indent='')}"
    items = "".join(wrapped(f"* {_folded(names)} → {text}") for text, names in by_text.items())
    return f"\n{_EFFECTS[effect]}:\n\n{items}"


def _here(key: str, meaning: Meaning) -> str:
    """Return what a line says of the key: where it is, or the sentence of the import."""
    if meaning.text != f"is `{meaning.to}` here":
        return meaning.text
    table, _, name = meaning.to.rpartition(".")
    if name != key.rpartition(".")[2]:
        return f"`{meaning.to}`"
    return f"the same in `{table}`" if table else "the same at the top"


def _folded(names: Sequence[str]) -> str:
    """Return keys by their table; those that are at the top and in every service's table stand once, after a star."""
    shared = [name for name in names if all(f"{service}.{name}" in names for service in _SERVICES)]
    inner = {f"{service}.{name}" for service in _SERVICES for name in shared}
    tables: defaultdict[str, list[str]] = defaultdict(list)
    for key in (f"*.{name}" if name in shared else name for name in names if name not in inner):
        table, _, name = key.rpartition(".")
        tables[table].append(name)
    alike: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for table, inside in tables.items():
        alike[tuple(inside)].append(table)
    return "; ".join(
        f"{_quoted(names)}: {_quoted(inside)}"
        if names != [""] and len(inside) * len(names) > max(1, len(names))
        else ", ".join(_quoted(f"{table}.{name}" if table else name for name in inside) for table in names)
        for inside, names in alike.items()
    )


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    sys.stdout.write(render())
