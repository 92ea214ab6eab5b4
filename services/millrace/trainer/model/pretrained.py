"""Loading a Hugging Face model for training, and its tensors and files in the form that policies are published in."""

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from millrace.config.sections.sft import SFTModelConfig
from millrace.config.sections.trainer import TrainerModelConfig
from millrace.errors import InvalidStateError, NotFoundError
from millrace.models.configs import with_older_tokenizer_names
from millrace.models.context_length import contexts_like
from millrace.models.files import (
    DOWNLOADED,
    MODEL_FILES,
    TOKENIZER_FILES,
    model_not_found,
    read_object,
    require_no_adapter,
    small_files,
)
from millrace.models.loading import empty_model, fill_model
from millrace.models.saved import saved_config
from millrace.models.torch_support import shortage_named
from millrace.models.vocabulary import load_tokenizer
from millrace.policies.manifest import Probe
from millrace.policies.stops import turn_stops, with_stops
from millrace.telemetry import progress
from millrace.telemetry.progress import Activity, counting_bar

logger = logging.getLogger(__name__)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_PROBE_TOKENS = 16
_TOKENIZER_CONFIG = "tokenizer_config.json"


def load_code() -> None:
    """Import the modules that loading a model needs.

    The import takes seconds: a worker does it before its first run.
    """
    import transformers.modeling_utils  # noqa: F401 - the import is the purpose
    from transformers import AutoModelForCausalLM  # noqa: F401


def resolve_model_directory(name: str) -> Path:
    """Return the local directory of a model; `name` is a path, or a Hub id whose files are downloaded if needed.

    Raises NotFoundError (MODEL_NOT_FOUND) if there is no such model, and InvalidStateError (MODEL_IS_ADAPTER) for a
    directory of adapters.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        require_no_adapter(path)
        if not (path / "config.json").is_file():
            raise model_not_found(name, f"directory {path.resolve()} holds no config.json")
        return path
    if not _HUB_ID.fullmatch(name) or path.exists():
        raise model_not_found(name, f"{path.resolve()} is not a directory")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        with progress.work(Activity.DOWNLOAD, f"model {name} from the Hugging Face Hub") as work:
            found = Path(snapshot_download(name, allow_patterns=list(DOWNLOADED), tqdm_class=counting_bar(work)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise model_not_found(
            name, f"{path.resolve()} is not a directory, and the Hub did not give it: {first_line}"
        ) from error
    require_no_adapter(found)
    return found


def load_model(directory: Path) -> nn.Module:
    """Load the causal language model in `directory` on the CPU, with float32 weights, in eval mode without dropout.

    Raises as `millrace.models.loading`, and InvalidStateError (OUT_OF_MEMORY).
    """
    with shortage_named(f"load model {directory.name}"):
        model = empty_model(directory)
        fill_model(model, directory, device=torch.device("cpu"))
    return model


def resolve_dtype(name: str, *, device: torch.device) -> torch.dtype:
    """Return the torch dtype of a name in the config; `auto` is bfloat16 on a GPU and float32 on a CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def resolve_compute_dtype(model: TrainerModelConfig | SFTModelConfig, *, device: torch.device) -> torch.dtype:
    """Return the dtype of forward and backward on `device`.

    It is bfloat16 if `optimization_dtype` is, else the dtype that `model.dtype` names.
    """
    return resolve_dtype("bfloat16" if model.optimization_dtype == "bfloat16" else model.dtype, device=device)


def resolve_publish_dtype(model: TrainerModelConfig | SFTModelConfig, *, device: torch.device) -> torch.dtype:
    """Return the dtype of published policies on `device`; `auto` is the dtype that the trainer computes in."""
    if model.publish_dtype == "auto":
        return resolve_compute_dtype(model, device=device)
    return resolve_dtype(model.publish_dtype, device=device)


