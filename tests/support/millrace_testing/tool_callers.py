"""A tiny model that calls tools: the example's, warmed up on conversations with the tool of `letter_tools`."""

import json
import random
from pathlib import Path
from typing import Any

from millrace_testing import tool_templates
from millrace_testing.workplaces import EXAMPLES, Workplace

BASE = Path("outputs") / "reverse-text" / "base"
MODEL = "outputs/reverse-text/caller/model"
STEPS = 60
_TOOLS = [{"type": "function", "function": {"name": "look"}}]


def _row(word: str, code: str) -> dict[str, Any]:
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
    workplace.run(str(EXAMPLES / "make_model.py"))
    template = tool_templates.hermes(shows=tool_templates.NAMES_ONLY)
    (workplace.path / BASE / "chat_template.jinja").write_text(template)
    rng = random.Random(0)

    def syllables(count: int) -> str:
        return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(count))

    rows = [json.dumps(_row(syllables(rng.randint(2, 3)), syllables(1))) for _ in range(2000)]
    (workplace.path / "calls.jsonl").write_text("\n".join(rows))
    argv = ["--data.name", "calls.jsonl", "--data.seq-len", "256", "--data.batch-size", "32"]
    argv += ["--max-steps", str(STEPS), "--run.name", "caller"]
    workplace.millrace("sft", "@", str(EXAMPLES / "sft.toml"), *argv)
