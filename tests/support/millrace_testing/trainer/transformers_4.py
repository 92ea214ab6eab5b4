"""What transformers 4 writes, and what it reads of what Millrace saves: a process of its own with another transformers.

PYTHONPATH=.venv-transformers-4 python -m millrace_testing.trainer.transformers_4 < questions.json
"""

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

_LENGTH = 12
_TEXT = "<|im_start|>user\nnaïve 12<|im_end|>"


def ask(packages: Path, questions: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return what transformers 4, which is in `packages`, answers: `make` writes models, `read` loads directories."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "millrace_testing.trainer.transformers_4"],
        input=json.dumps(questions),
        env={"PYTHONPATH": str(packages), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def reading(directory: Path, *, dtype: str = "auto", **how: Any) -> dict[str, Any]:
    """Return what this process's transformers reads: the class, what is left and logits by way of loading; the
    tokenizer.
    """
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    [architecture] = AutoConfig.from_pretrained(directory).architectures
    found: dict[str, Any] = {"transformers": transformers.__version__, "ways": {}}
    for way, loader in {"class": getattr(transformers, architecture), "auto": AutoModelForCausalLM}.items():
        model, info = loader.from_pretrained(directory, dtype=dtype, output_loading_info=True, **how)
        left = {key: sorted(map(str, names)) for key, names in info.items() if names}
        made = {"class": type(model).__name__, "dtype": str(model.dtype), "left": left}
        found["ways"][way] = made | {"logits": logits_of(model).tolist()}
    tokenizer = AutoTokenizer.from_pretrained(directory)
    special = {name: tokenizer.convert_tokens_to_ids(token) for name, token in _named(tokenizer)}
    return found | {
        "tokenizer": {
            "templates": tokenizer.chat_template,
            "vocabulary": tokenizer.get_vocab(),
            "tokens": tokenizer(_TEXT)["input_ids"],
            "text": tokenizer.decode(tokenizer(_TEXT)["input_ids"], skip_special_tokens=True),
            "special tokens": special,
        }
    }


def _named(tokenizer: Any) -> Iterable[tuple[str, str]]:
    """Yield the special tokens, which have other places in transformers 4 and 5."""
    yield from {"eos": tokenizer.eos_token, "pad": tokenizer.pad_token}.items()
    more = getattr(tokenizer, "extra_special_tokens", None)
    for token in more if isinstance(more, list) else tokenizer.additional_special_tokens:
        yield str(token), str(token)


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    """Return the logits [T, V] of a short row."""
    vocabulary = model.config.get_text_config().vocab_size
    token_ids = torch.tensor([[(7 * index + 3) % min(vocabulary, 60) for index in range(_LENGTH)]])
    return model.eval()(input_ids=token_ids, use_cache=False).logits[0].float()


def main() -> None:
    """Answer the questions on standard input with one line of JSON."""
    import transformers

    from millrace_testing.inference.tiny import TEMPLATE, tiny_tokenizer
    from millrace_testing.trainer.families import make_named

    transformers.logging.set_verbosity_error()  # pyright: ignore[reportPrivateImportUsage]
    answers: list[Any] = []
    for question in json.load(sys.stdin):
        try:
            if (where := question.get("read")) is not None:
                answers.append(reading(Path(where), **question.get("how", {})))
            else:
                made = make_named(question["make"], Path(question["into"]), **question["changes"])
                tokenizer = tiny_tokenizer()
                tokenizer.chat_template = {"default": TEMPLATE, "tool_use": f"{TEMPLATE}!"}
                tokenizer.save_pretrained(made)
                answers.append(str(made))
        except Exception as error:  # noqa: BLE001 - of foreign code on foreign files: the answer is what it said
            answers.append({"error": f"{type(error).__name__}: {error}"})
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
