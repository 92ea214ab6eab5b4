"""Whether a command line says what to train: without a file and without a model, the defaults would fetch one."""

import contextlib
from collections.abc import Iterator, Sequence

from millrace.cli.errors import CliError
from millrace.cli.session.part import PARTS, read_raw
from millrace.config.check import ConfigT
from millrace.config.load import Loaded
from millrace.config.prime_rl.importing import WHOLE, kind_of
from millrace.errors import InvalidSpecError, Violation

_OF_RUNS = ("name", "server", "follow", "resume", "plain")


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
            error.remedy = _meant(arguments, error.violations, command=command, example=example)
        raise


def _meant(arguments: Sequence[str], violations: Sequence[Violation], *, command: str, example: str) -> str | None:
    """What to do without a file, or with one that configures something else: whose keys at the top are not ours."""
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
    pairs = zip(arguments, [*arguments[1:], ""], strict=True)
    return [name for word, after in pairs if word.startswith("@") and (name := word[1:] or after)]


def refuse_check(loaded: Loaded[ConfigT]) -> None:
    """CliError where `--check-environments` would have no effect."""
    if loaded.flags.get("check-environments"):
        hint = "leave it out, or try an environment alone: millrace env check ID"
        raise CliError("--check-environments is for `millrace rl` and `millrace run submit`", hint=hint)


def refuse_flags_of_runs(loaded: Loaded[ConfigT], *, command: str) -> None:
    """CliError where a service is given what belongs to a run, and would have no effect."""
    refuse_check(loaded)
    for name in _OF_RUNS:
        if name in loaded.flags:
            hint = (
                f"leave it out, or give it to `millrace rl` or `millrace run submit`: millrace {command} waits for runs"
            )
            raise CliError(f"millrace {command} has no --{name}: it belongs to a run", hint=hint)


def require_file_or_model(loaded: Loaded[ConfigT], *, example: str) -> None:
    """CliError where neither a file nor any source names anything: the model would be the default one of the Hub."""
    if not loaded.files and not any(path.endswith("model.name") for path in loaded.sources):
        raise missing_file(example)
