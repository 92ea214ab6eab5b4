"""What an evaluation is made of, as digests: `--resume` must not continue with other weights or another environment."""

import ast
import hashlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from millrace.config import EvalRunConfig

_CACHES = "__pycache__"
_INSTALLED = ("site-packages", "dist-packages")


def digest_directory(directory: Path) -> str:
    """Return the SHA-256 (hex) of the names and bytes of all files below `directory`, but for hidden ones and caches.

    Reads every byte, about a second per GB: sizes and times say nothing of weights that were saved again.
    """
    return _digest((file.relative_to(directory).as_posix(), file) for file in _files(directory))


def digest_environment(env_id: str) -> str:
    """Return the SHA-256 (hex) of an environment's module, of those beside it that it imports, and of `verifiers`.

    It is looked for where a local stack imports it from, and not imported. One that is not there as a module of its own
    (a taskset of the library) is known by the release.
    """
    name = env_id.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_")
    places: list[tuple[str, Path]] = []
    for candidate in dict.fromkeys((name, name.lower())):
        spec = importlib.util.find_spec(candidate) if candidate.isidentifier() else None
        for root in (spec.submodule_search_locations or ()) if spec is not None else ():
            places += [(file.relative_to(root).as_posix(), file) for file in _files(Path(root))]
            places += _beside(Path(root).parent, [file for _, file in places], without=Path(root))
        if spec is not None and not places and spec.origin is not None and Path(spec.origin).is_file():
            places.append((Path(spec.origin).name, Path(spec.origin)))
            places += _beside(Path(spec.origin).parent, [Path(spec.origin)], without=Path(spec.origin))
        if places:
            break
    try:
        release = importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        release = ""
    return hashlib.sha256(f"{release} {_digest(places)}".encode()).hexdigest()


def digests_of(config: EvalRunConfig, *, weights: str = "") -> dict[str, str]:
    """Return the digest of everything that decides about an evaluation and is not in its config, by what it is.

    `weights` is that of the policy where the caller knows it; else it is that of the directory `model.name`, unless an
    endpoint serves the model.
    """
    found = {f"environment {env.name}": digest_environment(env.id) for env in config.env}
    for env in config.env:
        for name, file in _files_of_args(env.args, "args"):
            found[f"{name} of environment {env.name}"] = _digest([(name, file)])
    if not weights and config.client is None:
        weights = digest_directory(Path(config.model.name).expanduser())
    return found | ({"model": weights} if weights else {})


def _beside(directory: Path, modules: Iterable[Path], *, without: Path) -> list[tuple[str, Path]]:
    """The modules and packages of a directory that these import, and what those import there, but for one of them.

    None where packages are installed: all that these need lies there, gigabytes of it.
    """
    found: dict[Path, str] = {}
    left = [file for file in modules if file.suffix == ".py" and directory.name not in _INSTALLED]
    while left:
        for name in sorted(_imported(left.pop())):
            places = [directory / f"{name}.py"] if (directory / f"{name}.py").is_file() else []
            if not places and (directory / name / "__init__.py").is_file():
                places = _files(directory / name)
            for file in places:
                if file not in found and file != without and without not in file.parents:
                    found[file] = file.relative_to(directory).as_posix()
                    left += [file] if file.suffix == ".py" else []
    return sorted((name, file) for file, name in found.items())


def _imported(module: Path) -> set[str]:
    """Return the first names of all modules that a file imports; none if it is no Python."""
    try:
        nodes = list(ast.walk(ast.parse(module.read_bytes())))
    except (SyntaxError, ValueError):
        return set()
    named = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    named += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {name.partition(".")[0] for name in named}


def _files_of_args(args: Any, where: str) -> Iterator[tuple[str, Path]]:
    """Yield the files that an environment's args name, by key."""
    if isinstance(args, Mapping):
        for key, value in args.items():
            yield from _files_of_args(value, f"{where}.{key}")
    elif isinstance(args, list | tuple):
        for number, value in enumerate(args):
            yield from _files_of_args(value, f"{where}[{number}]")
    elif isinstance(args, str) and os.path.isfile(args := os.path.expanduser(args)):
        yield where, Path(args)


def _files(directory: Path) -> list[Path]:
    """Return all files below a directory, linked directories included, each of them once."""
    found: list[Path] = []
    seen: set[str] = set()
    for root, names, files in os.walk(directory, followlinks=True):
        seen.add(os.path.realpath(root))
        names[:] = [name for name in sorted(names) if os.path.realpath(os.path.join(root, name)) not in seen]
        found += [path for name in files if (path := Path(root, name)).is_file()]
    return sorted(path for path in found if not _is_skipped(path.relative_to(directory)))


def _is_skipped(path: Path) -> bool:
    return any(part == _CACHES or part.startswith(".") for part in path.parts)


def _digest(files: Iterable[tuple[str, Path]]) -> str:
    whole = hashlib.sha256()
    for name, path in files:
        with path.open("rb") as file:
            whole.update(f"{name}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return whole.hexdigest()
