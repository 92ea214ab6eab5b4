"""Which renderer fits a policy: its family's own if that writes what the chat template writes."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from millrace.env_server.adapters.renderer import choose_renderer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OTHER = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
MARKS = ["<|im_start|>", "<|im_end|>"]
TOOLS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]


def save(directory: Path, *, template: str, symbols: list[str], model_type: str = "qwen3") -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate([*alphabet, "<|endoftext|>"])}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(symbols)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=template
    )
    tokenizer.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    return directory


@pytest.mark.parametrize(
    ("template", "symbols", "model_type", "wanted"),
    [
        (CHATML, MARKS + TOOLS, "qwen3", "qwen3"),
        (OTHER, MARKS + TOOLS, "qwen3", "default"),  # another format than the family's: it would be sampled with a are
        (CHATML, MARKS, "qwen3", "default"),
        (CHATML, MARKS + TOOLS, "llama", "default"),
    ],
)
def test_a_renderer_is_chosen_only_if_it_writes_what_the_template_writes(
    tmp_path: Path, template: str, symbols: list[str], model_type: str, wanted: str
) -> None:
    assert choose_renderer(save(tmp_path, template=template, symbols=symbols, model_type=model_type)) == wanted


def test_a_directory_without_a_tokenizer_has_no_renderer_of_its_own(tmp_path: Path) -> None:
    assert choose_renderer(tmp_path) == "default"
