"""Size of our code against its budget: files of at most 400 lines, functions of at most 50.

    python benchmarks/budget.py [--quick] [DIRECTORY …]

Counts every line of every Python file under services/ (or the directories given), comments and docstrings included;
a function counts from its `def` to its last line, nested functions within it. Generated code (`*_pb2*.py`) is left out.
Takes about a second; --quick changes nothing and is there because all benchmarks take it.
"""

import argparse
import ast
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from report import REPOSITORY, quantile, table

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Lines of one file or function."""

    name: str
    lines: int


def is_generated(path: Path) -> bool:
    return path.stem.endswith(("_pb2", "_pb2_grpc"))


def sources(directories: Sequence[Path]) -> list[Path]:
    """The Python files that people write."""
    found = (path for directory in directories for path in directory.rglob("*.py"))
    return sorted(path for path in found if not is_generated(path))


def functions(node: ast.AST, where: str) -> Iterator[Size]:
    """Every function below `node`, with the classes and functions around it in its name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{where}.{child.name}"
            yield Size(name=name, lines=(child.end_lineno or child.lineno) - child.lineno + 1)
            yield from functions(child, name)
        else:
            yield from functions(child, f"{where}.{child.name}" if isinstance(child, ast.ClassDef) else where)


def row(kind: str, sizes: Sequence[Size], limit: int) -> list[object]:
    lines = [size.lines for size in sizes]
    over = sum(count > limit for count in lines)
    middle = statistics.median(lines)
    return [kind, len(lines), sum(lines), f"{middle:g}", quantile(lines, 0.95), max(lines), limit, over]


def measure(directories: Sequence[Path]) -> str:
    """The report as Markdown."""
    files: list[Size] = []
    defs: list[Size] = []
    for path in sources(directories):
        text = path.read_text(encoding="utf-8")
        name = str(path.relative_to(REPOSITORY)) if path.is_relative_to(REPOSITORY) else str(path)
        files.append(Size(name=name, lines=len(text.splitlines())))
        defs.extend(functions(ast.parse(text, filename=name), name))
    if not files or not defs:
        raise SystemExit(f"no Python functions under {', '.join(map(str, directories))}; name another directory")
    header = ["", "count", "lines", "median", "p95", "max", "budget", "over budget"]
    rows = [row("files", files, MAX_FILE_LINES), row("functions", defs, MAX_FUNCTION_LINES)]
    over = [size for size in files if size.lines > MAX_FILE_LINES]
    over += [size for size in defs if size.lines > MAX_FUNCTION_LINES]
    listed = "\n".join(f"* {size.lines} lines: `{size.name}`" for size in sorted(over, key=lambda s: -s.lines))
    return f"## Lines and functions over budget\n\n{table(header, rows)}\n\n{listed or 'Nothing is over budget.'}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", type=Path, nargs="*", default=[REPOSITORY / "services"], metavar="DIRECTORY")
    parser.add_argument("--quick", action="store_true", help="no effect here")
    print(measure([directory.resolve() for directory in parser.parse_args().directories]))


if __name__ == "__main__":
    main()
