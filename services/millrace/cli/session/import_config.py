"""`millrace config import`: load files as prime-rl's, and write what they mean in our schema."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from millrace.cli.errors import CliError
from millrace.cli.session.part import PARTS, read_raw
from millrace.config.argv import RESERVED_FLAGS
from millrace.config.files import UnreadableFileError
from millrace.config.load import Loaded, load, validate_document
from millrace.config.notes import Effect, Note
from millrace.config.prime_rl.importing import kind_of, merged, toml
from millrace.config.sections.eval import EvalRunConfig
from millrace.config.sections.rl import RLConfig
from millrace.config.sections.sft import SFTConfig
from millrace.config.tree import dotted
from millrace.config.trl.reading import Arguments, read_arguments
from millrace.config.trl.translate import ENVIRONMENT, translate
from millrace.errors import InvalidSpecError

NO_LOSS = (
    "is not named: `default` is taken (DPPO), prime-rl's default until August 2026. Since October 2026 that is ipo: "
    'write `[trainer.loss]` with `type = "ipo"`, `ipo_threshold = 0.3`, `kl_tau = 0.0` and '
    "`max_importance_ratio = 1e4` for that"
)
_WHOLE = {"rl": RLConfig, "sft": SFTConfig, "eval": EvalRunConfig}


def import_config(files: Sequence[str], *, kind: str | None, out: Path | None) -> tuple[str, Sequence[Note], str]:
    """The text in our schema, what became of the keys, and the command for it; InvalidSpecError if it is wrong."""
    if (of_trl := _read_trl(files)) is not None:
        return _import_trl(of_trl, files[0], kind=kind, out=out)
    kinds = [kind or _kind(name) for name in files]
    parts = list(dict.fromkeys(kinds))
    if len(parts) > 1 and any(part in ("sft", "eval") for part in parts):
        raise CliError(f"these files are of several kinds: {', '.join(parts)}", hint="import them one after the other")
    if len(parts) == 1 and parts[0] in PARTS:
        part = PARTS[parts[0]]
        words = part.named([f"@{name}" for name in files], reserved=RESERVED_FLAGS)
        loaded: Loaded[Any] = load(part.document, words, {}, section=part.section)
        command = parts[0]
    else:
        command = parts[0] if len(parts) == 1 else "rl"
        words = [word for name, each in zip(files, kinds, strict=True) for word in _words(name, each)]
        loaded = load(_WHOLE[command], words, {})
    tree = merged([layer.tree for layer in loaded.layers])
    text = toml(tree)
    notes = [*loaded.notes, *_unnamed_loss(tree, files, parts)]
    unbuilt = [note for note in notes if note.effect in (Effect.LATER, Effect.BLOCKS)]
    head = [f"# {', '.join(Path(name).name for name in files)}, in Millrace's schema", *_comments(unbuilt)]
    how = f"millrace {command} @ {out or 'FILE'}"
    return "\n".join([*head, "", text]), notes, how


def _unnamed_loss(tree: dict[str, Any], files: Sequence[str], parts: Sequence[str]) -> list[Note]:
    """Say which loss is taken where files of training name none: prime-rl's default is another one in each release."""
    trainer = tree.get("trainer", tree)
    if not {"rl", "trainer"} & set(parts) or "preset" in tree or "type" in trainer.get("loss", {}):
        return []
    return [Note(path=("trainer", "loss", "type"), source=Path(files[-1]).name, effect=Effect.MEANS, text=NO_LOSS)]


def _read_trl(files: Sequence[str]) -> Arguments | None:
    """Read the arguments of TRL in the only file; None if it is another's."""
    try:
        found = [read_arguments(name) for name in files]
    except UnreadableFileError as error:
        raise InvalidSpecError([error.violation]) from error
    if len(found) > 1 and any(found):
        raise CliError("a config of TRL is one file", hint="import them one after the other")
    if found[0] is None and Path(files[0]).suffix in (".py", ".yaml", ".yml"):
        raise CliError(
            f"{files[0]}: no arguments of TRL are in it",
            hint="a YAML file has names such as num_generations at its top, a script calls GRPOConfig or SFTConfig",
        )
    return found[0]


def _import_trl(
    arguments: Arguments, name: str, *, kind: str | None, out: Path | None
) -> tuple[str, Sequence[Note], str]:
    """Translate a config of TRL's GRPO or SFT trainer."""
    command = kind or arguments.kind
    if command not in ("rl", "sft"):
        raise CliError(f"{name}: nothing in it tells which trainer of TRL it is for", hint="say it: --as rl, or sft")
    found = translate(arguments, command, source=name)
    if found.violations:
        raise InvalidSpecError(found.violations, remedy="change the file as it says, and import it again")
    validate_document(found.tree, _WHOLE[command], source=name)
    head = [f"# {Path(name).name} of TRL, in Millrace's schema"]
    if command == "rl":
        head.append(f"# {ENVIRONMENT}: an environment with its data set and reward functions (docs/guides/reward.md)")
    return "\n".join([*head, "", toml(found.tree)]), found.notes, f"millrace {command} @ {out or 'FILE'}"


def _words(name: str, kind: str) -> list[str]:
    return PARTS[kind].named([f"@{name}"], reserved=RESERVED_FLAGS) if kind in PARTS else ["@", name]


def _kind(name: str) -> str:
    tree = read_raw(name)
    found = "rl" if tree is None else kind_of(tree, name)  # what cannot be read is the loader's to report
    if found is None:
        raise CliError(
            f"{name}: nothing in it tells what it configures",
            hint="say it: --as rl, sft, eval, trainer, orchestrator or inference",
        )
    return found


def _comments(notes: Sequence[Note]) -> list[str]:
    return [f"# without effect yet: {dotted(note.path)}: {note.text}" for note in notes]
