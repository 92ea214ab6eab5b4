"""Adapters of PEFT on a base: what is merged, what is refused and in which words. PEFT's own merge: the long lane."""

import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.errors import CapacityError, CorruptObjectError, InvalidStateError, NotFoundError, UnavailableError
from millrace.models.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, WeightFiles
from millrace.policies.peft.config import parse_peft_config
from millrace.policies.peft.directory import is_adapter, open_adapter
from millrace.policies.tensors import TensorBytes, as_float32, pack_safetensors, read_tensors

Arrays = dict[str, np.ndarray]
PREFIX = "base_model.model."
PLAIN = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
Q = "model.layers.{}.self_attn.q_proj"


def values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def write(path: Path, tensors: Arrays) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pack_safetensors((name, TensorBytes.from_numpy(array)) for name, array in tensors.items())[0])


def model(*, is_tied: bool = False) -> Arrays:
    found = {f"{Q.format(layer)}.weight": values(6, 4, seed=layer) for layer in range(2)}
    found |= {f"{Q.format(layer)}.bias": values(6, seed=layer) for layer in range(2)}
    found |= {"model.embed_tokens.weight": values(8, 4), "model.norm.weight": values(4)}
    return found if is_tied else found | {"lm_head.weight": values(8, 4, seed=9)}


def write_base(path: Path, *, is_tied: bool = False, **config: Any) -> Path:
    write(path / "model.safetensors", model(is_tied=is_tied))
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 8, **config}))
    return path


def lora(*layers: int, rank: int = 2) -> Arrays:
    return {
        f"{PREFIX}{Q.format(layer)}.lora_{part}.weight": values(*shape, seed=5 + layer)
        for layer in layers
        for part, shape in (("A", (rank, 4)), ("B", (6, rank)))
    }


def write_adapter(path: Path, tensors: Arrays, **config: Any) -> Path:
    write(path / ADAPTER_WEIGHTS, tensors)
    (path / ADAPTER_CONFIG).write_text(json.dumps(PLAIN | config))
    return path


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_base(tmp_path / "base")


@pytest.mark.parametrize(
    "change",
    [
        {"init_lora_weights": "pissa_niter_4"},
        {"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}},
        {"init_lora_weights": "corda"},
        {"init_lora_weights": "lora_ga"},
        {"init_lora_weights": "of_next_year"},
        {"layer_replication": [[0, 2], [1, 2]]},
        {"alora_invocation_tokens": [3]},
        {"use_qalora": True},
        {"megatron_config": {"a": 1}},
        {"a_field_of_next_year": 0.5},
        {"task_type": "SEQ_CLS"},
        {"target_modules": "all-linear"},
        {"peft_type": "IA3"},
    ],
)
def test_what_is_not_known_is_refused_by_field_and_value(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidStateError) as raised:
        parse_peft_config(json.dumps(PLAIN | change).encode(), source="here/adapter_config.json")
    key, value = next(iter(change.items()))
    assert raised.value.reason == "ADAPTER_NOT_SUPPORTED"
    assert raised.value.message.startswith("here/adapter_config.json")
    assert raised.value.message.endswith(f"{key} is {json.dumps(value)}") and raised.value.remedy


@pytest.mark.parametrize(
    "change",
    [
        {"init_lora_weights": False, "lora_dropout": 0.5, "megatron_core": "megatron.core", "peft_version": "0.99"},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}, "qalora_group_size": 16, "revision": "main"},
        {"a_field_of_next_year": None, "another": False, "third": [], "merge_weights": False, "task_type": None},
    ],
)
def test_fields_without_effect_on_a_merge_may_say_what_they_like(change: dict[str, Any]) -> None:
    plain = parse_peft_config(json.dumps(PLAIN).encode(), source="x")
    assert parse_peft_config(json.dumps(PLAIN | change).encode(), source="x") == plain


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"r": 0}, "r is 0"),
        ({"r": "8"}, "r is a JSON str"),
        ({"target_modules": None}, "target_modules"),
        ({"target_modules": "q_proj("}, "no regular expression"),
        ({"rank_pattern": {"q": 0}}, "rank_pattern"),
        ({"use_dora": "yes"}, "use_dora"),
    ],
)
def test_a_config_that_is_none(change: dict[str, Any], said: str) -> None:
    with pytest.raises(CorruptObjectError, match=said) as raised:
        parse_peft_config(json.dumps(PLAIN | change).encode(), source="here")
    assert raised.value.reason == "ADAPTER_CONFIG_INVALID"


