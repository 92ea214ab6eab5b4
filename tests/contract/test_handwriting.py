"""One handwriting, as far as a linter does not see it: loggers, the mood of docstrings, private names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace_testing import syntax

TESTS = Path(__file__).parents[1]
SERVICES = TESTS.parent / "services" / "millrace"
# What follows a verb and not a plural noun: "Reads a file" is the third person, "Reads of a file" is not.
OBJECT = re.compile(r"[A-Z][a-z]+,? (?:an?|the|its?|what|all|every|each|this|one|them|for|with the)\b")


Modules = list[tuple[str, ast.Module]]


@pytest.fixture(scope="module")
def modules() -> Modules:
    """Return every module of the services with its tree, which takes seconds to parse and much memory to keep."""
    paths = [path for path in sorted(SERVICES.rglob("*.py")) if not path.stem.endswith(("_pb2", "_pb2_grpc"))]
    return [(str(path.relative_to(SERVICES)), syntax.parse(path.read_text())) for path in paths]


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and docstring of every function."""
    for node in syntax.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node)):
            yield node.lineno, text


def _first_word(text: str) -> str:
    return found[0] if (found := re.match(r"[A-Z][a-z]+\b(?!['’-])", text)) else ""


def _imperative(verb: str) -> set[str]:
    """Return what the imperative of a verb in the third person may be: `Carries` → Carry, Carrie; `Has` → Have."""
    irregular = {"Has": "Have", "Is": "Be", "Does": "Do", "Goes": "Go"}
    if verb in irregular:
        return {irregular[verb]}
    if not verb.endswith("s") or verb.endswith("ss"):
        return set()
    return {verb[:-1], verb[:-2], f"{verb[:-3]}y"} - {""}


def test_loggers_are_called_logger(modules: Modules) -> None:
    wrong = [
        f"{module}:{node.lineno}"
        for module, tree in modules
        for node in syntax.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value) in ("logging.getLogger(__name__)", "getLogger(__name__)")
        and ast.unparse(node.targets[0]) != "logger"
    ]
    assert not wrong, f"write `logger = logging.getLogger(__name__)`: {wrong}"


def test_logging_is_the_standard_library_s(modules: Modules) -> None:
    wrong = [
        f"{module}:{node.lineno}"
        for module, tree in modules
        for node in syntax.walk(tree)
        if isinstance(node, ast.ImportFrom) and any(alias.name in ("logging", "getLogger") for alias in node.names)
    ]
    assert not wrong, f"write `import logging`, and take `setup` and `bind` from `millrace.telemetry.logging`: {wrong}"


def test_docstrings_are_imperative(modules: Modules) -> None:
    texts = [(f"{module}:{line}", text) for module, tree in modules for line, text in _docstrings(tree)]
    begun = {_first_word(text) for _, text in texts} | {"Return", "Raise"}
    third_person = [
        f"{place}: {text.splitlines()[0]}"
        for place, text in texts
        if OBJECT.match(text) and _imperative(_first_word(text)) & begun
    ]
    assert not third_person, "begin with the imperative (`Read`, not `Reads`):\n" + "\n".join(third_person)


@pytest.mark.parametrize(
    ("verb", "imperative"), [("Reads", "Read"), ("Carries", "Carry"), ("Pushes", "Push"), ("Has", "Have")]
)
def test_the_third_person_is_known(verb: str, imperative: str) -> None:
    assert imperative in _imperative(verb)


def test_private_names_stay_in_their_module(modules: Modules) -> None:
    taken = [
        f"{module}:{node.lineno}: {alias.name} of {node.module}"
        for module, tree in modules
        for node in syntax.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("millrace")
        for alias in node.names
        if alias.name.startswith("_") and not alias.name.startswith("__")
    ]
    assert not taken, f"what another module uses has a public name: {taken}"


FOREIGN = {
    "_exit": "of os: ends a process without its farewell",
    "_getframe": "of sys: who calls the clock",
    "_replace": "of named tuples, which document it",
    "_dynamo": "of torch: its compiler, which has no public name for counters and resets",
    "_cdata": "of torch: the address of a storage, by which one is known again",
    "_get_fsdp_state": "of torch: FSDP shows nowhere else what it offloads",
    "_fsdp_param_group": "of torch: as above",
    "_world": "of torch: which process groups there are is said nowhere else",
    "_collector_to_names": "of prometheus_client: metrics that have no values yet have labels there only",
    "_init_workspace_and_model_runner": "of vLLM: the part of its GPU worker's start that needs no CUDA",
    "_weight_conversions": "of transformers: what it did on loading, which it undoes on saving",
    "_labelnames": "of prometheus_client: as above",
    "_call_individual_reward_func": "of verifiers: what environments have of their own there is watched, too",
}
"""What tests take of others that begins with an underscore."""


MAY_BE_PRIVATE = re.compile(
    r"""(?<![^\w.]self)(?<![^\w.]cls)\._[a-z]              # a._b
    |["'](?:[^"'\n]*\.)?_[a-z]\w*["']                     # "a._b"
    |^\ *from\ .*\ import\ .*\b_[a-z]
    |^\ *from\ .*\ import\ \(\n(?:(?!\ *\)).*\n)*?.*\b_[a-z]""",
    re.MULTILINE | re.VERBOSE,
)
"""What a module has that takes something private. One in ten of the tests has it; to parse all takes four seconds."""


def _private(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and name of what is private and not of the class that takes it."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                continue
            case ast.Attribute(attr=name):
                names = [name]
            case ast.ImportFrom(names=aliases):
                names = [alias.name for alias in aliases]
            case ast.Call(func=ast.Name(id="getattr" | "setattr") | ast.Attribute(attr="setattr"), args=args):
                texts = [arg.value for arg in args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
                names = [text.rpartition(".")[2] for text in texts[:1]]
            case _:
                continue
        yield from ((node.lineno, name) for name in names if re.match(r"_[a-z]", name))


def test_tests_use_what_is_public() -> None:
    found = [
        (f"{path.relative_to(TESTS)}:{line}", name)
        for path in sorted(TESTS.rglob("*.py"))
        if MAY_BE_PRIVATE.search(text := path.read_text())
        for line, name in _private(ast.parse(text))
    ]
    taken = [f"{place}: {name}" for place, name in found if name not in FOREIGN]
    assert not taken, f"test by what others can see: {taken}"
    assert not FOREIGN.keys() - {name for _, name in found}, "nothing takes these any more"


@pytest.mark.parametrize(
    "line",
    [
        "engine._thread.join()",
        "patch.setattr(engine, '_step', die)",
        "from millrace.a import _b",
        "from millrace.a import (\n    a,  # of b(c)\n    _d,\n)",
        "a.self._b()",
        "myself._b()",
        "setattr(a, '_b', 1)",
    ],
)
def test_what_is_private_is_seen(line: str) -> None:
    assert [name for _, name in _private(ast.parse(line))] and MAY_BE_PRIVATE.search(f"\n{line}\n")


def test_broad_excepts_say_why() -> None:
    bare = [
        f"{path.relative_to(SERVICES)}:{number}"
        for path in sorted(SERVICES.rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.match(r"\s*except(:| (Base)?Exception\b(?!Group))", line) and " # " not in line
    ]
    assert not bare, f"say in a comment which edge this is: {bare}"
