"""No function of the services takes more than 8 parameters: what travels together is a value of its own."""

import ast
from collections.abc import Iterator
from pathlib import Path

from millrace_testing import syntax

SERVICES = Path(__file__).parents[2] / "services" / "millrace"
MOST = 8


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    given = function.args
    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def _functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path in sorted(SERVICES.rglob("*.py")):
        if not path.stem.endswith(("_pb2", "_pb2_grpc")):
            for node in syntax.walk(syntax.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield f"{path.relative_to(SERVICES)}:{node.lineno} {node.name}", node


def test_no_function_takes_more_than_eight_parameters() -> None:
    counts = {where: len(_parameters(function)) for where, function in _functions()}
    assert len(counts) > 1000
    assert not {where: count for where, count in counts.items() if count > MOST}


def test_all_kinds_of_parameters_are_counted() -> None:
    function = ast.parse("def f(self, a, /, b, *, c): ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    assert _parameters(function) == ["a", "b", "c"]
