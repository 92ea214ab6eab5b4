"""Makes what the reverse-text example starts from, without a download.

    outputs/reverse-text/base        an untrained Qwen3 of 124 288 parameters with a byte-level tokenizer (ChatML)
    outputs/reverse-text/sft.jsonl   pairs of a training text and the text reversed, to warm it up

The texts are the environment's own training texts; the held-out texts of its evaluation are none of them, because the
environment cuts one list of unique texts in two.

Both are written whole or not at all, the pairs last: where they exist, nothing has to be made again.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch
from reverse_text import make_texts
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

VOCABULARY = 272  # 259 are used; a multiple of 16 is kinder to the matrix kernels
WIDTH = 64
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# The defaults of the environment, which rl.toml names too.
NUM_TRAIN, NUM_EVAL, TASK_SEED = 2000, 64, 0


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte and three special ones: every text of n bytes has n tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def make_model(tokenizer: PreTrainedTokenizerFast, *, seed: int, heads: int) -> Qwen3ForCausalLM:
    """The untrained model. `initializer_range` is four times the usual: at this size 0.02 learns far slower."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=WIDTH // heads,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        tie_word_embeddings=True,
        initializer_range=0.08,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    return model


def make_pairs() -> list[dict[str, str]]:
    """Prompts and completions from the training texts."""
    training = make_texts(NUM_EVAL + NUM_TRAIN, TASK_SEED)[NUM_EVAL:]
    return [{"prompt": text, "completion": text[::-1]} for text in training]


def write_base(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, base: Path) -> None:
    """Writes model and tokenizer to a directory beside `base` and then puts it in the place of `base`."""
    fresh, old = base.with_name(f".{base.name}.new"), base.with_name(f".{base.name}.old")
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    model.save_pretrained(fresh)
    tokenizer.save_pretrained(fresh)
    if base.exists():
        base.rename(old)
    fresh.rename(base)
    shutil.rmtree(old, ignore_errors=True)


def write_pairs(pairs: list[dict[str, str]], data: Path) -> None:
    """Writes the pairs as JSON lines to a file beside `data` and then puts it in the place of `data`."""
    fresh = data.with_name(f".{data.name}.new")
    fresh.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    fresh.replace(data)


def main() -> None:
    """Writes model, tokenizer and pairs."""
    parser = argparse.ArgumentParser(description="Make the tiny model and the warm-up data of the example.")
    parser.add_argument("--output", type=Path, default=Path("outputs/reverse-text"), help="where to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    parser.add_argument(
        "--heads",
        type=int,
        choices=(2, 4),
        default=4,
        help="attention heads; 2 for vLLM on a CPU, where a head has 32 numbers or more",
    )
    arguments = parser.parse_args()
    disable_progress_bar()
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed=arguments.seed, heads=arguments.heads)
    pairs = make_pairs()
    base, data = arguments.output / "base", arguments.output / "sft.jsonl"
    data.unlink(missing_ok=True)  # until the new model is there, nothing says that both are
    write_base(model, tokenizer, base)
    write_pairs(pairs, data)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{base}: {parameters} parameters", file=sys.stderr)
    print(f"{data}: {len(pairs)} pairs", file=sys.stderr)


if __name__ == "__main__":
    main()
