"""Whether a model's name is a path, and whether the path holds a model: asked before anything starts."""

from collections.abc import Mapping
from pathlib import Path

from millrace.errors import InvalidSpecError, Violation
from millrace.models.adapter_files import why_no_model


def is_path(name: str, *, output_dir: str = "outputs") -> bool:
    """Whether a model name means a path on this machine rather than the id of a model hub (`Qwen/Qwen3-0.6B`).

    A path begins with `.`, `/` or `~`, lies under the output directory, has more than one slash (hub ids have at most
    one), or names something that exists.
    """
    first = name.partition("/")[0]
    return (
        name.startswith((".", "/", "~"))
        or first in ("outputs", Path(output_dir).name)
        or name.count("/") > 1
        or Path(name).exists()
    )


def check_models(names: Mapping[str, str], *, sources: Mapping[str, str], output_dir: str, sft_hint: bool) -> None:
    """InvalidSpecError for every name (by its key) that is a path without a model in it.

    `sft_hint` adds how to make a model with `millrace sft`.
    """
    violations = []
    for key, name in names.items():
        message = _problem(name, output_dir)
        if message and not any(violation.value == name for violation in violations):
            violations.append(Violation(field=key, value=name, message=message, source=sources.get(key)))
    if not violations:
        return
    make = "make it first, for example with `millrace sft @ examples/reverse_text/sft.toml`, or " if sft_hint else ""
    raise InvalidSpecError(
        violations, reason="MODEL_NOT_FOUND", remedy=f"{make}name a directory with a model, or a Hugging Face model id"
    )


def _problem(name: str, output_dir: str) -> str | None:
    if not is_path(name, output_dir=output_dir):
        return None
    path = Path(name).expanduser()
    if not path.is_dir():
        kind = "is a file, not a directory" if path.exists() else "does not exist"
        return f"{kind}; looked for {path.absolute()}" if path.is_absolute() else f"{kind} in {Path.cwd()}"
    if (adapter := why_no_model(path)) is not None:
        return f"{adapter}: `millrace merge {name} --base BASE --to MODEL`"
    if not (path / "config.json").is_file():
        return f"holds no Hugging Face model: there is no config.json in {path.absolute()}"
    return None
