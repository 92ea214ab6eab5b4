"""`docs/configuration.md`, made from the schema. this script prints it; a test compares."""

import json
import sys
from collections.abc import Mapping

from pydantic import BaseModel

from millrace.config.filling import shared_keys
from millrace.config.notes import Effect
from millrace.config.prime_rl.eval_keys import EVAL_KEYS
from millrace.config.prime_rl.meanings import Meaning
from millrace.config.prime_rl.rl_keys import RL_KEYS
from millrace.config.prime_rl.sft_keys import SFT_KEYS
from millrace.config.sections.eval import EvalRunConfig
from millrace.config.sections.rl import RLConfig
from millrace.config.sections.sft import SFTConfig
from millrace.config.tree import Kind, SchemaKey, dotted, schema_tree, type_text

_INTRODUCTION = """# Configuration

<!-- Made by `python scripts/configuration_reference.py > docs/configuration.md`; a test fails where the two differ. -->

A run is described by one config. Its keys are those of prime-rl; a key that does not exist is an error with a
suggestion, and everything that is wrong is reported at once, each with the key, the value, where it is written, and
what would be right.

## Sources

The later one wins:

1. the defaults below;
2. environment variables: `MILLRACE_CONFIG__trainer__optim__lr=1e-5`, or prime-rl's `PRIME_TRAINER__OPTIM__LR=1e-5`;
3. files: `millrace rl @ base.toml @ more.toml`, merged left to right. Tables are merged key by key, lists are replaced.
   TOML, or JSON where the name ends in `.json`. Names are relative to the working directory;
4. flags: `--trainer.optim.lr 1e-5` or `--trainer.optim.lr=1e-5`, in kebab or snake case.

Flags for tables and lists take JSON: `--orchestrator.env '[{"id": "reverse-text"}]'`. A table that is off by default is
switched on by its bare flag (`--ckpt`) or an empty table in a file, and off by `--no-ckpt` or `--ckpt None`. A boolean
is set by `--wandb.offline` and cleared by `--no-wandb.offline`. Where a source changes the `type` of a table (such as
`trainer.scheduler`), what earlier sources wrote into that table is dropped.

`--dry-run` prints the resolved config: every key below with its value, as JSON that loads as the same config.

## One file or one per service

The keys at the top of a combined file are shared: they fill the keys of the services that mean the same. Where
both are written, the shared key wins if it comes from a stronger source: flags over files over the environment, so
`--max-steps 3` shortens any run. A shared key is overruled in turn where all the keys that it fills come from a
stronger source. Different values in equally strong sources, and in one of several services' keys alone, are an error
that lists every place.

"""

_SPLIT = """
The split form puts each service's section into a file of its own, as in `examples/reverse_text_split`:
`millrace rl --trainer @ trainer.toml --orchestrator @ orchestrator.toml --inference @ inference.toml`. There the
shared keys are filled from the services' where those agree. Any section can be read so: `--trainer.optim @ optim.toml`.

## Other names

Where prime-rl has had two names for one key, both work; the resolved config has the first.

| Key | Other name |
|---|---|
"""

_PRIME_RL = """
## Files of prime-rl

Files, flags and `PRIME_*` variables of prime-rl are understood as they are, whether they are the split files of 2025,
the one file of early 2026, or the schemas of August and October 2026: `millrace rl @ their.toml` says once how each of
their keys was read, and no key is passed over. Tried on 118 public files of September 2025 to October 2026, 107 of
which import; the others are refused for what would train something else, or not at all. `millrace config import FILE…`
writes the same as a file of Millrace. A key without effect yet is accepted with a warning; where a run would learn
something else without it (`blocks`), `--dry-run` and the import take it, and the run is not started. A document that is
sent to a server is in Millrace's own schema: there such keys are errors.

"""

_DIFFERENCES = """
## What differs from prime-rl

* `orchestrator.rollouts_per_example` has prime-rl's default of 1, but grpo with 1 is an error: every advantage would be
  0 and the run would train nothing.
* `trainer.scheduler`: a constant schedule may have `warmup_steps` (prime-rl ignores it), and `decay_steps = 1` works.
* `inference.server.port` is any free port by default, not 8000: engines are found by registration.
* `inference.*` is about the stack that `millrace rl` starts; a stack that runs already keeps its own settings.
* `inference.engine`, `inference.max_num_seqs`, `orchestrator.rollout_timeout_s`, `trainer.determinism`,
  `trainer.micro_batch_tokens`, `trainer.model.dtype`, `trainer.model.publish_dtype` and `trainer.pack` are additions.
* Addresses and credentials of services, Redis and the object store are not part of a run: they are `MILLRACE_*`
  variables of the processes.
"""