def test_layers_are_chosen_and_scaled_by_the_rules_of_peft() -> None:
    patterns = {"layers.0.self_attn.q_proj": 4, r".*q_pro[a-j]": 8}
    change = {"rank_pattern": patterns, "alpha_pattern": {"q_proj": 6}, "use_rslora": True, "layers_to_transform": 1}
    found = parse_peft_config(json.dumps(PLAIN | change).encode(), source="x")
    assert [found.rank(Q.format(layer)) for layer in range(2)] == [4, 8]
    assert found.scaling(Q.format(0)) == 3.0
    assert [layer for layer in range(3) if found.targets(Q.format(layer))] == [1]
    assert not found.targets("model.layers.1.self_attn.qq_proj")


Damage = tuple[Arrays, dict[str, Any], str]
HALF = {name: array for name, array in lora(0, 1).items() if "layers.0" not in name or "lora_B" in name}


@pytest.mark.parametrize(
    ("tensors", "config", "said"),
    [
        (lora(0), {}, r"layers\.1\.self_attn\.q_proj has no adapter"),
        (HALF, {}, r"layers\.0\.self_attn\.q_proj\.lora_A\.weight is not there"),
        (lora(0, 1, rank=3), {}, r"lora_A\.weight is float32\[3, 4\], the model takes \[2, 4\]"),
        (lora(0, 1, 2), {}, r"layers\.2\.self_attn\.q_proj is no layer"),
        (lora(0, 1), {"layers_to_transform": [0]}, r"layers\.1\.self_attn\.q_proj has an adapter that the config"),
        (lora(0, 1) | {f"{PREFIX}score.weight": values(2, 4)}, {}, r"score\.weight is no tensor of the model"),
        (lora(0, 1) | {f"{PREFIX}{Q.format(0)}.lora_velora_embed": values(1)}, {}, "lora_velora_embed is no tensor"),
        (lora(0, 1) | {f"{PREFIX}model.norm.weight": values(5)}, {}, r"norm\.weight is float32\[5\], the model takes"),
        (lora(0, 1), {"modules_to_save": ["lm_head"]}, r"lm_head\.weight is not there"),
        (lora(0, 1), {"use_dora": True}, r"lora_magnitude_vector is not there"),
        (lora(0, 1), {"lora_bias": True}, r"lora_B\.bias is not there"),
        (lora(0, 1) | {f"{PREFIX}lm_head.weight": values(9, 4)}, {}, "embeddings have"),
        (
            {f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta": values(1, 4)},
            {"target_modules": [], "trainable_token_indices": [8]},
            "has no row for token 8",
        ),
        (
            {f"{PREFIX}{Q.format(0)}.{name}bias": values(6) for name in ("", "base_layer.")},
            {"target_modules": []},
            r"q_proj\.bias twice",
        ),
        ({}, {"target_modules": []}, "it has no tensor"),
    ],
)
def test_every_tensor_has_a_place_and_every_place_a_tensor(
    base: Path, tmp_path: Path, tensors: Arrays, config: dict[str, Any], said: str
) -> None:
    adapter = write_adapter(tmp_path / "adapter", tensors, **config)
    with pytest.raises(InvalidStateError, match=said) as raised:
        open_adapter(adapter, base)
    assert raised.value.reason == "ADAPTER_MODEL_MISMATCH" and str(adapter) in raised.value.message


EXPERTS = "model.layers.0.mlp.experts"
ON_EXPERTS: dict[str, Any] = {"target_modules": None, "target_parameters": ["mlp.experts.gate_up_proj", "down_proj"]}
IN_NESTS = {
    f"{PREFIX}{EXPERTS}.{name}.weight": values(*shape)
    for name, shape in {
        "base_layer.lora_A": (6, 4),
        "base_layer.lora_B": (10, 6),
        "lora_A": (6, 5),
        "lora_B": (4, 6),
    }.items()
}
"""Of three experts with matrices [5, 4] twice and [4, 5], in the order in which the module has them."""


def write_mixture(path: Path, *, model_type: str = "qwen3_moe", num_experts: int = 3) -> Path:
    shapes = {"gate_proj": (5, 4), "up_proj": (5, 4), "down_proj": (4, 5)}
    experts = {
        f"{EXPERTS}.{expert}.{name}.weight": values(*shape, seed=expert)
        for expert in range(num_experts)
        for name, shape in shapes.items()
    }
    write(path / "model.safetensors", experts | {"lm_head.weight": values(8, 4)})
    (path / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": 8}))
    return path


def test_an_adapter_of_fused_experts_changes_the_tensors_of_each(tmp_path: Path) -> None:
    base = write_mixture(tmp_path / "base")
    adapter = write_adapter(tmp_path / "adapter", IN_NESTS, **ON_EXPERTS, alpha_pattern={"experts.down_proj": 6})
    merged = read_tensors(open_adapter(adapter, base).merge(tmp_path / "merged") / "model.safetensors")
    old = read_tensors(base / "model.safetensors")
    part = {name.removeprefix(f"{PREFIX}{EXPERTS}."): tensor for name, tensor in IN_NESTS.items()}
    low, high = part["base_layer.lora_A.weight"], part["base_layer.lora_B.weight"]
    for expert in range(3):
        change = 2.0 * high[:, expert::3] @ low[2 * expert : 2 * expert + 2]
        down = 3.0 * part["lora_B.weight"][:, expert::3] @ part["lora_A.weight"][2 * expert : 2 * expert + 2]
        for name, wanted in {"gate_proj": change[:5], "up_proj": change[5:], "down_proj": down}.items():
            name = f"{EXPERTS}.{expert}.{name}.weight"
            np.testing.assert_allclose(as_float32(merged[name]) - as_float32(old[name]), wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (dict(list(IN_NESTS.items())[1:]), r"base_layer\.lora_A\.weight is not there, which is on .*gate_up_proj"),
        (
            IN_NESTS | {f"{PREFIX}{EXPERTS}.lora_A.weight": values(6, 4)},
            r"\[6, 4\], .*experts\.down_proj takes \[6, 5\]",
        ),
        (IN_NESTS | {f"{PREFIX}{EXPERTS}.lora_B.bias": values(4)}, r"lora_B\.bias is nothing that a parameter"),
        (IN_NESTS | {f"{PREFIX}{EXPERTS}.base_layer.base_layer.lora_A.weight": values(6, 4)}, "is no layer"),
    ],
)
def test_adapters_of_experts_have_all_their_parts_and_no_others(tmp_path: Path, tensors: Arrays, said: str) -> None:
    adapter = write_adapter(tmp_path / "adapter", tensors, **ON_EXPERTS)
    with pytest.raises(InvalidStateError, match=said) as raised:
        open_adapter(adapter, write_mixture(tmp_path / "base"))
    assert raised.value.reason == "ADAPTER_MODEL_MISMATCH"


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("a_family_of_next_year", {}),
        ("qwen3_moe", {"target_parameters": ["mlp.gate.weight"]}),
        ("qwen3_moe", {"target_parameters": ["down_proj", "down_proj_bias"]}),
        ("qwen3_moe", {"use_dora": True}),
        ("qwen3_moe", {"init_lora_weights": "pissa"}),
    ],
)
def test_parameters_that_are_not_known_are_refused_by_the_field(
    tmp_path: Path, model_type: str, config: dict[str, Any]
) -> None:
    adapter = write_adapter(tmp_path / "adapter", IN_NESTS, **{**ON_EXPERTS, **config})
    with pytest.raises(InvalidStateError, match=r"target_parameters is \[") as raised:
        open_adapter(adapter, write_mixture(tmp_path / "base", model_type=model_type))
    assert raised.value.reason == "ADAPTER_NOT_SUPPORTED" and raised.value.metadata == {"field": "target_parameters"}


