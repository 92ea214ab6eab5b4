"""What the sources of a release of vLLM define, read without importing it: that takes no GPU, and no torch of its own.

A use is written as a name, `AsyncLLM.sleep`, or as a call, `AsyncLLM.sleep(level, mode)`: `_` is a positional argument,
a word is one by keyword. `Parser.parse[self, request]` is a method that we replace: its parameters begin with these.
`*.server` is an attribute that something in the module sets.
"""

import ast
import functools
import inspect
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from millrace_testing.repository import REPOSITORY

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_USE = re.compile(r"(?P<name>[\w.*]+)(?:\((?P<call>[^)]*)\)|\[(?P<takes>[^\]]*)\])?")


class Sources:
    """The package `vllm` below a directory: that of an unpacked wheel, or an environment's site-packages."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def release(self) -> str:
        """Return the installed version."""
        found = re.search(r"__version__ = version = '([^']+)'", (self.directory / "vllm/_version.py").read_text())
        assert found is not None
        return found[1]

    def path(self, module: str) -> Path | None:
        """Return the file of a module; None if there is none."""
        base = self.directory / module.replace(".", "/")
        return next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None)

    @functools.cache  # noqa: B019 - it lives as long as its tests
    def tree(self, module: str) -> ast.Module:
        """Return the module, parsed."""
        path = self.path(module)
        assert path is not None, f"{self.release} has no module {module}"
        return ast.parse(path.read_text())

    def has(self, module: str, name: str) -> bool:
        """Return whether there is such a module, and such a name in it; "" is the module alone."""
        return self.path(module) is not None and (not name or self._find(module, name) is not None)

    def problem(self, module: str, use: str) -> str:
        """Return what is wrong with a use in this release, or ""."""
        if self.path(module) is None:
            return f"vLLM {self.release} has no module {module}"
        parts = _USE.fullmatch(use)
        assert parts is not None, use
        found = self._find(module, parts["name"])
        if found is None:
            return f"{module} of vLLM {self.release} has no {parts['name']}"
        if parts["call"] is None and parts["takes"] is None:
            return ""
        if not isinstance(found, _Function):
            return f"{module}.{parts['name']} of vLLM {self.release} is no function"
        signature = _signature(found)
        try:
            if parts["call"] is not None:
                given = _words(parts["call"])
                own = [None] if _is_bound(found, parts["name"]) else []
                by_name = {word: None for word in given if word != "_"}
                signature.bind(*own, *(None for word in given if word == "_"), **by_name)
                return ""
        except TypeError as error:
            return f"{module}.{parts['name']}{signature} of vLLM {self.release} is not called so: {error}"
        ours = _words(parts["takes"])
        theirs = list(signature.parameters)
        if theirs[: len(ours)] == ours:
            return ""
        return f"{module}.{parts['name']} of vLLM {self.release} takes {theirs}, and ours takes {ours}"

    def _find(self, module: str, name: str) -> ast.AST | None:
        first, _, rest = name.partition(".")
        if first == "*":
            return _within(self.tree(module), rest)
        found = self._top(module, first, seen=set())
        if found is None or not rest:
            return None if found is None else found[1]
        where, node = found
        return self._member(where, node, rest) if isinstance(node, ast.ClassDef) else _within(node, rest)

    def _top(self, module: str, name: str, *, seen: set[tuple[str, str]]) -> tuple[str, ast.AST] | None:
        """Return what a module has under a name, and the module that defines it; names that it imports are followed."""
        if (module, name) in seen or self.path(module) is None:
            return None
        seen.add((module, name))
        package = module if str(self.path(module)).endswith("__init__.py") else module.rpartition(".")[0]
        found: tuple[str, ast.AST] | None = None
        for node in _statements(self.tree(module).body):
            if isinstance(node, _Function | ast.ClassDef) and node.name == name:
                found = module, node
            elif isinstance(node, ast.Assign | ast.AnnAssign) and name in _targets(node):
                found = found or (module, node)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        source = _absolute(node, package)
                        found = found or self._top(source, alias.name, seen=seen) or (module, node)
        if found is None and self.path(f"{module}.{name}") is not None:
            return f"{module}.{name}", self.tree(f"{module}.{name}")
        return found

    def _member(self, module: str, owner: ast.ClassDef, name: str) -> ast.AST | None:
        """Return what a class or one of its bases has: a method, a field, or an attribute that a method sets."""
        for node in owner.body:
            if isinstance(node, _Function) and node.name == name:
                return node
            if isinstance(node, ast.Assign | ast.AnnAssign) and name in _targets(node):
                return node
        if (own := _within(owner, name)) is not None:
            return own
        for base in owner.bases:
            words = ast.unparse(base).partition("[")[0].split(".")
            found = self._top(module, words[-1], seen=set())
            if found is not None and isinstance(found[1], ast.ClassDef):
                inherited = self._member(*found, name)
                if inherited is not None:
                    return inherited
        return None


def own_imports() -> Iterator[tuple[str, list[list[tuple[str, str]]]]]:
    """Yield (file, alternatives) for what our code imports from vLLM: each alternative is a list of (module, name).

    Imports of a `try` and those of its handlers are alternatives.
    """
    for path in sorted((REPOSITORY / "services/millrace").rglob("*.py")):
        text = path.read_text()
        if not re.search(r"^\s*(from|import) vllm\b", text, re.MULTILINE):
            continue
        tree = ast.parse(text)
        tried: set[ast.AST] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Try) and _imported(node.body):
                tried |= {part for each in (*node.body, *node.handlers) for part in ast.walk(each)}
                handled = [_imported(handler.body) for handler in node.handlers]
                yield path.name, [_imported(node.body), *(each for each in handled if each)]
        for node in ast.walk(tree):
            if node not in tried and (found := _imported_here(node)):
                yield path.name, [found]


def _imported(body: Sequence[ast.AST]) -> list[tuple[str, str]]:
    return [name for statement in body for node in ast.walk(statement) for name in _imported_here(node)]


def _imported_here(node: ast.AST) -> list[tuple[str, str]]:
    if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
        return [(node.module or "", alias.name) for alias in node.names]
    if isinstance(node, ast.Import):
        return [(alias.name, "") for alias in node.names if alias.name.partition(".")[0] == "vllm"]
    return []


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield a module's statements that run at import, and those for type checkers."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, part, []))


def _targets(node: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    flat = [each for target in targets for each in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return [target.id for target in flat if isinstance(target, ast.Name)]


def _within(owner: ast.AST, name: str) -> ast.AST | None:
    """Return an attribute that something below sets or declares, or a function that is defined there."""
    for node in ast.walk(owner):
        if isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Store):
            return node
        if isinstance(node, _Function | ast.ClassDef) and node.name == name:
            return node
        if isinstance(node, ast.Constant) and node.value == name:  # a key, a slot or a name for `setattr`
            return node
    return None


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    base = package.split(".")[: len(package.split(".")) - (node.level - 1)]
    return ".".join([*base, *([node.module] if node.module else [])])


def _is_bound(function: _Function, name: str) -> bool:
    """Return whether a call through an object gives the first parameter."""
    static = any(ast.unparse(each) == "staticmethod" for each in function.decorator_list)
    return "." in name and not static and bool(function.args.args) and function.args.args[0].arg in ("self", "cls")


def _signature(function: _Function) -> inspect.Signature:
    arguments, kind = function.args, inspect.Parameter
    plain = [*arguments.posonlyargs, *arguments.args]
    required = len(plain) - len(arguments.defaults)
    made = [
        kind(one.arg, kind.POSITIONAL_OR_KEYWORD, default=kind.empty if number < required else None)
        for number, one in enumerate(plain)
    ]
    if arguments.vararg is not None:
        made.append(kind(arguments.vararg.arg, kind.VAR_POSITIONAL))
    for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        made.append(kind(one.arg, kind.KEYWORD_ONLY, default=kind.empty if default is None else None))
    if arguments.kwarg is not None:
        made.append(kind(arguments.kwarg.arg, kind.VAR_KEYWORD))
    return inspect.Signature(made)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
