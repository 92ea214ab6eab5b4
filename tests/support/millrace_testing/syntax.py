"""Syntax trees of modules, parsed and walked once by a process: a dozen contract tests read all of the services.

The files that import this run in one process (`scheduling`), and let go of the trees together.
"""

import ast
import functools

from millrace.telemetry.startup import without_gc


@functools.cache
def parse(source: str) -> ast.Module:
    """Return the tree of a module's text, which nobody may change."""
    with without_gc():  # a tree is free of cycles, and a collection would walk through all that there are
        return ast.parse(source)


@functools.cache
def walk(tree: ast.Module) -> tuple[ast.AST, ...]:
    """Return every node of a module, in the order of `ast.walk`."""
    with without_gc():
        return tuple(ast.walk(tree))


def forget() -> None:
    """Free the trees: they take hundreds of megabytes."""
    parse.cache_clear()
    walk.cache_clear()
