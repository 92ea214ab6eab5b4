"""Check that a command line names a config file or a model, and convert the config files of one service or of another
trainer. Without a file or a model, the defaults would download a model.
"""

import contextlib
import json
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from millrace.cli.errors import CliError
from millrace.config.argv import RESERVED_FLAGS
from millrace.config.files import UnreadableFileError, near_file
from millrace.config.load import ConfigT, Loaded, load, validate_document
from millrace.config.messages import Effect, Note, close
from millrace.config.prime_rl.translation import WHOLE, kind_of, merged, toml
from millrace.config.section import Document
from millrace.config.sections.eval import EvalRunConfig
from millrace.config.sections.inference import ReplicaConfig
from millrace.config.sections.rl import OrchestratorPart, RLConfig, TrainerPart
from millrace.config.sections.sft import SFTConfig
from millrace.config.tree import dotted, schema_tree
from millrace.config.trl import ENVIRONMENT, Arguments, read_arguments, translate
from millrace.errors import InvalidSpecError, Violation

_IMPORTED = (".toml", ".json", ".yaml", ".yml", ".py")
_OF_RUNS = ("name", "server", "follow", "resume", "plain")


def missing_file(example: str) -> CliError:
    """Return the error of a command without a config file; `example` is a command line that works."""
    return CliError(f"name a config file: {example}")


@contextlib.contextmanager
def explained(arguments: Sequence[str], *, command: str, example: str) -> Iterator[None]:
    """Add a remedy to the config errors of the block: to name a file, or the command that the file is for.

    `command` is the one that runs, such as "rl"; `example` is a command line that works.
    """
    try:
        yield
    except InvalidSpecError as error:
        if not arguments:
            raise missing_file(example) from error
        if error.remedy is None:
            error.remedy = _meant(arguments, error.violations, command=command, example=example)
        raise


def _meant(arguments: Sequence[str], violations: Sequence[Violation], *, command: str, example: str) -> str | None:
    """Return a remedy if the command line has no file, or if unknown keys show that a file belongs to another command.

    None otherwise. `command` is the one that runs; `example` is a command line that works.
    """
    files = _files(arguments)
    unknown = {wrong.field for wrong in violations if wrong.message.startswith("unknown key")}
    for name in files:
        tree = read_raw(name) or {}
        if not unknown & tree.keys():
            continue  # what is wrong with it is a value, or another file
        kind = kind_of(tree, "")
        if kind in WHOLE and kind != command:
            return f"{name} looks like a config of `millrace {kind}`: millrace {kind} @ {name}"
        if kind in PARTS and command == "rl" and f"--{kind}" not in arguments:
            return f"{name} looks like the {kind}'s part of a config: millrace rl --{kind} @ {name} …"
    return None if files else f"name a config file: {example}"


def _files(arguments: Sequence[str]) -> list[str]:
    """Return the names of the files in a command line: those after `@`."""
    pairs = zip(arguments, [*arguments[1:], ""], strict=True)
    return [name for word, after in pairs if word.startswith("@") and (name := word[1:] or after)]


def refuse_check(loaded: Loaded[ConfigT]) -> None:
    """Raise CliError if `--check-environments` is given to a command that does not support it."""
    if loaded.flags.get("check-environments"):
        hint = "leave it out, or try an environment alone: millrace env check ID"
        raise CliError("--check-environments is for `millrace rl` and `millrace run submit`", hint=hint)


def refuse_flags_of_runs(loaded: Loaded[ConfigT], *, command: str) -> None:
    """Raise CliError if a service is given a flag that only a run can have."""
    refuse_check(loaded)
    for name in _OF_RUNS:
        if name in loaded.flags:
            hint = (
                f"leave it out, or give it to `millrace rl` or `millrace run submit`: millrace {command} waits for runs"
            )
            raise CliError(f"millrace {command} has no --{name}: it belongs to a run", hint=hint)


def require_file_or_model(loaded: Loaded[ConfigT], *, example: str) -> None:
    """Raise CliError if there is no config file and nothing sets the model.

    The default model would be downloaded from the Hub.
    """
    if not loaded.files and not any(path.endswith("model.name") for path in loaded.sources):
        raise missing_file(example)


