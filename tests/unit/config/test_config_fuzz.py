"""Whatever is written, the answer is a config or violations that each say what and where: nothing else is raised."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.config import RLConfig, load, validate_document
from millrace.config.layers import put
from millrace.config.prime_rl.keys import RL_KEYS
from millrace.config.tree import schema_tree
from millrace.errors import InvalidSpecError

ROOT = schema_tree(RLConfig)
NAMES = sorted({node.name for node in ROOT.walk()} | {"group_size", "typo", "", "a.b", "model-name"})
SCALARS = (
    st.none() | st.booleans() | st.integers(-2, 5000) | st.floats() | st.sampled_from(["", "all", "grpo", "linear"])
)


PATHS = st.lists(st.sampled_from([*NAMES, "no-ckpt", "0"]), min_size=1, max_size=4).map(".".join)
KNOWN = st.sampled_from([*(".".join(node.path) for node in ROOT.walk()), *(key.replace("[]", "") for key in RL_KEYS)])
VALUES = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=2),
    st.dictionaries(st.sampled_from(NAMES), SCALARS, max_size=2),
    st.sampled_from([[{"id": "a"}], [{"id": "a"}, {"name": "b"}], [{"id": "all", "weight": 0}, 3]]),
)


def _document(entries: list[tuple[str, object]]) -> dict:
    """Return nested tables with a value at each dotted path, as far as the paths do not collide."""
    tree: dict = {}
    for path, value in entries:
        put(tree, tuple(path.split(".")), value)
    return tree


def _check(error: InvalidSpecError) -> None:
    for violation in error.violations:
        assert violation.message and violation.field != "config", "the config could not be built to check its rules"
        assert violation.source or violation.value is None, violation


@pytest.mark.computes
@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(PATHS | KNOWN, VALUES), max_size=12).map(_document))
def test_any_document(document: dict):
    try:
        config = validate_document(document)
    except InvalidSpecError as error:
        _check(error)
    else:
        assert RLConfig.model_validate_json(config.resolved_json()) == config


TEXTS = st.sampled_from(
    ["", "1", "-1", "x", "None", "true", "{}", "[]", "{", '{"a": 1}', '[{"id": "a"}]', "@", "--", "-h"]
)
ARGUMENTS = st.one_of(
    TEXTS,
    (PATHS | KNOWN).map(lambda path: f"--{path}"),
    KNOWN.map(lambda path: f"--no-{path}"),
    st.tuples(KNOWN, TEXTS).map(lambda pair: f"--{pair[0]}={pair[1]}"),
    st.sampled_from(["--dry-run", "--server", "--no-plain", "@none.toml"]),
)


@pytest.mark.computes
@settings(max_examples=50, deadline=None)
@given(st.lists(ARGUMENTS, max_size=8))
def test_any_command_line(argv: list[str]):
    try:
        load(RLConfig, argv, {}, cwd=Path(__file__).parent)
    except InvalidSpecError as error:
        _check(error)


VARIABLES = st.dictionaries(
    (PATHS | KNOWN).map(lambda path: "MILLRACE_CONFIG__" + path.replace(".", "__")), TEXTS, max_size=5
)


@pytest.mark.computes
@settings(max_examples=50, deadline=None)
@given(VARIABLES)
def test_any_environment(env: dict[str, str]):
    try:
        load(RLConfig, [], env)
    except InvalidSpecError as error:
        _check(error)
