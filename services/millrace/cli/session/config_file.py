"""Whether a command line says what to train: without a file and without a model, the defaults would fetch one."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from millrace.cli.errors import CliError
from millrace.cli.session.part import PARTS, read_raw
from millrace.config.check import ConfigT
from millrace.config.load import Loaded
from millrace.config.prime_rl.importing import DOCUMENT_KEYS, WHOLE, kind_of
from millrace.config.schema import EvalRunConfig, RLConfig, SFTConfig
from millrace.config.section import Document
from millrace.config.tree import schema_tree
from millrace.errors import InvalidSpecError

_DOCUMENTS: Mapping[str, type[Document]] = {"rl": RLConfig, "sft": SFTConfig, "eval": EvalRunConfig}


def missing_file(example: str) -> CliError:
    """The error of a command that needs a config file; `example` is the command line that would do."""
    return CliError(f"name a config file: {example}")


@contextlib.contextmanager
def explained(arguments: Sequence[str], *, command: str, example: str) -> Iterator[None]:
    """Say of a config that is wrong what was probably meant: a file at all, or the command that the file is for."""
    try:
        yield
    except InvalidSpecError as error:
        if not arguments:
            raise missing_file(example) from error
        if error.remedy is None:
            error.remedy = _meant(arguments, command, example)
        raise


def _meant(arguments: Sequence[str], command: str, example: str) -> str | None:
    """What to do without a file, or with one whose keys are those of something else."""
    files = _files(arguments)
    for name in files:
        tree = read_raw(name) or {}
        kind = kind_of(tree, name)
        if kind is None or not tree or tree.keys() <= _keys(command) or not tree.keys() <= _keys(kind):
            continue
        if kind in WHOLE:
            return f"{name} looks like a config of `millrace {kind}`: millrace {kind} @ {name}"
        if command == "rl" and f"--{kind}" not in arguments:
            return f"{name} looks like the {kind}'s part of a config: millrace rl --{kind} @ {name} …"
    return None if files else f"name a config file: {example}"


def _keys(kind: str) -> set[str]:
    """The keys at the top of a document or part, in our schema and in prime-rl's."""
    section = schema_tree(PARTS[kind].document).child(kind) if kind in PARTS else schema_tree(_DOCUMENTS[kind])
    own = section.children.values() if section else ()
    return {name for key in own for name in (key.name, *key.aliases)} | DOCUMENT_KEYS[kind]


def _files(arguments: Sequence[str]) -> list[str]:
    pairs = zip(arguments, [*arguments[1:], ""], strict=True)
    return [name for word, after in pairs if word.startswith("@") and (name := word[1:] or after)]


def refuse_check(loaded: Loaded[ConfigT]) -> None:
    """CliError where `--check-environments` would have no effect."""
    if loaded.flags.get("check-environments"):
        hint = "leave it out, or try an environment alone: millrace env check ID"
        raise CliError("--check-environments is for `millrace rl` and `millrace run submit`", hint=hint)


def require_file_or_model(loaded: Loaded[ConfigT], *, example: str) -> None:
    """CliError where neither a file nor any source names anything: the model would be the default one of the Hub."""
    if not loaded.files and not any(path.endswith("model.name") for path in loaded.sources):
        raise missing_file(example)
