"""No silent wait: whatever waits for another process is registered, so that `millrace run why` shows it.

Read from the source, in three rules. What is exempt says so in the line above it, `# unregistered wait: REASON`. The
comment moves with the code; one that is above nothing of the kind fails as well.

1. A loop that sleeps is in a registered wait: inside `with ...waiting(...)` or `...shared(...)`, or in a function
   that keeps a `LastingWait`.
2. A method of a gRPC stub is called through `rpc.channel.call` or `stream`, which give it a deadline and a wait.
3. A Redis command is awaited inside `runlog.connection.call`, which gives it a deadline and a wait.

And whom a wait names (`waits_on`) is somebody whom the chain of `millrace run why` knows.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

from millrace_testing import syntax

ROOT = Path(__file__).parents[2] / "services" / "millrace"
# Generated code; what runs in a terminal in front of its user; what runs inside one process only.
SKIPPED = ("v1", "internal", "cli")
SLEEPS = {"asyncio.sleep", "time.sleep"}
REGISTERS = {"waiting", "shared"}
EXEMPT = "# unregistered wait: "

COMPONENTS = {"", "trainer", "orchestrator", "env-server", "inference"}
COMPONENTS |= {"env worker", "redis", "object store", "disk", "operator"}


@dataclass(frozen=True)
class Source:
    """A file of the services, read once."""

    name: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return syntax.parse(self.text)

    @cached_property
    def exempt(self) -> dict[int, int]:
        """Return every line that is exempt, the next line of code below a comment, with the line of that comment."""
        lines = self.text.splitlines()
        found = {}
        for above, line in enumerate(lines, start=1):
            if line.strip().startswith(EXEMPT.strip()):
                assert line.strip() != EXEMPT.strip(), f"{self.name}:{above} says not why"
                below = next(at for at in range(above, len(lines)) if not lines[at].strip().startswith("#"))
                found[below + 1] = above
        return found


@cache
def sources() -> tuple[Source, ...]:
    paths = {path.relative_to(ROOT).as_posix(): path for path in sorted(ROOT.rglob("*.py"))}
    return tuple(Source(name, path.read_text()) for name, path in paths.items() if name.split("/")[0] not in SKIPPED)


@cache
def functions(tree: ast.Module) -> tuple[ast.FunctionDef | ast.AsyncFunctionDef, ...]:
    return tuple(node for node in syntax.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@cache
def own_nodes(function: ast.AST) -> tuple[ast.AST, ...]:
    """Return the nodes of a function without those of functions inside it."""
    found: list[ast.AST] = []
    left = [function]
    while left:
        children = ast.iter_child_nodes(left.pop())
        fresh = [node for node in children if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)]
        found += fresh
        left += fresh
    return tuple(found)


def dotted(node: ast.AST) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name):
            return f"{dotted(value)}.{name}"
        case ast.Call(func=function):
            return f"{dotted(function)}()"
        case _:
            return "?"


def called(node: ast.AST) -> str:
    return dotted(node.func) if isinstance(node, ast.Call) else ""


def registers(statement: ast.With | ast.AsyncWith) -> bool:
    """Return whether a `with` registers a wait: by a call, or by a name that was bound to one (`with downloading as
    wait`).
    """
    return any(called(item.context_expr).split(".")[-1] in REGISTERS for item in statement.items)


def unregistered_loops(function: ast.AST) -> Iterator[ast.AST]:
    """Yield loops of a function that sleep outside of every registered wait."""
    if any(called(node).endswith((".on", "LastingWait")) for node in own_nodes(function)):
        return

    def look(node: ast.AST) -> Iterator[ast.AST]:
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                    continue
                case ast.With() | ast.AsyncWith() if registers(child):
                    continue
                case ast.While() | ast.For() | ast.AsyncFor() if sleeps(child):
                    yield child
                case _:
                    yield from look(child)

    yield from look(function)


def sleeps(loop: ast.AST) -> bool:
    """Return whether a loop sleeps in a body that registers nothing."""
    for child in ast.iter_child_nodes(loop):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.With | ast.AsyncWith) and registers(child):
            continue
        if called(child) in SLEEPS or sleeps(child):
            return True
    return False


def found_loops(tree: ast.Module) -> dict[int, str]:
    """Return the line of every loop that sleeps unregistered, with the name of its function."""
    return {
        loop.lineno: function.name  # type: ignore[attr-defined]
        for function in functions(tree)
        for loop in unregistered_loops(function)
    }


def found_calls(tree: ast.Module) -> dict[int, str]:
    """Return awaited calls of a stub's method: `await stub.PlayGroup(...)`."""
    return {
        node.lineno: function.name
        for function in functions(tree)
        for node in own_nodes(function)
        if isinstance(node, ast.Await)
        and isinstance(node.value, ast.Call)
        and "stub" in dotted(node.value.func).lower()
        and dotted(node.value.func).split(".")[-1][:1].isupper()
    }


