"""Merged models against PEFT's own merge: the logits of each known kind of adapter, in float32, to 1e-5."""

import copy
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from millrace.config.sections.trainer import LoraConfig as OwnConfig
from millrace.errors import InvalidStateError
from millrace.models.files import ADAPTER_WEIGHTS
from millrace.policies.peft.directory import open_adapter
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.model.lora import add_adapters
from millrace.trainer.model.pretrained import policy_files
from millrace.trainer.sft.checkpoints import save_adapter, save_model
from millrace_testing.trainer.families import make_named

peft: Any = pytest.importorskip("peft")

VOCABULARY = 64
TOKENS = torch.arange(1, 33).reshape(2, 16)
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
EXPERTS: dict[str, Any] = {"head_dim": 8, "moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)),
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "qwen": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_positions=64, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        )
    ),
    "moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS, tie_word_embeddings=False)),
}
MIXTURES = ("mixtral", "qwen2_moe", "deepseek_v3, experts", "ernie4_5_moe", "glm4_moe", "gpt_oss")
"""Of `millrace_testing.trainer.families`."""
FUSED = ", fused"
"""Experts in one tensor in files, too."""
EXPERTS_ALONE = {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "mlp.experts.down_proj"]}
EMBED = {"target_modules": ["q_proj", "embed_tokens"]}


@dataclass(frozen=True)
class Case:
    """An adapter as PEFT makes it; `rows` is the size that the vocabulary was brought to before."""

    name: str
    model: str = "llama"
    config: dict[str, Any] = field(default_factory=dict)
    rows: int = VOCABULARY
    save: dict[str, Any] = field(default_factory=dict)


