"""What is published and saved is a model as transformers saves it: names, number formats, config and small files."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version

from millrace.errors import CorruptObjectError
from millrace.inference.embedded import loader
from millrace.inference.embedded import loader as weights
from millrace.inference.model_files import write_files
from millrace.models.files import MODEL_FILES, TOKENIZER_FILES, small_files
from millrace.models.saved import SavedTensor, saved_tensors
from millrace.policies.proof import held_digest
from millrace.policies.tensors import TensorChange
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.learning.learner import model_digest
from millrace.trainer.model.mesh import RankLayout
from millrace.trainer.model.pretrained import load_model, policy_files
from millrace.trainer.model.published import Snapshots, described_tensors, policy_tensors, share_bytes
from millrace_testing.inference.tiny import tiny_tokenizer
from millrace_testing.trainer.families import FAMILIES, make_family, make_other
from millrace_testing.trainer.saved import (
    exported_again,
    loading_problems,
    logits_of,
    names_in,
    saved_again,
    tokenizer_problems,
)

ROUTER = "model.layers.1.mlp.gate.weight"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
TEXT = "qwen3_5, text part"
HELD = ("qwen3, tied", "gpt_neox", "qwen3_moe", "deepseek_v3, experts", TEXT)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    directory = tmp_path_factory.mktemp("families")
    return {name: (make_family if name in FAMILIES else make_other)(name, directory) for name in HELD}


@pytest.fixture(scope="module")
def routed(models: Mapping[str, Path]) -> Any:
    """Return a DeepSeek-V3 with experts, whose router's bias bfloat16 has no room for."""
    model = load_model(models["deepseek_v3, experts"])
    model.get_buffer(BIAS).copy_(torch.tensor([7.001, 7.002, 7.003, 7.004]))
    return model


@pytest.mark.parametrize("name", HELD)
def test_a_saved_model_loads_as_what_it_was(name: str, models: Mapping[str, Path], tmp_path: Path) -> None:
    model, saved = saved_again(models[name], tmp_path / "model")
    model.save_pretrained(tmp_path / "theirs")
    assert names_in(saved) == names_in(tmp_path / "theirs") <= names_in(models[name])
    wanted = {"logits": logits_of(model), "dtype": torch.float32, "gap": 0.0}
    assert loading_problems(saved, wanted) == {}


def test_the_text_part_of_a_model_is_one_of_its_own(models: Mapping[str, Path]) -> None:
    model = load_model(models[TEXT])
    config = json.loads(policy_files(model, models[TEXT], dtype=torch.bfloat16)["config.json"])
    assert (config["model_type"], config["architectures"]) == ("qwen3_5_text", ["Qwen3_5ForCausalLM"])
    assert config["dtype"] == "bfloat16" and config["vocab_size"] == 64 and "vision_config" not in config


def test_the_config_says_the_format_at_every_level_and_nothing_of_quantisation(tmp_path: Path) -> None:
    model = load_model(make_other("gemma3", tmp_path))
    model.config.quantization_config = {"quant_method": "fp8"}  # type: ignore[union-attr]
    config = json.loads(policy_files(model, tmp_path / "gemma3", dtype=torch.float32)["config.json"])
    levels = (config, config["text_config"], config["vision_config"])
    assert [level["dtype"] for level in levels] == ["float32"] * 3
    assert "quantization_config" not in config and config["architectures"] == ["Gemma3ForConditionalGeneration"]


def test_the_config_of_what_is_saved_and_published_is_one_that_transformers_4_reads(
    models: Mapping[str, Path], tmp_path: Path
) -> None:
    model, saved = saved_again(models["gpt_neox"], tmp_path / "saved", dtype=torch.bfloat16)
    exported = exported_again(model, models["gpt_neox"], tmp_path / "exported", dtype=torch.bfloat16)
    for directory in (saved, exported):
        said = json.loads((directory / "config.json").read_text())
        older = {"rotary_emb_base": 10000.0, "rotary_pct": 0.25, "rope_scaling": None, "torch_dtype": "bfloat16"}
        assert said | older == said


