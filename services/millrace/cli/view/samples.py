"""Samples in a terminal: one line each, or the whole conversation.

What a model wrote may hold anything: control characters are shown as signs, so no sample can steer a terminal.
"""

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from millrace.cli.offline.samples import SampleRecord
from millrace.cli.view.paint import Paint
from millrace.cli.view.text import printable, table
from millrace.readers.exports.conversation import content_of, given_of, messages_of

if TYPE_CHECKING:
    from millrace.rollouts.types import Rollout

PLAIN = Paint()
_MAX_CELL = 60


def sample_table(samples: Sequence[SampleRecord], *, paint: Paint = PLAIN) -> str:
    """One line a sample: where it belongs, its reward, and the beginnings of prompt and reply."""
    rows = []
    for found in samples:
        rollout, messages = found.rollout, messages_of(found.rollout)
        first = next((content_of(m) for m in messages if m.get("role") == "user"), "")
        last = content_of(messages[-1]) if messages and messages[-1].get("role") != "user" else ""
        rows.append(
            [
                found.id,
                f"{rollout.env}{_evaluated(rollout)}",
                f"{rollout.ordinal}.{rollout.member}",
                str(rollout.status),
                _reward(rollout),
                str(rollout.num_tokens or "–"),
                _cell(first),
                _cell(last if rollout.error is None else f"{rollout.error.type}: {rollout.error.message}"),
            ]
        )
    return table(
        rows,
        header=["id", "environment", "task", "status", "reward", "tokens", "prompt", "reply or error"],
        paint=paint.sample_cell,
    )


def sample_lines(found: SampleRecord) -> Iterator[str]:
    """A sample in full."""
    rollout = found.rollout
    yield (
        f"── {found.id}  batch {found.step} (of step {found.step + 1})  {rollout.env}{_evaluated(rollout)}  "
        f"task {rollout.ordinal}.{rollout.member}  {rollout.status}  "
        f"reward {_reward(rollout)}  {rollout.num_tokens or '–'} tokens  {rollout.num_turns or '–'} turns  "
        f"policy {_versions(rollout)}  {rollout.seconds:.1f} s"
    )
    metrics = "  ".join(f"{name} {value:.3g}" for name, value in sorted(rollout.metrics.items()))
    if metrics or rollout.stop_condition:
        yield printable(f"   {metrics}  stop: {rollout.stop_condition or '–'}").rstrip()
    if rollout.error is not None:
        yield printable(f"   {rollout.error.type}: {rollout.error.message}")
        yield from (printable(f"   {line}") for line in rollout.error.frames.splitlines())
    for name, value in given_of(rollout).items():
        yield printable(f"   {name}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}")
    for message in messages_of(rollout):
        yield f"{printable(str(message.get('role', '?')))}:"
        yield from (f"  {line}" for line in printable(content_of(message)).split("\n"))
    yield ""


def _reward(rollout: "Rollout") -> str:
    """Return the advantage as text: one that failed has none."""
    return f"{rollout.reward:.3f}" if rollout.error is None else "–"


def _versions(rollout: "Rollout") -> str:
    """Return the oldest and the newest version that answered; none did where no token came."""
    if rollout.min_version is None:
        return "–"
    oldest, newest = f"v{rollout.min_version}", f"v{rollout.max_version}"
    return oldest if oldest == newest else f"{oldest}–{newest}"


def _evaluated(rollout: "Rollout") -> str:
    """Behind the environment of a rollout with which a run's policy was evaluated: its version."""
    if rollout.purpose.value != "eval" or rollout.min_version is None:
        return ""
    newest = "" if rollout.min_version == rollout.max_version else f"–v{rollout.max_version}"
    return f" (eval of v{rollout.min_version}{newest})"


def _cell(text: str) -> str:
    line = printable(text.replace("\n", "⏎"))
    return line if len(line) <= _MAX_CELL else line[: _MAX_CELL - 1] + "…"
