"""The policies that `millrace eval` compares: the base model, and steps of a run or of a directory of weights."""

import ast
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millrace.cli.errors import CliError
from millrace.config import EvalRunConfig
from millrace.models.files import ADAPTER_CONFIG, require_no_adapter

if TYPE_CHECKING:
    from millrace.runlog.names import Names
    from millrace.runlog.records.run_record import RunRecord
    from millrace.storage import ObjectStore

BASE = "base"
_STEP_NAME = re.compile(r"(?:global_)?(?:step|checkpoint)[_-](\d+)")
_WEIGHTS_SUBDIRECTORIES = ("", "weights", "model", "policy", "hf")
"""Subdirectories of a step's directory that may contain the Hugging Face model; trainers differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalPolicy:
    """One policy to evaluate."""

    step: int | None
    """The policy's step; None for the base model."""
    fetch: Callable[[Path], Path]
    """Function that returns a directory with the whole model in Hugging Face format.

    It may create the directory it is given and write the model there.
    """
    digest: Callable[[], str]
    """Function that returns a SHA-256 (hex) which identifies the weights."""

    @property
    def label(self) -> str:
        """Return the policy's name in run names and tables: `base` or `step-N`."""
        return BASE if self.step is None else f"step-{self.step}"


@dataclass(frozen=True, slots=True)
class RunPolicies:
    """The published policies of a run, read from the object store."""

    store: "ObjectStore"
    names: "Names"
    record: "RunRecord"

    @classmethod
    def open(cls, text: str, *, store_url: str | None, prefix: str) -> "RunPolicies":
        """Find a run by name, uid or directory of results (`text`) in the store at `store_url`, below `prefix`.

        Without a URL the store is looked for (`store_of`). Raises NotFoundError if there is no such run.
        """
        from millrace.cli.offline.run_store import find_uid, store_of
        from millrace.runlog.names import Names
        from millrace.runlog.records.run_record import RunRecord

        store, meant = store_of(text, store_url)
        names = Names(prefix, find_uid(store, prefix, meant))
        record = RunRecord.parse(store.get(names.run_json), where=names.run_json)
        return cls(store, names, record)

    @property
    def model_name(self) -> str:
        """Return the name of the start model in the run's config."""
        return self.record.training.model.name

    def find(self) -> dict[int, str]:
        """Map each published version that is kept, in ascending order, to the key of its manifest in the newest
        lineage.

        Versions that were retired are left out.
        """
        from millrace.runlog.records.retirement import newest_retirement
        from millrace.runlog.records.run_record import published_policies

        record = newest_retirement(self.store, self.names)
        found: dict[int, str] = {}
        for version, key in published_policies(self.store, self.names):
            weights = f"{key.removeprefix(self.names.root).rpartition('/')[0]}/weights"
            if record is None or not record.covers(weights):
                # The newest lineage comes first.
                found.setdefault(version, key)
        return dict(sorted(found.items()))

    def require_kept(self, versions: Iterable[int]) -> None:
        """Raise NotFoundError if one of the versions was published and is retired; it says by which record."""
        from millrace.runlog.records.retirement import require_policy
        from millrace.runlog.records.run_record import published_policies

        wanted = set(versions)
        for version, key in published_policies(self.store, self.names) if wanted else ():
            if version in wanted:
                require_policy(self.store, key)

    def download(self, key: str, directory: Path) -> Path:
        """Write the version with the manifest `key` into `directory` as a whole model, an adapter merged into its base.

        Return the model's directory.
        """
        from millrace.policies.host_copy import download_merged, read_manifest

        return download_merged(self.store, read_manifest(self.store, key), directory)


