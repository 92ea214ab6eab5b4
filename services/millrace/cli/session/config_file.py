"""Whether a command line says what to train: without a file and without a model, the defaults would fetch one."""

from millrace.cli.errors import CliError
from millrace.config.check import ConfigT
from millrace.config.load import Loaded


def missing_file(example: str) -> CliError:
    """The error of a command that needs a config file; `example` is the command line that would do."""
    return CliError(f"name a config file: {example}")


def refuse_check(loaded: Loaded[ConfigT]) -> None:
    """CliError where `--check-environments` would have no effect."""
    if loaded.flags.get("check-environments"):
        hint = "leave it out, or try an environment alone: millrace env check ID"
        raise CliError("--check-environments is for `millrace rl` and `millrace run submit`", hint=hint)


def require_file_or_model(loaded: Loaded[ConfigT], *, example: str) -> None:
    """CliError where neither a file nor any source names anything: the model would be the default one of the Hub."""
    if not loaded.files and not any(path.endswith("model.name") for path in loaded.sources):
        raise missing_file(example)
