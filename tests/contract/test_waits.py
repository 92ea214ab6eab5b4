"""No silent wait: whatever waits for another process is registered, so that `millrace run why` shows it.

Read from the source, in three rules; what is exempt stands in a list with its reason, and an entry that no longer
matches anything fails as well.

1. A loop that sleeps stands in a registered wait: inside `with ...waiting(...)` or `...shared(...)`, or in a function
   that keeps a `LastingWait`.
2. A method of a gRPC stub is called through `rpc.channel.call` or `stream`, which give it a deadline and a wait.
3. A Redis command is awaited inside `runlog.connection.call`, which gives it a deadline and a wait.

And whom a wait names (`waits_on`) is somebody whom the chain of `millrace run why` knows.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "services" / "millrace"
# Generated code; what runs in a terminal in front of its user; what runs inside one process only.
SKIPPED = ("v1", "internal", "cli")
SLEEPS = {"asyncio.sleep", "time.sleep"}
REGISTERS = {"waiting", "shared"}
TICKER = "looks at something of its own at an interval; what it awaits there is registered where it is awaited"
LOCAL = "of the local stack, whose terminal shows what it waits for"
IN_ENV_WORKER = "runs in an environment worker, all of whose rollouts are one wait of the env-server"

COMPONENTS = {"", "trainer", "orchestrator", "env-server", "inference"}
COMPONENTS |= {"env worker", "redis", "object store", "disk", "operator"}

SLEEPING_LOOPS = {
    "env_server/renderer.py:post": IN_ENV_WORKER,
    "env_server/teacher_client.py:_try": "`score` around it is the registered wait",
    "local/keeper.py:_check": TICKER,
    "local/keeper.py:_check_life": TICKER,
    "processes/table.py:end_all": "stands alone, with nothing imported, when everything else is dead",
    "local/redis.py:wait_ready": LOCAL,
    "local/stack.py:_report_waits": TICKER,
    "processes/reaper_process.py:_replace": "a pause between two reapers of which the first died at once; it is noted",
    "rpc/worker.py:_live": TICKER,
    "env_server/sink.py:_tidy": TICKER,
    "env_server/warm.py:run": TICKER,
    "processes/table.py:kill_session": "between looks at processes that were just ended, a fifth of a second in all",
    "orchestrator/housekeeping.py:archive_events": TICKER,
    "orchestrator/housekeeping.py:mend_damage": TICKER,
    "orchestrator/housekeeping.py:trim_batches": TICKER,
    "orchestrator/housekeeping.py:watch_log": TICKER,
    "orchestrator/manager.py:_look_for_wishes": TICKER,
    "orchestrator/manager.py:_renew": TICKER,
    "orchestrator/policy_driver.py:run": TICKER,
    "orchestrator/trainer_watch.py:run": TICKER,
    "orchestrator/watchdog.py:run": TICKER,
    "orchestrator/workers.py:keep_pulse": TICKER,
    "runlog/connection.py:_retry": "`call` around it is the registered wait",
    "inference/launch.py:_say_progress": TICKER,
    "inference/launch.py:_until_it_serves_alone": "`_until_up` around it is the registered wait",
    "inference/launch_process.py:end": "after a SIGKILL, for at most KILL_WAIT_S",
    "inference/vllm/ping.py:_run": TICKER,
    "inference/vllm/prober.py:watch": "bounds the wait for the probe, which is registered around it",
    "inference/vllm/plugin.py:_run": "until vLLM has made its server object, moments after the plugin's start",
    "inference/vllm/plugin.py:_take_signal": "until vLLM's server has started; the launcher registers that wait",
    "storage/prepare.py:_until_it_answers": "a command of its own, which prints what it waits for",
    "client/runs.py:watch": "tells its caller of every lost server (`on_reconnect`), and gives up after `give_up_s`",
}
DIRECT_CALLS: dict[str, str] = {}
REDIS_COMMANDS = {
    "local/preflight.py:check_redis": LOCAL,
    "env_server/teacher.py:close": "an HTTP session, which closes at once",
    "env_server/teacher_check.py:check_teacher": "`TeacherClient.score`, which registers its own wait",
    "inference/vllm/gate.py:abort": "a request of vLLM's engine, with a deadline",
    "runlog/script.py:run": "what runs a script hands it to `connection.call`",
}


def sources() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name.split("/")[0] not in SKIPPED:
            yield name, ast.parse(path.read_text())


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function without those of functions inside it."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from own_nodes(child)


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
    """Whether a `with` registers a wait: by a call, or by a name that was bound to one (`with downloading as wait`)."""
    return any(called(item.context_expr).split(".")[-1] in REGISTERS for item in statement.items)


def unregistered_loops(function: ast.AST) -> Iterator[ast.AST]:
    """Loops of a function that sleep outside of every registered wait."""
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
    """Whether a loop sleeps in a body that registers nothing."""
    for child in ast.iter_child_nodes(loop):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.With | ast.AsyncWith) and registers(child):
            continue
        if called(child) in SLEEPS or sleeps(child):
            return True
    return False


def found_loops(name: str, tree: ast.Module) -> dict[str, int]:
    return {
        f"{name}:{function.name}": loop.lineno  # type: ignore[attr-defined]
        for function in functions(tree)
        for loop in unregistered_loops(function)
    }


def found_calls(name: str, tree: ast.Module) -> dict[str, int]:
    """Awaited calls of a stub's method: `await stub.PlayGroup(...)`."""
    return {
        f"{name}:{function.name}": node.lineno
        for function in functions(tree)
        for node in own_nodes(function)
        if isinstance(node, ast.Await)
        and isinstance(node.value, ast.Call)
        and "stub" in dotted(node.value.func).lower()
        and dotted(node.value.func).split(".")[-1][:1].isupper()
    }


