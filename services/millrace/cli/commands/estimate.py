"""`millrace estimate`: what a run takes of memory and time, before anything is paid for it."""

import importlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from millrace.cli.errors import CliError
from millrace.cli.options import RawCommand

if TYPE_CHECKING:
    from millrace.config import RLConfig, SFTConfig
    from millrace.config.load import Loaded
    from millrace.trainer.estimate_report import Estimate

_INSTALL = "pip install 'millrace[trainer]'"
_HELP = """\b
Options:
  --KEY VALUE     Any key of the config, such as --trainer.micro_batch_tokens 4096.
  --gpus N        GPUs that the trainer has, 1 if left out; 0 is one process on a CPU.
  --gpu-memory N  GiB of each, 80 if left out (of the CPU's process with --gpus 0).
  --reserve N     GiB of them that are left for the runtime's own (contexts, libraries, fragments), 4 if left out.
  --mfu N         The utilization that tokens/s are given for, from 0 to 1; 0.4 if left out.
  --gpu-tflops N  Dense TFLOP/s of one GPU; trainer.peak_tflops if left out, or 989, an H100's in bfloat16.
  --format json   The same as data.
  --debug         Show tracebacks."""

_FLAGS = {
    "gpus": True,
    "gpu-memory": True,
    "reserve": True,
    "mfu": True,
    "gpu-tflops": True,
    "format": True,
    "debug": False,
    "help": False,
}
_H100_TFLOPS = 989.0


@click.command(cls=RawCommand, epilog=_HELP)
def estimate(arguments: tuple[str, ...]) -> int:
    """Print whether a run fits its GPUs, and tokens/s. Lists a step's memory, and which key reduces it.

    Takes a config of `millrace rl` or `millrace sft`. Of the model only its config.json is read, and no device is
    used. Exits 0 if the run fits, else 1.
    """
    from millrace.cli.session.config_file import explained, require_file_or_model
    from millrace.config import SFTConfig
    from millrace.config.load import load

    example = "millrace estimate @ examples/reverse_text/rl.toml --gpus 8 --gpu-memory 80"
    document = _document(arguments)
    with explained(arguments, command="sft" if document is SFTConfig else "rl", example=example):
        loaded = load(document, arguments, reserved=_FLAGS)
    require_file_or_model(loaded, example=example)
    found = _estimate(loaded)
    is_json = _choice(loaded.flags, "format", ("text", "json")) == "json"
    click.echo(json.dumps(found.to_json(), indent=2) if is_json else "\n".join(found.lines()))
    return 0 if found.fits else 1


def _document(arguments: Sequence[str]) -> "type[RLConfig | SFTConfig]":
    """Return the config class that the command line is for: SFTConfig (`millrace sft`) or RLConfig (`millrace rl`).

    The first file (`@ FILE`) whose keys show the command decides; RLConfig if no file does.
    """
    from millrace.cli.session.config_file import read_raw
    from millrace.config import RLConfig, SFTConfig
    from millrace.config.prime_rl.translation import kind_of

    pairs = zip(arguments, [*arguments[1:], ""], strict=True)
    for name in (word[1:] or after for word, after in pairs if word.startswith("@")):
        kind = kind_of(read_raw(name) or {}, name)
        if kind is not None:
            return SFTConfig if kind == "sft" else RLConfig
    return RLConfig


def _estimate(loaded: "Loaded[Any]") -> "Estimate":
    """Return the estimate for a loaded config, with GPUs, memory and speed from the command's flags.

    Sets CUDA_VISIBLE_DEVICES to an empty text before torch is imported, so that torch uses no GPU.
    """
    from millrace.config import SFTConfig

    flags, config = loaded.flags, loaded.config
    is_sft = isinstance(config, SFTConfig)
    gpus, memory = _number(flags, "gpus", 1, whole=True), _number(flags, "gpu-memory", 80)
    numbers: dict[str, Any] = {
        "num_gpus": int(gpus),
        "gpu_memory": memory,
        "reserve": _number(flags, "reserve", 4, most=memory),
        "mfu": _number(flags, "mfu", 0.4, most=1),
    }
    peak = config.peak_tflops if is_sft else config.trainer.peak_tflops
    default = peak or (_H100_TFLOPS if gpus else 0)
    numbers["tflops"] = _number(flags, "gpu-tflops", default) or None
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # torch shall not look for what is not used
    code = _code()
    say: Callable[[], None] = lambda: click.echo("taking a step of no tensors …", err=True)  # noqa: E731
    return code.estimate(config if is_sft else config.trainer, **numbers, on_trial=say)


def _code() -> Any:
    """Return the module `millrace.trainer.estimate`.

    It is imported by name, because the command line has to work without torch. Raises CliError if a package is missing.
    """
    try:
        return importlib.import_module("millrace.trainer.estimate")
    except ModuleNotFoundError as error:
        raise CliError(f"estimate computes with {error.name}, which is not installed here", hint=_INSTALL) from error


def _number(
    flags: Mapping[str, str | bool], name: str, default: float, *, whole: bool = False, most: float = float("inf")
) -> float:
    """Return the value of the flag `name` as a number; `default` if the flag is not given.

    Raises InvalidSpecError if it is not a number from 0 to `most`, or with `whole` not a whole number.
    """
    text = str(flags.get(name, default))
    try:
        value = float(int(text)) if whole else float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= most:
        bound = "" if most == float("inf") else f" to {most:g}"
        raise _bad(name, text, f"must be a {'whole ' if whole else ''}number from 0{bound or ' on'}")
    return value


def _choice(flags: Mapping[str, str | bool], name: str, choices: Sequence[str]) -> str:
    """Return the value of the flag `name`, or the first of `choices` if the flag is not given.

    Raises InvalidSpecError if the value is none of `choices`.
    """
    value = str(flags.get(name, choices[0]))
    if value not in choices:
        raise _bad(name, value, f"must be one of {', '.join(choices)}")
    return value


def _bad(name: str, value: str, message: str) -> Exception:
    """Return the error of a flag with a wrong value."""
    from millrace.errors import InvalidSpecError, Violation

    return InvalidSpecError([Violation(field=f"--{name}", value=value, message=message, source="command line")])