def test_the_config_names_no_code_and_no_files_of_the_start_model(models: Mapping[str, Path], tmp_path: Path) -> None:
    """Programs that run a model's own code look for it beside the saved one, and fail."""
    start = shutil.copytree(models[TEXT], tmp_path / "start")
    (start / "model.safetensors").rename(start / "own.safetensors")
    said = json.loads((start / "config.json").read_text())
    said |= {"transformers_weights": "own.safetensors", "auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}}
    (start / "config.json").write_text(json.dumps(said))
    config = json.loads(policy_files(load_model(start), start, dtype=torch.bfloat16)["config.json"])
    assert not config.keys() & {"transformers_weights", "auto_map"}


def test_the_config_says_how_a_router_with_a_bias_chooses(models: Mapping[str, Path], tmp_path: Path) -> None:
    """The keys of DeepSeek-V3's own config: without them vLLM has no place for the bias (KeyError)."""
    keys = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    start = shutil.copytree(models["deepseek_v3, experts"], tmp_path / "start")
    said = json.loads((start / "config.json").read_text())
    assert said | keys == said
    written = {}
    for name, known in (("without", {}), ("with", {**keys, "scoring_func": "softmax"})):
        bare = {key: value for key, value in said.items() if key not in keys}
        (start / "config.json").write_text(json.dumps({**bare, **known}))
        written[name] = json.loads(policy_files(load_model(start), start, dtype=torch.bfloat16)["config.json"])
    assert written["without"] | keys == written["without"]
    assert written["with"]["scoring_func"] == "softmax", "what the config says is kept"
    dense = load_model(models["qwen3_moe"])
    assert "topk_method" not in json.loads(
        policy_files(dense, models["qwen3_moe"], dtype=torch.bfloat16)["config.json"]
    )


def test_the_routers_bias_is_float32_in_policies_snapshots_and_digests(routed: Any) -> None:
    tensors = dict(policy_tensors(routed, dtype=torch.bfloat16))
    assert tensors[BIAS].numpy().tolist() == pytest.approx([7.001, 7.002, 7.003, 7.004], abs=1e-6)
    # From 5.24 on the class names the router, too.
    kept = {BIAS} | ({ROUTER} if Version(transformers.__version__) >= Version("5.24") else set())
    assert {name for name, tensor in tensors.items() if tensor.dtype != "bfloat16"} == kept
    assert list(described_tensors(routed, dtype=torch.bfloat16)) == [(n, t.dtype, t.shape) for n, t in tensors.items()]
    where: dict[str, Any] = {"dtype": torch.bfloat16, "rank": 0, "layout": RankLayout()}
    parts = Snapshots(routed, **where, device=torch.device("cpu"), are_shared=True).take(0)
    assert {part.name: (part.dtype, part.shape, bytes(part.data())) for part in parts} == {
        name: (tensor.dtype, tensor.shape, bytes(tensor.data)) for name, tensor in tensors.items()
    }
    assert share_bytes(routed, **where) == sum(tensor.size_bytes for tensor in tensors.values())
    assert model_digest(routed, dtype=torch.bfloat16, gang=Gang()) == held_digest(tensors)


def test_the_embedded_engine_holds_what_is_published(routed: Any, models: Mapping[str, Path]) -> None:
    tensors = dict(policy_tensors(routed, dtype=torch.bfloat16))
    with write_files(policy_files(routed, models["deepseek_v3, experts"], dtype=torch.bfloat16)) as directory:
        model = loader.load_model(Path(directory), tensors, context_length=64)
    assert held_digest(weights.held_tensors(model, tensors)) == held_digest(tensors)
    assert weights.policy_memory(model, tensors)[BIAS].dtype == torch.float32
    gap = (logits_of(model) - logits_of(routed)).abs().max()
    assert gap < 0.05, "of bfloat16"
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    change = TensorChange(bits=np.array([0x3F80], "<u2"), positions=np.array([3]))
    weights.write_changes(model, {name: (change,)}, names=tensors)
    fused = model.get_parameter("model.layers.1.mlp.experts.gate_up_proj")
    assert float(fused[2, 8].flatten()[3]) == 1.0
    held = weights.held_tensors(model, tensors)
    assert {each for each in tensors if bytes(held[each].data) != bytes(tensors[each].data)} == {name}


def test_experts_that_the_source_has_fused_stay_fused(models: Mapping[str, Path], tmp_path: Path) -> None:
    model: Any = load_model(models["qwen3_moe"])
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    _, saved = saved_again(tmp_path / "fused", tmp_path / "saved")
    assert "model.layers.0.mlp.experts.gate_up_proj" in names_in(saved) == names_in(tmp_path / "fused")


def test_tensors_that_are_no_range_keep_their_names(models: Mapping[str, Path]) -> None:
    from transformers.core_model_loading import Transpose, WeightConverter

    model: Any = load_model(models["qwen3, tied"])
    model._weight_conversions = [WeightConverter("mlp.turned", "mlp.up_proj.weight", operations=[Transpose(0, 1)])]
    name = "model.layers.0.mlp.up_proj.weight"
    assert saved_tensors(model, {name: (6, 4)})[name] == (SavedTensor(name=name, source=name, start=0, shape=(6, 4)),)


def test_a_tokenizer_of_transformers_5_is_saved_as_one_that_4_reads(models: Mapping[str, Path], tmp_path: Path) -> None:
    start = shutil.copytree(models["qwen3, tied"], tmp_path / "start")
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(start)
    assert json.loads((start / "tokenizer_config.json").read_text())["tokenizer_class"] == "TokenizersBackend"
    _, saved = saved_again(start, tmp_path / "saved")
    said = json.loads((saved / "tokenizer_config.json").read_text())
    assert said["tokenizer_class"] == "PreTrainedTokenizerFast" and "extra_special_tokens" not in said
    assert said["additional_special_tokens"] == ["<|im_start|>"]
    assert tokenizer_problems(saved, tokenizer) == []


def test_all_small_files_are_kept(models: Mapping[str, Path], tmp_path: Path) -> None:
    kept = [
        "additional_chat_templates/tool_use.jinja",
        "chat_template.jinja",
        "config.json",
        "preprocessor_config.json",
        "processor_config.json",
        "qwen.tiktoken",
        "spiece.model",
        "tekken.json",
        "tokenizer.json",
        "video_preprocessor_config.json",
        "vocab.json",
    ]
    for name in [*kept, "tokenizer_old/x.txt", "model.safetensors", "model.safetensors.index.json", "._vocab.json"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    files = small_files(tmp_path, (*MODEL_FILES, *TOKENIZER_FILES))
    assert files == {name: name.encode() for name in kept}
    with write_files(files) as directory:
        assert {path.relative_to(directory).as_posix() for path in Path(directory).rglob("*") if path.is_file()} == set(
            kept
        )
    (tmp_path / "tokenizer:old.json").write_text("")
    with pytest.raises(CorruptObjectError, match=r"tokenizer:old\.json cannot be used"):
        small_files(tmp_path, (*MODEL_FILES, *TOKENIZER_FILES))