def found_commands(name: str, tree: ast.Module) -> dict[str, int]:
    """Awaited commands of a Redis client, outside of the functions that are handed to `call`."""
    handed = {
        argument.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and called(node).split(".")[-1] == "call"
        for argument in node.args
        if isinstance(argument, ast.Name)
    }
    return {
        f"{name}:{function.name}": node.lineno
        for function in functions(tree)
        if function.name not in handed
        for node in own_nodes(function)
        if isinstance(node, ast.Await) and isinstance(node.value, ast.Call) and is_command(node.value)
    }


def is_command(call: ast.Call) -> bool:
    """Whether a call is of a method of what is called a Redis client."""
    *owner, method = dotted(call.func).split(".")
    return method != "aclose" and any(part in ("redis", "_redis", "client") for part in owner[-1:])


def named(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Every literal `waits_on`, with its line."""
    for node in ast.walk(tree):
        for keyword in node.keywords if isinstance(node, ast.Call) else ():
            if keyword.arg == "waits_on" and isinstance(keyword.value, ast.Constant):
                yield keyword.value.value, node.lineno


RULES = {
    "a loop that sleeps outside of a registered wait": (found_loops, SLEEPING_LOOPS),
    "a stub's method that is not called through rpc.channel.call": (found_calls, DIRECT_CALLS),
    "a Redis command outside of runlog.connection.call": (found_commands, REDIS_COMMANDS),
}


@pytest.mark.parametrize("rule", RULES)
def test_every_wait_is_registered(rule: str) -> None:
    find, exempt = RULES[rule]
    found = {place: line for name, tree in sources() for place, line in find(name, tree).items()}
    new = [f"{place} (line {found[place]})" for place in sorted(found.keys() - exempt.keys())]
    assert not new, (
        f"{rule}: {'; '.join(new)}. Register it (telemetry.waits.waiting, shared, LastingWait), or name it in this "
        "file with the reason why nobody needs to see it"
    )
    assert not exempt.keys() - found.keys(), f"exempt, but not there (any more): {exempt.keys() - found.keys()}"


def test_whom_a_wait_names_is_known_to_the_chain() -> None:
    unknown = [
        f"{name}:{line} waits on {target!r}"
        for name, tree in sources()
        if not name.startswith(("local/", "processes/"))
        for target, line in named(tree)
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
    assert RULES[rule][0]("x.py", ast.parse(source))


@pytest.mark.parametrize(("rule", "source"), [(rule, source) for rule in HEARD for source in HEARD[rule]])
def test_a_registered_wait_is_not(rule: str, source: str) -> None:
    assert not RULES[rule][0]("x.py", ast.parse(source))
