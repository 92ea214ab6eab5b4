"""Docstrings and comments are plain English, as far as a program can tell: a verb first, no figures of speech."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace_testing import syntax

ROOT = Path(__file__).parents[2]
HELPERS = "tests/support/millrace_testing"
ROOMS = tuple(
    f"services/millrace/{room}"
    for room in (
        "algorithms",
        "cli",
        "client",
        "config",
        "env_server",
        "inference",
        "local",
        "models",
        "orchestrator",
        "policies",
        "processes",
        "readers",
        "rollouts",
        "rpc",
        "runlog",
        "storage",
        "telemetry",
        "trainer",
    )
)
VERBS = frozenset(
    re.findall(
        r"\S+",
        """
        Abort Accept Accumulate Activate Add Admit Adopt Advance Allocate Allow Announce Answer Append Apply Archive Arm
        Ask Assert Assemble Assign Attend Attribute Audit Await Be Become Begin Bind Bound Bring Broadcast Build
        Cache Call Cancel
        Carry Cast Chain Change Check Choose Claim Clear Clip Close Collect Combine Commit Compare Compile
        Compress Compute Condemn Configure Confine Connect Continue Convert Copy Count Cover Create
        Credit Cut Deal Decide
        Declare Decode Delete Deliver Demand Derive Describe Digest Discard Divide Do Download Drain Draw Drive Drop
        Encode End Enter Estimate Evaluate Examine Exchange Expect Explain Export Extend Extrapolate Fail Feed Fetch
        Fill Find Fine-tune Finish Fit Flip Flush Fold Follow Forget Fork Format Free Freeze Fuzz Gather Generate Get
        Give Go Group Grow Guard Halve Hand Handle Hang Hash Have Hear Hide Hold Host Identify Ignore Import
        Insert Install Interrupt Iterate Join Judge Keep Kill Launch Lay Learn Leave Lend Let Limit List Listen
        Load Lock Log Look Lower Make Map Mark Match Measure Merge Mount Move Multiply Name Normalise Note Notice
        Offer Open Order Pack Pad Parse Pass Pause Place Plan Play Post Prepare Print Probe Process Prove
        Provide Publish Pull Put Quarantine Queue Raise Rank Read Reap Receive Recompute Record Redraw Reduce Refuse
        Register Release Remember Remove Rename Render Renew Renumber Reopen Repeat Replace Replay Report Request
        Require Reset Reshard Resolve Restore Resume Retire Return Rewrite Rotate Round Route Run Sample Save Say
        Scale Scan Schedule Scrape Score Seal See Select Send Serialise Serialize Serve Set Share Show Sign Signal
        Simulate Skip Sleep Sort Split Spread Stage Start Stay Step Stop Store Submit Sum Suspect Switch
        Take Tell Test Tick Tokenise Tokenize Trace Track Train Translate Treat Trim Try Turn Undo Unmount Update Upload
        Use Validate Verify Wait Wake Walk Warn Watch Whiten Work Wrap Write Yield Zero
        """,
    )
)
"""Verbs with which docstrings of functions begin; another one may be added."""
FIGURES = re.compile(
    r"\b(told|said|heeds?|mends?|mended|hurr(?:y|ies)|whoever|behind|of others|lies?|stands?|stood)\b", re.IGNORECASE
)
"""Words that are used for the field's own: reported, repair, after, is in, …"""
PLAIN = re.compile(r"`[^`]*`|\bstand-ins?\b|\bst(?:ands?|ood) still\b", re.IGNORECASE)
"""What may have such a word: names in the code, and the event of a process that did not run."""


def first_word(text: str) -> str:
    """Return the verb with which a docstring begins; empty if it begins with anything else."""
    found = re.match(r"([A-Z][a-z]+(?:-[a-z]+)?)(?!['’-])\b( of\b)?", text)
    if found is None or (found[2] and found[1] != "Warn"):  # "Share of …" and "Rank of …" are nouns
        return ""
    word = found[1]
    return word if word in VERBS else ""


def prose(source: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of docstrings, of texts below fields, and of comments, with their numbers."""
    lines = source.splitlines()
    for node in syntax.walk(syntax.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from ((number, lines[number - 1]) for number in range(node.lineno, (node.end_lineno or 0) + 1))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def figures(source: str) -> list[tuple[int, str]]:
    return [(number, text.strip()) for number, text in prose(source) if FIGURES.search(PLAIN.sub("", text))]


def nouns(source: str) -> list[tuple[int, str]]:
    """Return the functions whose docstring begins with no verb."""
    return [
        (node.lineno, text.splitlines()[0])
        for node in syntax.walk(syntax.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (text := ast.get_docstring(node))
        and not first_word(text)
    ]


def sources(room: str) -> list[Path]:
    paths = sorted((ROOT / room).rglob("*.py"))
    assert paths
    return [path for path in paths if not path.stem.endswith(("_pb2", "_pb2_grpc"))]


@pytest.mark.parametrize("room", [*ROOMS, HELPERS])
def test_functions_begin_with_a_verb(room: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}" for path in sources(room) for line, text in nouns(path.read_text())
    ]
    assert not found, "begin with a verb in the imperative (`VERBS`):\n" + "\n".join(found)


@pytest.mark.parametrize("room", ROOMS)
def test_prose_has_no_figures_of_speech(room: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}" for path in sources(room) for line, text in figures(path.read_text())
    ]
    assert not found, "take the field's own word:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("text", "verb"),
    [
        ("Return whether it fits.", "Return"),
        ("Fine-tune a model.", "Fine-tune"),
        ("Warn of the shortage.", "Warn"),
        ("The number of rows.", ""),
        ("Whether it fits.", ""),
        ("Share of time.", ""),
        ("Rank's own part.", ""),
        ("`name` is a name.", ""),
    ],
)
def test_a_verb_is_known(text: str, verb: str) -> None:
    assert first_word(text) == verb


@pytest.mark.parametrize(
    ("line", "is_figure"),
    [
        ("x = 1  # told at once", True),
        ('"""Continue behind a header."""', True),
        ("# who stands in for it", True),
        ("told = 1", False),
        ("# see `is_told`", False),
        ("# this process stood still", False),
    ],
)
def test_figures_are_found_in_prose_alone(line: str, is_figure: bool) -> None:
    assert bool(figures(line)) == is_figure