KNOWN = [
    Case("plain"),
    *(Case(f"init-{init}", config={"init_lora_weights": init}) for init in (False, "gaussian", "orthogonal", "mica")),
    Case("init-eva", config={"init_lora_weights": "eva", "eva_config": {}}),
    Case("pissa", config={"init_lora_weights": "pissa"}),
    Case("pissa-gpt2", "gpt2", {"init_lora_weights": "pissa", "target_modules": ["c_attn"]}),
    Case("pissa-dora", config={"init_lora_weights": "pissa", "use_dora": True}),
    Case("olora", config={"init_lora_weights": "olora", "use_rslora": True}),
    Case("dora", config={"use_dora": True, "target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
    Case("dora-gpt2", "gpt2", {"use_dora": True, "target_modules": ["c_attn", "c_proj"]}),
    Case("rslora", config={"use_rslora": True, "lora_dropout": 0.3}),
    Case(
        "patterns",
        config={
            "rank_pattern": {"layers.0.self_attn.q_proj": 2, r".*\.v_proj": 3},
            "alpha_pattern": {"v_proj": 5},
            "use_rslora": True,
        },
    ),
    Case("gpt2", "gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    Case("fan-in-of-linear", config={"fan_in_fan_out": True}),
    *(Case(f"bias-{bias}", "qwen", {"bias": bias}) for bias in ("all", "lora_only")),
    Case("lora-bias", "qwen", {"lora_bias": True}),
    Case("saved-head", config={"modules_to_save": ["lm_head", "norm"]}),
    *(Case(f"saved-{'-'.join(n)}", "tied", {"modules_to_save": n}) for n in (["lm_head"], ["embed_tokens"])),
    Case("saved-both", "tied", {"modules_to_save": ["embed_tokens", "lm_head"]}),
    Case("saved-as-tied", "tied", {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
    Case("embeddings-saved", "tied", save={"save_embedding_layers": True}),
    Case("one-layer", config={"layers_to_transform": [1]}),
    Case("one-layer-of-pattern", config={"layers_to_transform": 1, "layers_pattern": "layers"}),
    Case("excluded", config={"exclude_modules": ["layers.0.self_attn.q_proj"]}),
    Case("expression", config={"target_modules": r".*\.1\..*q_proj"}),
    Case("all-linear", config={"target_modules": "all-linear"}),
    Case("embedding", config=EMBED),
    Case("head", config={"target_modules": ["q_proj", "lm_head"]}),
    *(Case(f"tokens-{model}", model, {"trainable_token_indices": [1, 5]}) for model in ("llama", "tied")),
    Case("tokens-by-name", config={"trainable_token_indices": {"lm_head": [3, 4], "embed_tokens": [2]}}),
    Case("experts", "moe", {"target_parameters": ["mlp.experts.gate_up_proj"], "target_modules": ["q_proj"]}),
    *(Case(f"experts-{model}", model, EXPERTS_ALONE) for model in ("moe", "moe, fused", *MIXTURES)),
    Case("experts-patterns", "moe", {**EXPERTS_ALONE, "use_rslora": True, "rank_pattern": {"down_proj": 2}}),
    Case("experts-alpha", "gpt_oss", {**EXPERTS_ALONE, "alpha_pattern": {"experts.gate_up_proj": 3}}),
    Case("experts-biases", "gpt_oss", {**EXPERTS_ALONE, "target_parameters": ["down_proj_bias", "down_proj"]}),
    *(Case(f"resized-{model}", model, rows=VOCABULARY + 4) for model in ("llama", "tied")),
]
LONG = {
    *(
        "init-gaussian",
        "pissa-gpt2",
        "pissa-dora",
        "dora-gpt2",
        "fan-in-of-linear",
        "bias-lora_only",
        "one-layer-of-pattern",
    ),
    *(
        "saved-both",
        "saved-as-tied",
        "embeddings-saved",
        "tokens-tied",
        "tokens-by-name",
        "resized-llama",
        "all-linear",
    ),
    *(f"experts-{name}" for name in ("moe, fused", "alpha", "biases", *MIXTURES)),
}
"""Cases whose kind another one shows as well."""
REFUSED = [
    (Case("pissa-niter", config={"init_lora_weights": "pissa_niter_4"}), "init_lora_weights"),
    (Case("lora-ga", config={"init_lora_weights": "lora_ga", "lora_ga_config": {}}), "init_lora_weights"),
    (Case("router", "moe", {"target_parameters": ["mlp.gate.weight"]}), "target_parameters"),
    (Case("replication", config={"layer_replication": [[0, 2], [1, 2]]}), "layer_replication"),
    (Case("alora", config={"alora_invocation_tokens": [3]}), "alora_invocation_tokens"),
    (Case("embedding-tied", "tied", EMBED), "whose weight is another layer's"),
    (Case("head-tied", "tied", {"target_modules": ["lm_head"]}), "whose weight is another layer's"),
]


class Bases(dict[str, Path]):
    """Directories of tiny models by name, each made when it is asked for."""

    def __init__(self, place: Path) -> None:
        self._place = place

    def __missing__(self, name: str) -> Path:
        directory = self[name] = self._place / name
        if name in MIXTURES:
            load(make_named(name, self._place / "made")).save_pretrained(directory)  # in float32
            return directory
        torch.manual_seed(0)
        model = MODELS[name.removesuffix(FUSED)]()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        model.save_pretrained(directory, save_original_format=not name.endswith(FUSED))
        return directory


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Bases:
    return Bases(tmp_path_factory.mktemp("bases"))


@functools.cache
def _loaded(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def load(directory: Path, *, rows: int = VOCABULARY) -> Any:
    model = copy.deepcopy(_loaded(directory))
    if rows != VOCABULARY:
        model.resize_token_embeddings(rows, mean_resizing=False)
    return model


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=TOKENS).logits


def peft_adapter(case: Case, base: Path, target: Path) -> Path:
    """Return a trained adapter, saved by PEFT."""
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"} | case.config
    model = peft.get_peft_model(load(base, rows=case.rows), peft.LoraConfig(**config))
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(target, **case.save)
    return target


def peft_merge(adapter: Path, base: Path, *, rows: int = VOCABULARY) -> torch.Tensor:
    return logits(peft.PeftModel.from_pretrained(load(base, rows=rows), adapter).merge_and_unload())


def merged(adapter: Path, base: Path, target: Path) -> torch.Tensor:
    """Return the logits of our merge, loaded with nothing missing or left over."""
    open_adapter(adapter, base).merge(target)
    read: Any = AutoModelForCausalLM.from_pretrained
    model, told = read(target, dtype=torch.float32, output_loading_info=True)
    assert not any(told.values()), told
    return logits(model)


def as_parameter(case: Case) -> Any:
    return pytest.param(case, id=case.name, marks=[pytest.mark.long] if case.name in LONG else [])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", [*map(as_parameter, KNOWN)])
def test_a_known_kind_is_merged_as_peft_merges_it(case: Case, bases: Bases, tmp_path: Path) -> None:
    base = bases[case.model]
    adapter = peft_adapter(case, base, tmp_path / "adapter")
    wanted = peft_merge(adapter, base, rows=case.rows)
    found = merged(adapter, base, tmp_path / "merged")
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    assert (found[..., :VOCABULARY] - logits(load(base))).abs().max() > 1e-2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("case", "said"), REFUSED, ids=lambda each: each.name if isinstance(each, Case) else "")
def test_other_kinds_are_refused(case: Case, said: str, bases: Bases, tmp_path: Path) -> None:
    adapter = peft_adapter(case, bases[case.model], tmp_path / "adapter")
    with pytest.raises(InvalidStateError, match=said):
        open_adapter(adapter, bases[case.model])


@pytest.mark.filterwarnings("ignore")
def test_adapters_of_single_experts_are_merged_where_the_files_have_single_experts(
    bases: Bases, tmp_path: Path
) -> None:
    base, generator = bases["moe"], torch.Generator().manual_seed(4)
    tensors = {}
    for name, weight in load_file(base / "model.safetensors").items():
        if ".experts." in name:
            layer = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{layer}.lora_A.weight"] = torch.randn(4, weight.shape[1], generator=generator)
            tensors[f"{layer}.lora_B.weight"] = torch.randn(weight.shape[0], 4, generator=generator)
    adapter = tmp_path / "adapter"
    targets = ["gate_proj", "up_proj", "down_proj"]
    peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM").save_pretrained(adapter)
    save_file(tensors, adapter / ADAPTER_WEIGHTS)
    found = merged(adapter, base, tmp_path / "merged")
    torch.testing.assert_close(found, peft_merge(adapter, base), atol=1e-5, rtol=0)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("targets", "saved"),
    [
        (["q_proj", "down_proj"], []),
        (["layers.0.self_attn.q_proj", r"layers\.1\.mlp\.(up|gate)_proj"], ["norm"]),
        (["self_attn.v_proj"], ["lm_head"]),
    ],
)
def test_our_adapters_are_those_of_peft(
    targets: list[str], saved: list[str], bases: Bases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, gang = bases["llama"], Gang()
    monkeypatch.chdir(base.parent)
    model = load(base)
    spec = add_adapters(model, OwnConfig(rank=4, alpha=6.0, target_modules=targets, modules_to_save=saved), seed=1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5))
    kept: dict[str, Any] = {"dtype": torch.float32, "gang": gang}
    files = policy_files(model, base, dtype=torch.float32)
    adapter = save_adapter(model, spec, base=base.name, files=files, target=tmp_path / "adapter", **kept)
    whole = save_model(model, files=files, target=tmp_path / "model", **kept)
    named = json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"]
    unmerged = peft.PeftModel.from_pretrained(load(Path(named)), adapter)
    told = unmerged.load_adapter(adapter, "again")
    assert not told.unexpected_keys and not [key for key in told.missing_keys if ".again." in key]
    for found in (logits(unmerged), logits(load(whole)), merged(adapter, base, tmp_path / "merged")):
        torch.testing.assert_close(found, logits(model), atol=1e-5, rtol=0)
