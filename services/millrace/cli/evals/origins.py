"""What an evaluation is made of, as digests: `--resume` must not continue with other weights or another environment."""

import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Iterable
from pathlib import Path

from millrace.config import EvalRunConfig

_CACHES = "__pycache__"


def digest_directory(directory: Path) -> str:
    """Return the SHA-256 (hex) of the names and bytes of all files below `directory`, but for hidden ones and caches.

    Reads every byte, about a second per GB: sizes and times say nothing of weights that were saved again.
    """
    return _digest((file.relative_to(directory).as_posix(), file) for file in _files(directory))


def digest_environment(env_id: str) -> str:
    """Return the SHA-256 (hex) of an environment's module and of the release of `verifiers`.

    It is looked for where a local stack imports it from, and not imported. One that is not there as a module of its own
    (a taskset of the library) is known by the release.
    """
    name = env_id.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_")
    places: list[tuple[str, Path]] = []
    for candidate in dict.fromkeys((name, name.lower())):
        spec = importlib.util.find_spec(candidate) if candidate.isidentifier() else None
        for root in (spec.submodule_search_locations or ()) if spec is not None else ():
            places += [(file.relative_to(root).as_posix(), file) for file in _files(Path(root))]
        if spec is not None and not places and spec.origin is not None and Path(spec.origin).is_file():
            places.append((Path(spec.origin).name, Path(spec.origin)))
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
    if not weights and config.client is None:
        weights = digest_directory(Path(config.model.name).expanduser())
    return found | ({"model": weights} if weights else {})


def _files(directory: Path) -> list[Path]:
    found = (path for path in directory.rglob("*") if path.is_file())
    return sorted(path for path in found if not _is_skipped(path.relative_to(directory)))


def _is_skipped(path: Path) -> bool:
    return any(part == _CACHES or part.startswith(".") for part in path.parts)


def _digest(files: Iterable[tuple[str, Path]]) -> str:
    whole = hashlib.sha256()
    for name, path in files:
        with path.open("rb") as file:
            whole.update(f"{name}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return whole.hexdigest()