def test_names_without_the_prefix_of_peft_are_refused(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", {name.removeprefix(PREFIX): a for name, a in lora(0, 1).items()})
    with pytest.raises(CorruptObjectError, match="is not named as an adapter's"):
        open_adapter(adapter, base)


def test_a_sum_is_made_in_float32_and_only_the_named_files_are_read(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", lora(0, 1), base_model_name_or_path="org/other")
    write(base / "model-00001-of-00002.safetensors", {f"{Q.format(0)}.weight": values(6, 4, seed=77)})
    write(adapter / "adapter_model_old.safetensors", lora(0))
    opened = open_adapter(adapter, base)
    merged = read_tensors(opened.merge(tmp_path / "merged") / "model.safetensors")
    arrays = model()
    assert merged.keys() == arrays.keys()
    for name, array in arrays.items():
        low = lora(0, 1).get(f"{PREFIX}{name.removesuffix('.weight')}.lora_A.weight")
        high = lora(0, 1).get(f"{PREFIX}{name.removesuffix('.weight')}.lora_B.weight")
        wanted = array if low is None or high is None else array + 2.0 * (high @ low)
        np.testing.assert_array_equal(as_float32(merged[name]), wanted)
    assert [note.partition(" has ")[2] for note in opened.notes[:2]] == [
        "model-00001-of-00002.safetensors beside its weights, which are not read",
        "adapter_model_old.safetensors beside adapter_model.safetensors, which are not read",
    ]
    assert "was trained on org/other" in opened.notes[2]


def test_values_that_are_not_finite_are_refused(base: Path, tmp_path: Path) -> None:
    tensors = lora(0, 1)
    tensors[f"{PREFIX}{Q.format(1)}.lora_B.weight"][0, 0] = np.nan
    adapter = write_adapter(tmp_path / "adapter", tensors)
    with pytest.raises(InvalidStateError, match=r"not finite, in .*layers\.1.*lora_B") as raised:
        open_adapter(adapter, base).merge(tmp_path / "merged")
    assert raised.value.reason == "ADAPTER_NOT_FINITE" and not (tmp_path / "merged").exists()


@pytest.mark.parametrize("name", ["model.embed_tokens", "lm_head"])
def test_an_adapter_on_one_end_of_a_tied_weight_is_refused(tmp_path: Path, name: str) -> None:
    tied = write_base(tmp_path / "base", is_tied=True)
    parts = {"lora_embedding_A": values(2, 8), "lora_embedding_B": values(4, 2)}
    if name == "lm_head":
        parts = {"lora_A.weight": values(2, 4), "lora_B.weight": values(8, 2)}
    tensors = {f"{PREFIX}{name}.{part}": array for part, array in parts.items()}
    adapter = write_adapter(tmp_path / "adapter", tensors, target_modules=[name])
    with pytest.raises(InvalidStateError, match=f"adapts {name}, whose weight is another layer's") as raised:
        open_adapter(adapter, tied)
    assert raised.value.reason == "LORA_TARGET_TIED"


def test_a_head_that_was_trained_apart_is_untied(tmp_path: Path) -> None:
    tied = write_base(tmp_path / "base", is_tied=True, tie_word_embeddings=True)
    saved = lora(0, 1) | {f"{PREFIX}model.embed_tokens.weight": values(8, 4, seed=3)}
    adapter = write_adapter(tmp_path / "adapter", saved, modules_to_save=["embed_tokens"])
    merged = open_adapter(adapter, tied).merge(tmp_path / "merged")
    tensors = read_tensors(merged / "model.safetensors")
    np.testing.assert_array_equal(as_float32(tensors["lm_head.weight"]), model()["model.embed_tokens.weight"])
    np.testing.assert_array_equal(as_float32(tensors["model.embed_tokens.weight"]), values(8, 4, seed=3))
    assert json.loads((merged / "config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize("place", ["quantization_config", "compression_config", "text_config"])
def test_a_quantized_base_is_refused(tmp_path: Path, place: str) -> None:
    said = {"quant_method": "fp8"}
    base = write_base(tmp_path / "base", **{place: {"quantization_config": said} if place == "text_config" else said})
    with pytest.raises(InvalidStateError) as raised:
        open_adapter(write_adapter(tmp_path / "adapter", lora(0, 1)), base)
    assert raised.value.reason == "MODEL_QUANTIZED" and "dequantize()" in (raised.value.remedy or "")


@pytest.mark.parametrize("is_there", [True, False])
def test_a_model_that_cannot_be_written_leaves_nothing(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    target = tmp_path / "merged"
    if is_there:
        target.mkdir()
    adapter = write_adapter(tmp_path / "adapter", lora(0, 1))
    whole, seen = Path.write_bytes, list[list[str]]()

    def write_bytes(path: Path, data: bytes) -> int:
        seen.append(sorted(each.name for each in target.iterdir() if not each.name.startswith(".")))
        if path.suffix == ".safetensors":
            raise OSError(errno.ENOSPC, "No space left on device")
        return whole(path, data)

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    with pytest.raises(CapacityError, match="No space left") as raised:
        open_adapter(adapter, base).merge(target)
    assert raised.value.remedy == "free disk space, or name a directory elsewhere"
    assert target.exists() is is_there and not any(tmp_path.glob("merged/*"))
    assert seen and not any(seen)  # until all is written, a killed command leaves no model
    monkeypatch.undo()
    assert sorted(path.name for path in open_adapter(adapter, base).merge(target).iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


def test_a_place_that_cannot_be_written_is_told_as_that_and_not_as_the_object_store(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", lora(0, 1))
    (tmp_path / "file").write_text("")
    with pytest.raises(UnavailableError, match="Not a directory") as raised:
        open_adapter(adapter, base).merge(tmp_path / "file" / "merged")
    assert raised.value.reason == "DIRECTORY_UNUSABLE"
    assert raised.value.remedy == "check that the directory exists and is writable, or name another one"


def test_the_merged_model_has_weights_of_the_usual_name(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", transformers_weights="own.safetensors")
    (base / "model.safetensors").rename(base / "own.safetensors")
    merged = open_adapter(write_adapter(tmp_path / "adapter", lora(0, 1)), base).merge(tmp_path / "merged")
    config = json.loads((merged / "config.json").read_text())
    assert config == {"model_type": "llama", "vocab_size": 8}
    assert WeightFiles.find(merged, config).beside == ()


def test_the_tokenizer_and_the_template_of_an_adapter_count(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", lora(0, 1))
    for place, names in ((base, ("tokenizer.json", "merges.txt", "chat_template.jinja", "generation_config.json")),):
        for name in names:
            (place / name).write_text("of the base")
    (base / "tokenizer_old").mkdir()
    (base / "optimizer.pt").write_text("large")
    (adapter / "chat_template.jinja").write_text("of the adapter")
    merged = open_adapter(adapter, base).merge(tmp_path / "one")
    assert {path.name: path.read_text() for path in merged.iterdir() if path.suffix in (".jinja", ".txt")} == {
        "chat_template.jinja": "of the adapter",
        "merges.txt": "of the base",
    }
    (adapter / "added_tokens.json").write_text("of the adapter")  # no tokenizer by itself: the base's stays
    names = {path.name for path in open_adapter(adapter, base).merge(tmp_path / "part").iterdir()}
    assert {"tokenizer.json", "merges.txt", "added_tokens.json"} <= names
    (adapter / "added_tokens.json").unlink()
    (adapter / "tokenizer.json").write_text("of the adapter")
    merged = open_adapter(adapter, base).merge(tmp_path / "two")
    names = {path.name for path in merged.iterdir()}
    assert names == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert (merged / "tokenizer.json").read_text() == "of the adapter"
    assert (merged / "generation_config.json").read_text() == "of the base"
    (adapter / "generation_config.json").write_text("of the adapter")
    merged = open_adapter(adapter, base).merge(tmp_path / "three")
    assert (merged / "generation_config.json").read_text() == "of the adapter"


def test_what_is_no_adapter_or_two_things_at_once(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", lora(0, 1))
    assert is_adapter(adapter) and not is_adapter(base)
    (adapter / ADAPTER_WEIGHTS).rename(adapter / "adapter_model.bin")
    with pytest.raises(NotFoundError, match="pickle") as raised:
        open_adapter(adapter, base)
    assert ADAPTER_WEIGHTS in (raised.value.remedy or "")
    (adapter / "adapter_model.bin").unlink()
    with pytest.raises(NotFoundError, match=r"without adapter_model\.safetensors"):
        open_adapter(adapter, base)
    (base / ADAPTER_CONFIG).write_text("{}")
    with pytest.raises(InvalidStateError) as both:
        is_adapter(base)
    assert both.value.reason == "MODEL_HAS_ADAPTER"