def render() -> str:
    """The whole page."""
    rl, sft = schema_tree(RLConfig), schema_tree(SFTConfig)
    parts = [_INTRODUCTION, _shared_rows(), _SPLIT, _alias_rows(rl), _PRIME_RL]
    parts += [_prime_rl_rows("`millrace rl`", RL_KEYS, rl), _prime_rl_rows("`millrace sft`", SFT_KEYS, sft)]
    parts += [_prime_rl_rows("`millrace eval`", EVAL_KEYS, schema_tree(EvalRunConfig))]
    parts += [_DIFFERENCES]
    parts += [_config("RL: `millrace rl`", RLConfig, rl), _config("SFT: `millrace sft`", SFTConfig, sft)]
    parts += [_config("Evaluation: `millrace eval`", EvalRunConfig, schema_tree(EvalRunConfig))]
    return "".join(parts)


def _shared_rows() -> str:
    rows = "| Shared key | Fills |\n|---|---|\n"
    for shared in shared_keys(RLConfig):
        rows += f"| `{dotted(shared.top)}` | {', '.join(f'`{dotted(path)}`' for path in shared.targets)} |\n"
    return rows


def _alias_rows(root: SchemaKey) -> str:
    rows = [f"| `{dotted(node.path)}` | `{alias}` |\n" for node in root.walk() for alias in node.aliases]
    return "".join(rows)


def _prime_rl_rows(command: str, keys: Mapping[str, Meaning], schema: SchemaKey) -> str:
    """What becomes of each key; those that have their effect under another name come first."""
    rows = "".join(
        f"| `{key}` | {meaning.effect.value} | {meaning.text.replace('|', chr(92) + '|')} |\n"
        for effect in Effect
        for key, meaning in keys.items()
        if meaning.effect is effect and (meaning.is_native or not schema.find(tuple(key.replace("[]", "").split("."))))
    )
    return f"Keys for {command}:\n\n| Key of prime-rl | Effect | Here |\n|---|---|---|\n{rows}\n"


def _config(title: str, model: type[BaseModel], root: SchemaKey) -> str:
    """All sections of one command."""
    sections = [root, *(node for node in root.walk() if node.kind in (Kind.SECTION, Kind.SECTION_LIST))]
    text = f"\n## {title}\n"
    for section in sections:
        text += _section(section, model)
    return text


def _section(section: SchemaKey, model: type[BaseModel]) -> str:
    """One section: its heading, what it is for, and a row for each key that is no section itself."""
    heading = f"`{_header(section)}`" if section.path else "top"
    about = " ".join((_class_doc(section) if section.path else (model.__doc__ or "")).split()).replace("``", "`")
    text = f"\n### {heading}\n\n{about}{_presence(section)}\n"
    rows = [node for node in section.children.values() if node.kind in (Kind.LEAF, Kind.FREE_TABLE)]
    if rows:
        text += "\n| Key | Type | Default | Meaning |\n|---|---|---|---|\n"
    for node in rows:
        text += f"| `{node.name}` | {type_text(node)} | {_default(node)} | {node.about()} |\n"
    return text


def _class_doc(section: SchemaKey) -> str:
    """The docstring of a section's class, or of the class in its list."""
    annotation = section.annotation
    inner = annotation.__args__[0] if section.kind is Kind.SECTION_LIST else annotation
    return (inner.__doc__ or "").strip()


def _presence(section: SchemaKey) -> str:
    if not section.path:
        return ""
    if section.is_required and section.kind is Kind.SECTION_LIST:
        return " At least one is required."
    if section.facts.default_text:
        return f" Default: {section.facts.default_text}."
    return " Off unless it is written." if section.is_optional else ""


def _header(node: SchemaKey) -> str:
    return f"[[{dotted(node.path)}]]" if node.kind is Kind.SECTION_LIST else f"[{dotted(node.path)}]"


def _default(node: SchemaKey) -> str:
    if node.facts.default_text:
        return node.facts.default_text
    if node.is_required:
        return "required"
    if node.kind is Kind.FREE_TABLE:
        return "empty"
    return "none" if node.default is None else f"`{json.dumps(node.default)}`"


if __name__ == "__main__":
    sys.stdout.write(render())