def of_run(run: RunPolicies, *, steps: Sequence[int] | None, has_base: bool, base: Path | None) -> list[EvalPolicy]:
    """Return the policies of a run to evaluate: the base model if `has_base`, and the given or all published steps.

    The base is version 0 if it is still stored, otherwise the directory `base`. `steps` is None for all. Raises
    CliError if a step is missing or nothing is left to evaluate.
    """
    found = run.find()
    run.require_kept(set(steps or ()) - found.keys())

    def published(version: int) -> Callable[[Path], Path]:
        """Return the function that downloads a version into a directory."""
        return lambda directory: run.download(found[version], directory)

    def named(version: int) -> Callable[[], str]:
        """Return the function that returns a version's digest."""
        return lambda: hashlib.sha256(run.store.get(found[version])).hexdigest()  # a manifest names all of its bytes

    chosen = _choose(found.keys() - {0}, steps, where=f"run {run.record.name} has published")
    policies = [EvalPolicy(step=step, fetch=published(step), digest=named(step)) for step in chosen]
    if not has_base:
        return _some(policies)
    if 0 in found:
        return [EvalPolicy(step=None, fetch=published(0), digest=named(0)), *policies]
    return [*_base(base, hint="name it with --model.name DIRECTORY, or leave it out with --no-eval-base"), *policies]


def of_directory(weights: Path, *, steps: Sequence[int] | None, has_base: bool, base: Path | None) -> list[EvalPolicy]:
    """Return the policies in a directory: the base model if `has_base`, and each `step_N`, `step-N` or `checkpoint-N`
    below `weights`. A LoRA adapter is merged into `base`. Raises CliError if a step is missing or nothing is left to
    evaluate.
    """
    if not weights.is_dir():
        raise CliError(f"--weights-dir {weights} is no directory", hint=f"looked for {weights.absolute()}")
    found = {
        int(match[1]): directory
        for path in sorted(weights.iterdir())
        if (match := _STEP_NAME.fullmatch(path.name)) and (directory := _model_in(path)) is not None
    }

    def stored_digest(step: int) -> Callable[[], str]:
        return lambda: _digest_stored(found[step], base)

    chosen = _choose(found.keys(), steps, where=f"{weights} holds")
    hint = "name it with --model.name DIRECTORY, or leave it out with --no-eval-base"
    first = _base(base, hint=hint) if has_base else []
    policies = [EvalPolicy(step=step, fetch=_stored(found[step], base), digest=stored_digest(step)) for step in chosen]
    return _some([*first, *policies])


def _base(base: Path | None, *, hint: str) -> list[EvalPolicy]:
    """Return the policy of the base model in the directory `base`; raise CliError with `hint` if no model is there."""
    if base is None or not (base / "config.json").is_file():
        raise CliError("the base model is to be evaluated, and it is no directory with a model here", hint=hint)
    require_no_adapter(base)
    return [EvalPolicy(step=None, fetch=lambda _: base, digest=lambda: digest_directory(base))]


def _some(policies: list[EvalPolicy]) -> list[EvalPolicy]:
    """Return the policies; raise CliError if there is none."""
    if not policies:
        raise CliError(
            "there is nothing to evaluate: no step was found and --no-eval-base leaves the base model out",
            hint="check --weights-dir or --run and --steps",
        )
    return policies


def _choose(found: Set[int], steps: Sequence[int] | None, *, where: str) -> list[int]:
    """Return the steps to evaluate in ascending order: `steps`, or all of `found` if that is None.

    Raises CliError if one is missing; `where` begins its message, such as `run x has published`.
    """
    missing = sorted(set(steps or ()) - found)
    if missing:
        raise CliError(
            f"--steps: {where} no step {', '.join(map(str, missing))}",
            hint=f"there are {', '.join(map(str, sorted(found)))}" if found else "there is none at all",
        )
    return sorted(set(found if steps is None else steps))


def _model_in(path: Path) -> Path | None:
    """Return the directory at or below `path` that has a model or an adapter; None if there is none."""
    for name in _WEIGHTS_SUBDIRECTORIES:
        if any((path / name / file).is_file() for file in ("config.json", ADAPTER_CONFIG)):
            return path / name
    return None


def _digest_stored(source: Path, base: Path | None) -> str:
    """Return the digest of the model in `source`; for an adapter, the digest of the adapter and its base together."""
    found = digest_directory(source)
    if base is None or not (source / ADAPTER_CONFIG).is_file():
        return found
    return hashlib.sha256(f"{found} {digest_directory(base)}".encode()).hexdigest()


