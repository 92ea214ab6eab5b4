"""The model that is trained, put together: weights, adapters, what its blocks keep, and its place among the ranks."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from millrace.config.sections.sft import SFTModelConfig
from millrace.config.sections.trainer import TrainerModelConfig
from millrace.context_length import fix_context_length
from millrace.device_digest import device_digest
from millrace.models.loading import check_weights, empty_model, fill_model
from millrace.policies.adapter import AdapterSpec
from millrace.policies.digest import digest_hex
from millrace.policies.manifest import whole_digest
from millrace.policies.publishing.parts import merge_digests
from millrace.trainer.gang.agreement import agreed
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.model.compiled import compile_blocks
from millrace.trainer.model.fit import fit_layout
from millrace.trainer.model.lora import add_adapters, round_base, round_filled
from millrace.trainer.model.memory import Sharding, checkpoint_activations, hold_weights
from millrace.trainer.model.pretrained import load_model, resolve_compute_dtype, resolve_publish_dtype
from millrace.trainer.model.published import published_share, published_tensors
from millrace.trainer.model.shortage import shortage_named


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """`adapter` says what is adapted, if anything is; `base_digest` (hex) is version 0's, where it is known."""

    model: nn.Module
    adapter: AdapterSpec | None
    base_digest: str


def build_model(
    config: TrainerModelConfig | SFTModelConfig,
    directory: Path,
    *,
    gang: Gang,
    seed: int,
    prefix: str,
    context_length: int,
    is_proved: bool = False,
) -> TrainedModel:
    """The model in a directory, as the table `prefix` of the config says, for sequences of at most `context_length`.

    Collective in a gang.

    Its digest is computed where it has adapters, or `is_proved` asks for it. InvalidSpecError for what contradicts,
    before anything is read of the weights.
    """
    with agreed(gang):  # the model's files are of this rank's machine: what is wrong with them here, all get to know
        layout = fit_layout(config, directory, world_size=gang.world_size, prefix=prefix)
    gang.lay_out(layout)
    compute_dtype = resolve_compute_dtype(config, device=gang.device)
    publish_dtype = resolve_publish_dtype(config, device=gang.device)
    with agreed(gang):
        model, adapter = open_model(directory, gang=gang, context_length=context_length), None
        hold_weights(model, config)
        if config.lora is not None:
            round_base(model, config.lora, publish_dtype=publish_dtype, compute_dtype=compute_dtype)
            adapter = add_adapters(model, config.lora, seed=seed)
        checkpoint_activations(model, config.ac)
        compile_blocks(model, config.compile)
    sharding = Sharding.of(config, compute_dtype=compute_dtype)
    model = gang.shard(model, sharding)
    with agreed(gang):
        fill_opened(model, directory, gang=gang, sharding=sharding)
    if config.lora is not None:
        round_filled(model, publish_dtype=publish_dtype)
    digest = model_digest(model, dtype=publish_dtype, gang=gang) if is_proved or adapter is not None else ""
    return TrainedModel(model=model, adapter=adapter, base_digest=digest)


def open_model(directory: Path, *, gang: Gang, context_length: int) -> nn.Module:
    """The model in a directory: with its weights for one process; in a gang `fill_opened` reads them."""
    if gang.is_alone:
        model = load_model(directory)
    else:
        check_weights(directory)  # of the whole: a rank sees no more than its shares of what is wrong
        model = empty_model(directory)
    fix_context_length(model, context_length)
    return model


def fill_opened(model: nn.Module, directory: Path, *, gang: Gang, sharding: Sharding) -> None:
    """Read what this rank holds of an opened model that is sharded by now."""
    if not gang.is_alone:
        with shortage_named(f"load model {directory.name}"):
            fill_model(model, directory, device=torch.device("cpu") if sharding.offloads else gang.device)


@torch.no_grad()
def model_digest(model: nn.Module, *, dtype: torch.dtype, gang: Gang) -> str:
    """The digest (hex) of version 0: every rank digests what it holds, where it lies. Collective in a gang."""
    is_first_part = gang.layout.is_first_part(gang.rank)
    rows: list[list[object]] = []
    for each in published_tensors(model, version=0, dtype=dtype):
        share = published_share(each.tensor, rank=gang.rank, is_first_part=is_first_part)
        if share is None:
            continue
        flat, start = share[0].to(each.dtype).reshape(-1), share[1]
        for saved, begin, end in each.within(start, flat.numel()):
            digest = digest_hex(device_digest(flat[begin - start : end - start], start=begin - saved.start))
            rows.append([saved.name, each.tag, list(saved.shape), end - begin, digest])
    return whole_digest(merge_digests(gang.agree(lambda: rows)))
