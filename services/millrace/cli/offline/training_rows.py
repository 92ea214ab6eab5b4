"""Turn rollouts into rows for `millrace sft`: whole conversations, from any engine.

A row is text; the trained model's chat template and tokenizer turn it into tokens. Conversations that would not survive
this unchanged are left out.
"""

import re
from collections import Counter
from typing import Any

from millrace.cli.offline.samples import SampleRecord
from millrace.readers.exports.conversation import messages_of
from millrace.rollouts.types import RolloutStatus

_CUT = re.compile(r"… \(\d+ characters cut\)\Z")


class TrainingRows:
    """Makes rows from samples, and counts the samples that were left out, by reason."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.left_out = Counter[str]()

    def row(self, found: SampleRecord) -> dict[str, Any] | None:
        """Return the row of a sample; None if the sample cannot be trained on."""
        messages = messages_of(found.rollout)
        if reason := _unfit(found, messages):
            self.left_out[reason] += 1
            return None
        self.num_rows += 1
        return {"messages": messages}

    def describe(self) -> str:
        """Return the number of rows, and the number of samples left out by reason."""
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.left_out.items()))
        return f"{self.num_rows} rows" + (f"; left out: {reasons}" if reasons else "")


def _unfit(found: SampleRecord, messages: list[dict[str, Any]]) -> str:
    """Return why a sample cannot be a row; empty if it can."""
    rollout = found.rollout
    if rollout.status is not RolloutStatus.OK:
        return "failed"
    if rollout.is_truncated:
        return "ended at the token limit (a row would teach to end there)"
    roles = [message.get("role") for message in messages]
    if "note" in roles or any(_CUT.search(str(message.get("content") or "")) for message in messages):
        return "too long to be kept whole"
    if "tool" in roles or any(message.get("tool_calls") for message in messages):
        return "with tools (the log does not hold their definitions)"
    if roles.count("assistant") != rollout.num_turns:
        return "with assistant messages that nobody sampled"
    if not roles or roles[-1] != "assistant" or not messages[-1].get("content"):
        return "without an answer at the end"
    return ""