def _stored(source: Path, base: Path | None) -> Callable[[Path], Path]:
    """Return a function that provides the model in `source`: it gets a directory to write to, and returns the model's.

    A whole model is used where it is. An adapter is checked against `base` at once, and merged into the given directory
    when the function is called. Raises CliError if the adapter's base is missing.
    """
    from millrace.policies.peft.directory import is_adapter, open_adapter

    if not is_adapter(source):
        return lambda _: source
    if base is None or not (base / "config.json").is_file():
        raise CliError(
            f"{source} holds a LoRA adapter, and its base model is no directory here",
            hint="name the base with --model.name DIRECTORY",
        )
    adapter = open_adapter(source, base)
    for note in adapter.notes:
        print(f"note: {note}", file=sys.stderr)
    return adapter.merge


# What an evaluation is made of, as digests: `--resume` must not continue with other weights or another environment.

_CACHES = "__pycache__"
_INSTALLED = ("site-packages", "dist-packages")


def digest_directory(directory: Path) -> str:
    """Return the SHA-256 (hex) over the names and bytes of all files below `directory`, except hidden files and caches.

    It reads every byte (about a second per GB), because rewritten weights may have the same sizes and times.
    """
    return _digest((file.relative_to(directory).as_posix(), file) for file in _files(directory))


def digest_environment(env_id: str) -> str:
    """Return the SHA-256 (hex) over an environment's module, the neighbouring modules that it imports, and the version
    of `verifiers`. The module is searched where a local stack would import it, and is not imported. An environment
    without a module (a taskset of the library) has the digest of the version alone.
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
    """Return the digests of everything outside the config that influences an evaluation, by description: environments,
    files named in their arguments, the model. `weights` is the model's digest if the caller knows it; otherwise the
    directory `model.name` is read, unless an endpoint serves the model.
    """
    found = {f"environment {env.name}": digest_environment(env.id) for env in config.env}
    for env in config.env:
        for name, file in _files_of_args(env.args, "args"):
            found[f"{name} of environment {env.name}"] = _digest([(name, file)])
    if not weights and config.client is None:
        weights = digest_directory(Path(config.model.name).expanduser())
    return found | ({"model": weights} if weights else {})


def _beside(directory: Path, modules: Iterable[Path], *, without: Path) -> list[tuple[str, Path]]:
    """Return the modules and packages in `directory` that `modules` import, directly or indirectly, with their relative
    paths. `without` is left out. Return none if the directory is one of installed packages, which can be gigabytes.
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
    """Return the top-level names of all modules that a file imports; none if it is not valid Python."""
    try:
        nodes = list(ast.walk(ast.parse(module.read_bytes())))
    except (SyntaxError, ValueError):
        return set()
    named = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    named += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {name.partition(".")[0] for name in named}


def _files_of_args(args: Any, where: str) -> Iterator[tuple[str, Path]]:
    """Yield each file that a value in `args` names, with its key; `where` is the key of `args` itself."""
    if isinstance(args, Mapping):
        for key, value in args.items():
            yield from _files_of_args(value, f"{where}.{key}")
    elif isinstance(args, list | tuple):
        for number, value in enumerate(args):
            yield from _files_of_args(value, f"{where}[{number}]")
    elif isinstance(args, str) and os.path.isfile(args := os.path.expanduser(args)):
        yield where, Path(args)


def _files(directory: Path) -> list[Path]:
    """Return all files below a directory, without hidden files and caches.

    Links to directories are followed, each directory once.
    """
    found: list[Path] = []
    seen: set[str] = set()
    # Links are followed, and `seen` ends the walk where they form a circle.
    for root, names, files in os.walk(directory, followlinks=True):
        seen.add(os.path.realpath(root))
        names[:] = [name for name in sorted(names) if os.path.realpath(os.path.join(root, name)) not in seen]
        found += [path for name in files if (path := Path(root, name)).is_file()]
    return sorted(path for path in found if not _is_skipped(path.relative_to(directory)))


def _is_skipped(path: Path) -> bool:
    """Return whether the path is in a cache or a hidden directory, or is a hidden file."""
    return any(part == _CACHES or part.startswith(".") for part in path.parts)


def _digest(files: Iterable[tuple[str, Path]]) -> str:
    """Return the SHA-256 (hex) over the names and the bytes of files, in the given order."""
    whole = hashlib.sha256()
    for name, path in files:
        with path.open("rb") as file:
            # A path has no NUL, so two different lists of files never give the same text.
            whole.update(f"{name}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return whole.hexdigest()
