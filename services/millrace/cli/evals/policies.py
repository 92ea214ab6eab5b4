"""The policies that `millrace eval` compares: the base model, and steps of a run or of a directory of weights."""

import hashlib
import re
import sys
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.cli.errors import CliError
from millrace.cli.evals.origins import digest_directory
from millrace.models.adapter_files import ADAPTER_CONFIG, require_no_adapter

if TYPE_CHECKING:
    from millrace.runlog.names import Names
    from millrace.runlog.records.run_record import RunRecord
    from millrace.storage import ObjectStore

BASE = "base"
_STEP_NAME = re.compile(r"(?:global_)?(?:step|checkpoint)[_-](\d+)")
_WEIGHTS_SUBDIRECTORIES = ("", "weights", "model", "policy", "hf")
"""Where trainers put the Hugging Face directory below the one that is named by the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalPolicy:
    """One policy to evaluate."""

    step: int | None
    """None for the base model."""
    fetch: Callable[[Path], Path]
    """Return a directory with a whole model in Hugging Face format; the argument is a new one that may be used."""
    digest: Callable[[], str]
    """Return the SHA-256 (hex) of what the policy is made of."""

    @property
    def label(self) -> str:
        """As names of runs and tables have it."""
        return BASE if self.step is None else f"step-{self.step}"


@dataclass(frozen=True, slots=True)
class RunPolicies:
    """What a run has published, read from the object store alone."""

    store: "ObjectStore"
    names: "Names"
    record: "RunRecord"

    @classmethod
    def open(cls, text: str, *, store_url: str | None, prefix: str) -> "RunPolicies":
        """Find the run by its name, uid or directory of results; NotFoundError if there is none."""
        from millrace.cli.offline.run_store import find_uid, store_of
        from millrace.runlog.names import Names
        from millrace.runlog.records.run_record import RunRecord

        store, meant = store_of(text, store_url)
        names = Names(prefix, find_uid(store, prefix, meant))
        record = RunRecord.parse(store.get(names.run_json), where=names.run_json)
        return cls(store, names, record)

    @property
    def model_name(self) -> str:
        """What the run began with, as its config names it."""
        return self.record.training.model.name

    def find(self) -> dict[int, str]:
        """The manifest's key of every published version, of the newest lineage that has it."""
        from millrace.runlog.records.listing import published_policies

        found: dict[int, str] = {}
        for version, key in published_policies(self.store, self.names):
            found.setdefault(version, key)
        return dict(sorted(found.items()))

    def download(self, key: str, directory: Path) -> Path:
        """Write one version as a whole model; an adapter is merged into its base."""
        from millrace.policies.pull import download_merged, read_manifest

        return download_merged(self.store, read_manifest(self.store, key), directory)


def of_run(run: RunPolicies, *, steps: Sequence[int] | None, has_base: bool, base: Path | None) -> list[EvalPolicy]:
    """The base and the published steps of a run; CliError naming the steps that there are if one is missing.

    The base is version 0 of the run where that is still stored, else the directory `base`.
    """
    found = run.find()

    def published(version: int) -> Callable[[Path], Path]:
        return lambda directory: run.download(found[version], directory)

    def named(version: int) -> Callable[[], str]:
        return lambda: hashlib.sha256(run.store.get(found[version])).hexdigest()  # a manifest names all of its bytes

    chosen = _choose(found.keys() - {0}, steps, where=f"run {run.record.name} has published")
    policies = [EvalPolicy(step=step, fetch=published(step), digest=named(step)) for step in chosen]
    if not has_base:
        return _some(policies)
    if 0 in found:
        return [EvalPolicy(step=None, fetch=published(0), digest=named(0)), *policies]
    return [*_base(base, hint="name it with --model.name DIRECTORY, or leave it out with --no-eval-base"), *policies]


def of_directory(weights: Path, *, steps: Sequence[int] | None, has_base: bool, base: Path | None) -> list[EvalPolicy]:
    """The base and `step_N` (also `step-N`, `checkpoint-N`) of a directory; a LoRA adapter is merged into the base."""
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
    if base is None or not (base / "config.json").is_file():
        raise CliError("the base model is to be evaluated, and it is no directory with a model here", hint=hint)
    require_no_adapter(base)
    return [EvalPolicy(step=None, fetch=lambda _: base, digest=lambda: digest_directory(base))]


def _some(policies: list[EvalPolicy]) -> list[EvalPolicy]:
    if not policies:
        raise CliError(
            "there is nothing to evaluate: no step was found and --no-eval-base leaves the base model out",
            hint="check --weights-dir or --run and --steps",
        )
    return policies


def _choose(found: Set[int], steps: Sequence[int] | None, *, where: str) -> list[int]:
    """The steps that are asked for, ascending; all that were found where none is named."""
    missing = sorted(set(steps or ()) - found)
    if missing:
        raise CliError(
            f"--steps: {where} no step {', '.join(map(str, missing))}",
            hint=f"there are {', '.join(map(str, sorted(found)))}" if found else "there is none at all",
        )
    return sorted(set(found if steps is None else steps))


def _model_in(path: Path) -> Path | None:
    """The directory with the model or adapter of a step."""
    for name in _WEIGHTS_SUBDIRECTORIES:
        if any((path / name / file).is_file() for file in ("config.json", ADAPTER_CONFIG)):
            return path / name
    return None


def _digest_stored(source: Path, base: Path | None) -> str:
    """Return the digest of a model, or of an adapter and the base that it is merged into."""
    found = digest_directory(source)
    if base is None or not (source / ADAPTER_CONFIG).is_file():
        return found
    return hashlib.sha256(f"{found} {digest_directory(base)}".encode()).hexdigest()


def _stored(source: Path, base: Path | None) -> Callable[[Path], Path]:
    """How to get the model of a directory; an adapter is checked against its base here, and merged when it is asked."""
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
