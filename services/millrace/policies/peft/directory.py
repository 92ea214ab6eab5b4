"""An adapter's directory on a base's directory, and the directory of the model that they make."""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from millrace.decoding import decode_object
from millrace.errors import InvalidStateError, NotFoundError
from millrace.models.files import (
    ADAPTER_CONFIG,
    ADAPTER_PICKLE,
    ADAPTER_WEIGHTS,
    CONFIGURED,
    INDEX,
    SINGLE,
    WeightFiles,
    adapter_files,
    model_quantized,
    quantization_of,
    read_object,
    read_small,
    require_no_adapter,
)
from millrace.policies.peft.config import PeftConfig, parse_peft_config
from millrace.policies.peft.merging import merge_tensors
from millrace.policies.peft.plan import BaseModel, MergePlan, describe_base, plan_merge
from millrace.policies.publish import write_hf
from millrace.policies.tensors import TensorBytes, read_tensors
from millrace.storage.clean_up import remove
from millrace.storage.scratch import io_errors

_CONFIG = "config.json"
_PARTIAL = ".partial-"
_TEMPLATES = ("chat_template*", "additional_chat_templates")
_GENERATION = ("generation_config.json",)
_VOCABULARIES = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken", "tekken.json")
_TOKENIZER = (*_VOCABULARIES, "tokenizer*", "special_tokens_map.json", "added_tokens.json", "merges.txt")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOnBase:
    """An adapter that fits its base: both are read, and nothing is left over."""

    config: PeftConfig
    plan: MergePlan
    adapter: Mapping[str, TensorBytes]
    base: Mapping[str, TensorBytes]
    model: BaseModel
    directory: Path
    base_directory: Path
    notes: tuple[str, ...]
    """What is worth knowing and no error, in sentences."""

    def merge(self, target: Path) -> Path:
        """Write the merged model with small files into `target`, a new or empty directory, and return it.

        The small files are the base's, except for the tokenizer and templates that the adapter has. config.json is
        written last. Raises CapacityError (DISK_FULL), after which nothing is left of it.
        """
        tensors = merge_tensors(
            self.config, self.plan, self.adapter, self.base, model=self.model, source=str(self.directory)
        )
        with _whole(target) as fresh:
            _copy_files(self.base_directory, self.directory, fresh)
            write_hf({_CONFIG: self._config()}, tensors, fresh)
        return target

    def _config(self) -> bytes:
        """Return the content of `config.json` of the merged model; raise InvalidStateError if it cannot be written."""
        path = self.base_directory / _CONFIG
        raw, changes = read_object(path), dict[str, object]()
        if self.plan.is_untied:
            changes["tie_word_embeddings"] = False
        if self.plan.vocabulary is not None:
            changes["vocab_size"] = self.plan.vocabulary
        if changes and "text_config" in raw:
            raise InvalidStateError(
                f"{self.directory} changes the vocabulary or the tie of embedding and head in a model with several "
                "configs",
                reason="ADAPTER_NOT_SUPPORTED",
                remedy="merge it with PEFT, save the result and use that",
            )
        if not changes and CONFIGURED not in raw:
            return read_small(path)
        # The base named its weight file itself; the merged weights have the usual name.
        raw.pop(CONFIGURED, None)
        return json.dumps(raw | changes, indent=2, sort_keys=True).encode() + b"\n"


def is_adapter(directory: Path) -> bool:
    """Return whether a directory has an adapter; raise InvalidStateError (MODEL_HAS_ADAPTER) if it has a model, too.

    A `config.json` alone makes no model: some trainers copy the base's into an adapter's directory.
    """
    own = adapter_files(directory)
    if own and (weights := [name for name in (SINGLE, INDEX) if (directory / name).is_file()]):
        raise InvalidStateError(
            f"{directory} holds a model ({', '.join(weights)}) and an adapter ({', '.join(own)}), and one is meant",
            reason="MODEL_HAS_ADAPTER",
            remedy="move the adapter to a directory of its own, or merge it and use the result",
        )
    return bool(own)


def open_adapter(directory: Path, base: Path) -> AdapterOnBase:
    """Open the adapter in `directory`, and check that it fits the model in the directory `base`.

    No values are read except the adapter's embeddings. Raises NotFoundError (ADAPTER_NOT_FOUND, MODEL_NOT_FOUND),
    CorruptObjectError for malformed files, and InvalidStateError for an adapter that cannot be merged
    (ADAPTER_NOT_SUPPORTED), does not fit (ADAPTER_MODEL_MISMATCH, LORA_TARGET_TIED), or a base that is quantized or has
    an adapter itself.
    """
    require_no_adapter(base)
    path, weights = directory / ADAPTER_CONFIG, directory / ADAPTER_WEIGHTS
    if not path.is_file() or not weights.is_file():
        raise _not_found(directory, has_config=path.is_file())
    raw, described = read_small(path), read_object(base / _CONFIG)
    config = parse_peft_config(raw, source=str(path))
    if quantization_of(described) is not None:
        raise model_quantized(base, "nothing can be added to its weights")
    files = WeightFiles.find(base, described)
    # Two files may have a tensor of the same name: the index says which one counts.
    tensors = {
        name: tensor
        for file in files.files
        for name, tensor in read_tensors(file).items()
        if name in files.tensors and files.tensors[name].file == file.name
    }
    adapter = read_tensors(weights)
    model = describe_base(described, tensors)
    plan = plan_merge(config, adapter, model, source=str(directory))
    return AdapterOnBase(
        config=config,
        plan=plan,
        adapter=adapter,
        base=tensors,
        model=model,
        directory=directory,
        base_directory=base,
        notes=tuple(_notes(directory, raw, files)),
    )


