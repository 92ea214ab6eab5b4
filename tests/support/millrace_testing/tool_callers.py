"""A tiny model that calls tools: the example's, warmed up on conversations with the tool of `letter_tools`."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from transformers import AutoTokenizer

from millrace_testing import tool_templates
from millrace_testing.workplaces import EXAMPLES, Workplace

BASE = Path("outputs") / "reverse-text" / "base"
MODEL = "outputs/reverse-text/caller/model"
STEPS = 60
Conversation = dict[str, Any]
"""A row of SFT: `messages`, and the `tools` that are offered."""
_TOOLS = [{"type": "function", "function": {"name": "look"}}]


def _row(word: str, code: str) -> Conversation:
    call = {"type": "function", "function": {"name": "look", "arguments": {"letter": word[-1]}}}
    messages = [
        {"role": "user", "content": word},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": code},
        {"role": "assistant", "content": code},
    ]
    return {"messages": messages, "tools": _TOOLS}


def warm_up(workplace: Workplace) -> None:
    """Make the model; it becomes `MODEL` in the workplace.

    The codes are drawn anew for every row, so that only who reads the tool's answer can repeat it.
    """
    rng = random.Random(0)

    def syllables(count: int) -> str:
        return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(count))

    rows = [_row(syllables(rng.randint(2, 3)), syllables(1)) for _ in range(2000)]
    template = tool_templates.hermes(shows=tool_templates.NAMES_ONLY)
    learn(workplace, rows, template=template, seq_len=256, batch_size=32)


def learn(
    workplace: Workplace,
    rows: Sequence[Conversation],
    *,
    template: str,
    seq_len: int,
    batch_size: int,
    steps: int = STEPS,
    symbols: Sequence[str] = (),
) -> None:
    """Make a model that knows these conversations, `MODEL` in the workplace; `symbols` become one token each."""
    workplace.run(str(EXAMPLES / "make_model.py"))
    base = workplace.path / BASE
    if symbols:
        tokenizer = AutoTokenizer.from_pretrained(base)
        tokenizer.add_tokens([AddedToken(symbol, normalized=False) for symbol in symbols])
        tokenizer.save_pretrained(base)
    (base / "chat_template.jinja").write_text(template)
    (workplace.path / "calls.jsonl").write_text("\n".join(map(json.dumps, rows)))
    argv = ["--data.name", "calls.jsonl", "--data.seq-len", str(seq_len), "--data.batch-size", str(batch_size)]
    argv += ["--max-steps", str(steps), "--run.name", "caller"]
    workplace.millrace("sft", "@", str(EXAMPLES / "sft.toml"), *argv)