# A config that holds one service's section, with or without the section's name above its keys.


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A config section of one service, and the config class with that section."""

    section: str
    document: type[Document]

    def named(self, arguments: Sequence[str], *, reserved: Mapping[str, bool]) -> list[str]:
        """Return the arguments with the section's name before each of its keys.

        Files and flags of one service may leave the name out. `reserved` are the flags of the command itself.
        """
        words: list[str] = []
        rest = list(arguments)
        while rest:
            word = rest.pop(0)
            if word.startswith("@"):
                name = word[1:] or (rest.pop(0) if rest else "")
                words += [*([] if self._has_name(name) else [f"--{self.section}"]), "@", *([name] if name else [])]
            elif word.startswith("--") and len(word) > 2:
                words.append(self._prefixed(word[2:], reserved))
            else:
                words.append(word)
        return words

    def _prefixed(self, flag: str, reserved: Mapping[str, bool]) -> str:
        """Return a flag with the section's name before the key: `--inference.parallel.tp=2` for `parallel.tp=2`,
        `--no-inference.…` for `no-…`.
        """
        # The negation stays in front of the section's name.
        off = flag[:3] if flag.startswith(("no-", "no_")) else ""
        name, equals, value = flag.removeprefix(off).partition("=")
        first = name.partition(".")[0].replace("-", "_")
        root = schema_tree(self.document)
        own = root.child(self.section)
        is_known = own is not None and own.child(first) is not None
        is_whole = root.child(first) is not None and not is_known
        if is_whole or name.replace("_", "-") in reserved:
            return f"--{off}{name}{equals}{value}"
        inner = "" if is_known or self.section != "inference" or not _is_vllm_flag(name, own, reserved) else "vllm."
        return f"--{off}{self.section}.{inner}{name}{equals}{value}"

    def _has_name(self, name: str) -> bool:
        """Return whether a file needs no section name in front: it has the section already, or only has keys of other
        sections. True for an unreadable file; the loader reports the error.
        """
        tree = read_raw(name)
        own = schema_tree(self.document).child(self.section)
        if tree is None or own is None or self.section in tree:
            return True
        return bool(tree) and all(schema_tree(self.document).child(key) and not own.child(key) for key in tree)


PARTS: Mapping[str, Part] = {
    "orchestrator": Part(section="orchestrator", document=OrchestratorPart),
    "trainer": Part(section="trainer", document=TrainerPart),
    "inference": Part(section="inference", document=ReplicaConfig),
}


def read_raw(name: str) -> dict[str, Any] | None:
    """Return the contents of a TOML or JSON file. None if it is not readable; the loader reports the error."""
    try:
        text = Path(name).read_text()
        tree = json.loads(text) if name.endswith(".json") else tomllib.loads(text)
    except (OSError, ValueError):
        return None
    return tree if isinstance(tree, dict) else None


def _is_vllm_flag(name: str, own: Any, reserved: Mapping[str, bool]) -> bool:
    """Return whether the unknown flag `name` is meant for `vllm serve`: it is similar to none of Millrace's own.

    `own` is the section of the engine in the schema; `reserved` are the flags of the command itself.
    """
    from millrace.config.prime_rl.keys import RL_KEYS

    spelled = name.replace("-", "_")
    ours = [*own.children, *(flag.replace("-", "_") for flag in reserved)]
    known = RL_KEYS.get(f"inference.{spelled}")
    is_ours = bool(close(spelled, ours, most=1)) if known is None else not known.to.startswith("inference.vllm.")
    return "." not in name and not is_ours


# `millrace config import`: load files as prime-rl's, and write what they mean in our schema.

NO_LOSS = (
    "is not named: `default` is taken (DPPO), prime-rl's default until August 2026. Since October 2026 that is ipo: "
    'write `[trainer.loss]` with `type = "ipo"`, `ipo_threshold = 0.3`, `kl_tau = 0.0` and '
    "`max_importance_ratio = 1e4` for that"
)
_WHOLE = {"rl": RLConfig, "sft": SFTConfig, "eval": EvalRunConfig}


def import_config(files: Sequence[str], *, kind: str | None, out: Path | None) -> tuple[str, Sequence[Note], str]:
    """Translate files of prime-rl or TRL.

    `kind` is what the files are, None to find out; `out` is where the result will be written. Return the text in
    Millrace's schema, notes about the keys, and the command for it. Raises InvalidSpecError if the files are invalid.
    """
    _require_files(files)
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


def _require_files(names: Sequence[str]) -> None:
    """Raise InvalidSpecError with each file that does not exist, and the name that may be meant."""
    missing = [
        Violation(
            field=name,
            message=f"no such file in {Path.cwd()}; "
            + (
                f"did you mean {Path(name).parent / near}?"
                if (near := near_file(Path(name), _IMPORTED))
                else "check the path"
            ),
        )
        for name in names
        if not Path(name).exists()
    ]
    if missing:
        raise InvalidSpecError(missing)


def _unnamed_loss(tree: dict[str, Any], files: Sequence[str], parts: Sequence[str]) -> list[Note]:
    """Return a note about the loss if files of a training do not set one.

    The default of prime-rl has changed between releases. `parts` are the documents that the files are.
    """
    trainer = tree.get("trainer", tree)
    if not {"rl", "trainer"} & set(parts) or "preset" in tree or "type" in trainer.get("loss", {}):
        return []
    return [Note(path=("trainer", "loss", "type"), source=Path(files[-1]).name, effect=Effect.MEANS, text=NO_LOSS)]


def _read_trl(files: Sequence[str]) -> Arguments | None:
    """Return TRL's arguments from the only file; None if it is not a file of TRL.

    Raises CliError for several files of which one is TRL's, and for a YAML or Python file without TRL's arguments,
    InvalidSpecError if a file cannot be read.
    """
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
    """Translate the arguments of TRL's GRPO or SFT trainer, which are of the file `name`.

    `kind` is `rl` or `sft`, None to take what the arguments show; `out` is where the result will be written. Return the
    text in Millrace's schema, notes about the keys, and the command for it. Raises CliError if nothing tells the
    trainer, InvalidSpecError for what cannot be translated.
    """
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
    """Return the words of a command line that read the file as a document of this kind."""
    return PARTS[kind].named([f"@{name}"], reserved=RESERVED_FLAGS) if kind in PARTS else ["@", name]


def _kind(name: str) -> str:
    """Return which document the file is; `rl` if it is unreadable, which the loader reports.

    Raises CliError if nothing tells.
    """
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


# What a config was taken to mean where its words mean something else here: printed once, before anything starts.

_UNBUILT = (Effect.LATER, Effect.BLOCKS)


def print_notes(notes: Sequence[Note], *, stream: TextIO | None = None) -> None:
    """Print how keys were understood, to `stream` or standard error, as three lists.

    First come keys with another meaning here, then those that say what is the default anyway, then a warning for those
    without effect yet. Nothing is printed for an empty list.
    """
    out = stream or sys.stderr
    same = [note for note in notes if note.effect is Effect.SAME]
    taken = [note for note in notes if note.effect not in (*_UNBUILT, Effect.SAME)]
    unbuilt = [note for note in notes if note.effect in _UNBUILT]
    if taken:
        print(f"note: how {_keys(taken)} read:", file=out)
    for note in taken:
        print(f"  - {note}", file=out)
    if same:
        print(f"note: as it is here anyway: {', '.join(note.where for note in same)}", file=out)
    if unbuilt:
        print(f"warning: {_keys(unbuilt)} without effect yet:", file=out)
    for note in unbuilt:
        print(f"  - {note}", file=out)


def refuse_blocked(notes: Sequence[Note]) -> None:
    """Raise CliError if the config uses a feature that is not available and that would change what the run learns."""
    blocked = [note for note in notes if note.effect is Effect.BLOCKS]
    if blocked:
        raise CliError(
            "this run would learn something else than its config asks for: " + "; ".join(map(str, blocked)),
            hint="take these keys out to run without them; --dry-run and `millrace config import` take them",
        )


def _keys(notes: Sequence[Note]) -> str:
    return "1 key is" if len(notes) == 1 else f"{len(notes)} keys are"