@contextlib.contextmanager
def _whole(target: Path) -> Iterator[Path]:
    """Yield a new directory whose files are moved into `target` when the block ends without an error.

    After an error `target` has none of them, and does not exist if it did not before. The new directory is in `target`,
    which may be a filesystem of its own.
    """
    is_new = not target.exists()
    with contextlib.ExitStack() as undoing, io_errors(target, "write", setting=None):
        target.mkdir(parents=True, exist_ok=True)
        undoing.callback(_clear, target, is_new=is_new)
        fresh = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=target))
        yield fresh
        # config.json last (False sorts first): a directory without it is no model, so a process that dies leaves none.
        for path in sorted(fresh.iterdir(), key=lambda path: path.name == _CONFIG):
            path.rename(target / path.name)
        fresh.rmdir()
        # Everything is in its place, so that nothing is undone.
        undoing.pop_all()


def _clear(directory: Path, *, is_new: bool) -> None:
    """Remove the contents of a directory, and the directory itself if it `is_new`."""
    for path in [directory] if is_new else list(directory.iterdir()):
        remove(path, what="part of a model")


def _notes(directory: Path, config: bytes, files: WeightFiles) -> list[str]:
    """Return sentences about files that are not read, and about an adapter that names another base.

    `config` is the content of the adapter's config, and `files` are the base's weights.
    """
    named = decode_object(config, what=ADAPTER_CONFIG, reason="ADAPTER_CONFIG_INVALID").get("base_model_name_or_path")
    beside = sorted(path.name for path in directory.glob("*.safetensors") if path.name != ADAPTER_WEIGHTS)
    notes = [f"{files.directory} has {', '.join(files.beside)} beside its weights, which are not read"] * bool(
        files.beside
    )
    if beside:
        notes.append(f"{directory} has {', '.join(beside)} beside {ADAPTER_WEIGHTS}, which are not read")
    if isinstance(named, str) and named and Path(named).name != files.directory.resolve().name:
        notes.append(f"{directory} was trained on {named[:500]}, and is merged into {files.directory}")
    return notes


def _copy_files(base: Path, adapter: Path, target: Path) -> None:
    """Copy the base's small files into `target`, with those that the adapter has in their place.

    The adapter may have a tokenizer, templates and a generation config. A tokenizer replaces the base's only if it is
    whole.
    """
    own = {kind: _matching(adapter, kind) for kind in (_TOKENIZER, _TEMPLATES, _GENERATION)}
    is_whole = {kind: bool(found) for kind, found in own.items()}
    # Without a vocabulary the adapter has parts of a tokenizer only, which go over the base's files.
    is_whole[_TOKENIZER] = bool(_matching(adapter, _VOCABULARIES))
    replaced = {name for kind in own if is_whole[kind] for name in _matching(base, kind)}
    for path in sorted(base.iterdir()):
        is_kept = (
            path.name not in replaced and not path.name.endswith(_WEIGHTS) and not path.name.startswith("adapter_")
        )
        if is_kept and (path.is_file() or path.name in _TEMPLATES):
            _copy(path, target)
    for name in {name for found in own.values() for name in found}:
        _copy(adapter / name, target)


def _matching(directory: Path, patterns: tuple[str, ...]) -> set[str]:
    """Return the names of the files in a directory that fit one of the patterns."""
    return {path.name for pattern in patterns for path in directory.glob(pattern) if _is_kept(path)}


def _is_kept(path: Path) -> bool:
    """Return whether a path is a file, or a directory of templates."""
    return path.is_file() or path.name in _TEMPLATES


def _copy(path: Path, target: Path) -> None:
    """Copy a file or a directory into `target`, under its name."""
    if path.is_dir():
        shutil.copytree(path, target / path.name, dirs_exist_ok=True)
    else:
        shutil.copy(path, target / path.name)


def _not_found(directory: Path, *, has_config: bool) -> NotFoundError:
    """Make the error of a directory that lacks part of an adapter; `has_config` says whether it has the config."""
    if (directory / ADAPTER_PICKLE).is_file():
        return NotFoundError(
            f"{directory} has its adapter in {ADAPTER_PICKLE}, a pickle, which is not read",
            reason="ADAPTER_NOT_FOUND",
            remedy="load it with PEFT and save it again: save_pretrained writes " + ADAPTER_WEIGHTS,
        )
    return NotFoundError(
        f"{directory} is an adapter without {ADAPTER_WEIGHTS if has_config else ADAPTER_CONFIG}",
        reason="ADAPTER_NOT_FOUND",
        remedy="copy the whole directory that PEFT has saved",
    )