def found_commands(tree: ast.Module) -> dict[int, str]:
    """Return awaited commands of a Redis client, outside of the functions that are handed to `call`."""
    handed = {
        argument.id
        for node in syntax.walk(tree)
        if isinstance(node, ast.Call) and called(node).split(".")[-1] == "call"
        for argument in node.args
        if isinstance(argument, ast.Name)
    }
    return {
        node.lineno: function.name
        for function in functions(tree)
        if function.name not in handed
        for node in own_nodes(function)
        if isinstance(node, ast.Await) and isinstance(node.value, ast.Call) and is_command(node.value)
    }


def is_command(call: ast.Call) -> bool:
    """Return whether a call is of a method of what is called a Redis client."""
    *owner, method = dotted(call.func).split(".")
    return method != "aclose" and any(part in ("redis", "_redis", "client") for part in owner[-1:])


def named(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield every literal `waits_on`, with its line."""
    for node in syntax.walk(tree):
        for keyword in node.keywords if isinstance(node, ast.Call) else ():
            if keyword.arg == "waits_on" and isinstance(keyword.value, ast.Constant):
                yield keyword.value.value, node.lineno


RULES = {
    "a loop that sleeps outside of a registered wait": found_loops,
    "a stub's method that is not called through rpc.channel.call": found_calls,
    "a Redis command outside of runlog.connection.call": found_commands,
}


@pytest.mark.parametrize("rule", RULES)
def test_every_wait_is_registered(rule: str) -> None:
    new = [
        f"{source.name}:{line} ({function})"
        for source in sources()
        for line, function in RULES[rule](source.tree).items()
        if line not in source.exempt
    ]
    assert not new, (
        f"{rule}: {'; '.join(new)}. Register it (telemetry.waits.waiting, shared, LastingWait), or say in the line "
        f"above it why nobody needs to see it: `{EXEMPT}REASON`"
    )


def test_every_exemption_stands_above_what_it_exempts() -> None:
    stale = [
        f"{source.name}:{comment}"
        for source in sources()
        for line, comment in source.exempt.items()
        if not any(line in find(source.tree) for find in RULES.values())
    ]
    assert not stale, f"`{EXEMPT.strip()}` stands above nothing that the rules find: {stale}; drop the comment"


def test_whom_a_wait_names_is_known_to_the_chain() -> None:
    unknown = [
        f"{source.name}:{line} waits on {target!r}"
        for source in sources()
        if not source.name.startswith(("local/", "processes/"))
        for target, line in named(source.tree)
        if target not in COMPONENTS
    ]
    assert not unknown, f"{unknown}; the chain knows {sorted(COMPONENTS)}, worker ids and engine URLs"


SILENT = {
    "a loop that sleeps outside of a registered wait": [
        "async def f():\n    while not done():\n        await asyncio.sleep(1)",
        "def f():\n    for _ in range(9):\n        if x:\n            time.sleep(1)",
        "async def f():\n    with waits.waiting('a'):\n        pass\n    while True:\n        await asyncio.sleep(1)",
        "async def f():\n    async def g():\n        while True:\n            await asyncio.sleep(1)\n    await g()",
    ],
    "a stub's method that is not called through rpc.channel.call": [
        "async def f(stub):\n    await stub.PlayGroup(r)",
        "async def f(self):\n    await self._stub(worker).Heartbeat(r, timeout=3)",
    ],
    "a Redis command outside of runlog.connection.call": [
        "async def f(self):\n    await self._redis.get('x')",
        "async def f(redis):\n    await redis.execute_command('GET', 'x')",
    ],
}
HEARD = {
    "a loop that sleeps outside of a registered wait": [
        "async def f():\n    with waits.waiting('a'):\n        while True:\n            await asyncio.sleep(1)",
        "async def f():\n    while True:\n        with waits.shared('a') as w:\n            await asyncio.sleep(1)",
        "async def f():\n    w = LastingWait()\n    while True:\n        w.on('x')\n        await asyncio.sleep(1)",
        "async def f():\n    await asyncio.sleep(1)",
    ],
    "a stub's method that is not called through rpc.channel.call": [
        "async def f(stub):\n    await call(stub.PlayGroup, r, timeout_s=3)",
    ],
    "a Redis command outside of runlog.connection.call": [
        "async def f(redis):\n    await connection.call(redis, 'reading', lambda: redis.get('x'))",
        "async def f(redis):\n    async def ask():\n        return await redis.get('x')\n    await log.call('x', ask)",
        "async def f(redis):\n    await redis.aclose()",
    ],
}


@pytest.mark.parametrize(("rule", "source"), [(rule, source) for rule in SILENT for source in SILENT[rule]])
def test_a_silent_wait_is_found(rule: str, source: str) -> None:
    assert RULES[rule](ast.parse(source))


@pytest.mark.parametrize(("rule", "source"), [(rule, source) for rule in HEARD for source in HEARD[rule]])
def test_a_registered_wait_is_not(rule: str, source: str) -> None:
    assert not RULES[rule](ast.parse(source))


def test_an_exemption_is_that_of_the_next_line_of_code() -> None:
    source = Source("x.py", f"def f():\n    {EXEMPT}it ticks,\n    # for ever\n    while True:\n        pass\n")
    assert source.exempt == {4: 2}


def test_an_exemption_without_a_reason_is_refused() -> None:
    with pytest.raises(AssertionError, match="says not why"):
        _ = Source("x.py", f"{EXEMPT}\nwhile True:\n    pass\n").exempt