def policy_files(model: Any, directory: Path, *, dtype: torch.dtype) -> dict[str, bytes]:
    """Return the small files of a published policy (config, tokenizer) by name.

    The config is that of the loaded `model`, and names `dtype`. The others come from `directory`, the model's own; its
    tokenizer's config is adapted so that older transformers read it.
    """
    files = small_files(directory, (*MODEL_FILES, *TOKENIZER_FILES)) | {"config.json": saved_config(model, dtype=dtype)}
    source = read_object(directory / "config.json").get("model_type")
    if source == model.config.model_type or _TOKENIZER_CONFIG not in files:
        return files | _older_tokenizer_config(files, directory)
    # The model is the text part of another one, whose type may imply a class of tokenizers that the part's does not.
    return files | _older_tokenizer_config(files, directory, tokenizer_class=type(load_tokenizer(directory)).__name__)


def _older_tokenizer_config(files: Mapping[str, bytes], directory: Path, **changes: str) -> dict[str, bytes]:
    """Return {name: content} of the tokenizer's config of `directory`, rewritten so that older transformers read it.

    `changes` are keys to replace. Empty if nothing changes, or if `files` have no tokenizer's config.
    """
    if _TOKENIZER_CONFIG not in files:
        return {}
    there = read_object(directory / _TOKENIZER_CONFIG)
    config = with_older_tokenizer_names(there | changes)
    return (
        {_TOKENIZER_CONFIG: json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n"}
        if config != there
        else {}
    )


def vocabulary_of(model: Any) -> int:
    """Return the number of token ids that the model's config says."""
    return int(model.config.get_text_config().vocab_size)


def with_tokenizer(files: dict[str, bytes], directory: Path) -> dict[str, bytes]:
    """Return the model's own files among `files` (config.json, …), and the tokenizer's files of `directory`.

    Other `files`, such as another tokenizer's, are left out. All are small files, contents by name.
    """
    kept = {name: data for name, data in files.items() if name in MODEL_FILES}
    found = kept | small_files(directory, TOKENIZER_FILES)
    return found | _older_tokenizer_config(found, directory)


def with_turn_stops(files: dict[str, bytes], directory: Path, *, tokenizer: Path) -> dict[str, bytes]:
    """Return `files`, the small files of a model by name, with every token that ends a turn in the generation config.

    Those are the tokens that the configs in `directory`, the model's, name, and those with which the tokenizer and chat
    template in the directory `tokenizer` end turns. Files without a tokenizer stay as they are, and so do all, with a
    warning in the log, if the tokenizer is not found here.
    """
    if not any(name.startswith("tokenizer") for name in files):
        return files
    try:
        loaded = load_tokenizer(tokenizer)
    except NotFoundError as error:
        logger.warning("engines end turns where the model's configs say, and not its chat template", exc_info=error)
        return files
    return with_stops(files, turn_stops(loaded, directory).token_ids)


@torch.no_grad()
def probe(model: nn.Module, *, vocabulary: int, device: torch.device) -> Probe:
    """Return the model's log-probs on a fixed prompt, which an engine with the same weights must reproduce.

    The prompt is spread over the `vocabulary` (number of token ids), so that it uses embedding rows far apart. Raises
    InvalidStateError (POLICY_NOT_FINITE) if a log-prob is not finite. Collective in a gang.
    """
    token_ids = [(7919 * index + 13) % vocabulary for index in range(_PROBE_TOKENS)]
    tensor = torch.tensor([token_ids], device=device)
    logits_TV = model(input_ids=tensor, use_cache=False).logits[0, :-1].float()
    logprobs_T = torch.log_softmax(logits_TV, dim=-1).gather(-1, tensor[0, 1:, None]).squeeze(-1)
    # Here and not where the manifest is encoded, whose error would have a gang restarted again and again.
    if not bool(logprobs_T.isfinite().all()):
        raise InvalidStateError(
            "the model gives log-probs that are not finite, so that no engine could serve it as a policy",
            reason="POLICY_NOT_FINITE",
            remedy="before the first step: use a start model with finite weights; later: fork the run a few steps "
            "before with a lower trainer.optim.lr",
        )
    return Probe(token_ids=tuple(token_ids), logprobs=tuple(logprobs_T.tolist()), contexts=contexts_like(model))
