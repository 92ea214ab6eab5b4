"""Masks of real chat templates, from public packages, beside those of two peers: the lane `make test-templates`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from millrace_testing.templates.conversations import CONVERSATIONS
from millrace_testing.templates.families import FAMILIES, TRAINED
from millrace_testing.templates.judge import CAUSES, EQUAL, UNEXPLAINED, Judge, Sample
from millrace_testing.templates.tokenizers import make_tokenizer


@pytest.fixture(scope="module")
def comparison(template_packages: Path) -> dict[str, Any]:
    """Return what `millrace_testing.templates.compare` prints, in a process that finds the packages."""
    done = subprocess.run(
        [sys.executable, "-m", "millrace_testing.templates.compare"],
        env={**os.environ, "PYTHONPATH": str(template_packages)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_difference_from_a_peer_has_a_known_cause(comparison: dict[str, Any]) -> None:
    wrong = [
        f"{row['family']}, {row['conversation']}: {peer} {causes}"
        for row in comparison["rows"]
        for peer, causes in row["peers"].items()
        if not set(causes) <= {EQUAL, *CAUSES}
    ]
    assert not wrong, "\n".join(wrong)


def test_there_are_enough_templates_and_conversations(comparison: dict[str, Any]) -> None:
    own = {row["family"] for row in comparison["rows"] if not row["family"].startswith(TRAINED)}
    assert len(own) == len(FAMILIES) >= 25 and len(CONVERSATIONS) == 13
    assert len(comparison["rows"]) == len({(row["family"], row["conversation"]) for row in comparison["rows"]})
    compared = {peer: sum(peer in row["peers"] for row in comparison["rows"]) for peer in ("TRL", "renderers")}
    assert all(count >= 150 for count in compared.values())


def test_the_ends_of_turns_are_those_of_the_models_documents(comparison: dict[str, Any]) -> None:
    for family, end in zip(FAMILIES, comparison["ends"], strict=True):
        assert (end["answer"], end["call"]) == (family.answer, family.call), family.name
        assert set(end["all"]) == {family.eos, family.answer, *filter(None, [family.call])}, family.name


def test_every_turn_is_trained_up_to_one_stop(comparison: dict[str, Any]) -> None:
    """Of templates as they are; where the template itself marks earlier turns, some of them have no stop."""
    stops = {end["family"]: end["all"] for end in comparison["ends"]}
    for row in comparison["rows"]:
        if row["outcome"] != "trained" or row["family"] not in stops:
            continue
        messages = CONVERSATIONS[row["conversation"]]["messages"]
        assert len(row["trained"]) == sum(message["role"] == "assistant" for message in messages), row
        # GLM ends a turn with the next role's token, and no engine stops at that of a system message.
        texts = (
            row["trained"][1:] if "GLM" in row["family"] and row["conversation"] == "system amid" else row["trained"]
        )
        for text in texts:
            assert sum(text.count(stop) for stop in stops[row["family"]]) == 1, row
            assert text.endswith(tuple(stops[row["family"]])), row


def test_page_and_report_are_up_to_date(template_packages: Path, comparison: dict[str, Any]) -> None:
    from millrace_testing.templates.page import PAGE, REPORT, page, report

    remedy = "run: PYTHONPATH=.venv-templates python -m millrace_testing.templates.page"
    assert PAGE.read_text() == page(comparison), remedy
    assert REPORT.read_text() == report(comparison), remedy


@pytest.mark.templates
@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({}, EQUAL),
        ({"said": False}, UNEXPLAINED),
        ({"asked": True}, UNEXPLAINED),
        ({"header": True}, "header"),
        ({"stop": False}, "no stop"),
        ({"behind": True}, "behind the stop"),
    ],
)
def test_a_difference_without_a_cause_is_found(change: dict[str, bool], cause: str) -> None:
    from millrace.trainer.sft.rows import conversation_of

    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = make_tokenizer(template, bos=None, eos="<|im_end|>")
    parts = {
        "asked": "<|im_start|>user\nWhat is two?<|im_end|>\n",
        "header": "<|im_start|>assistant\n",
        "said": "It is 2.",
        "stop": "<|im_end|>",
        "behind": "\n",
    }

    def sample(trained: set[str]) -> Sample:
        pieces = {name: tokenizer(text, add_special_tokens=False)["input_ids"] for name, text in parts.items()}
        return Sample(
            [token for piece in pieces.values() for token in piece],
            [name in trained for name, piece in pieces.items() for _ in piece],
        )

    own = {"said", "stop"}
    theirs = (own | {name for name, flag in change.items() if flag}) - {n for n, flag in change.items() if not flag}
    conversation = conversation_of(CONVERSATIONS["one turn"])
    judge = Judge(tokenizer, {tokenizer.eos_token_id}, conversation, sample(own))
    assert judge.causes(sample(theirs)) == [cause]
