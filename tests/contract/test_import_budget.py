"""What a service may import before it serves, by name: seconds differ by machine, modules do not."""

import functools
import subprocess
import sys
from collections import Counter

import pytest

pytestmark = pytest.mark.long

HEAVY = {
    "torch",
    "transformers",
    "verifiers",
    "renderers",
    "datasets",
    "pandas",
    "pyarrow",
    "scipy",
    "sklearn",
    "sympy",
}
HEAVY |= {"matplotlib", "boto3", "botocore", "openai", "numba", "triton", "PIL", "IPython"}
# What is lighter, but costs a command a tenth of a second or more.
SERVERS = {"redis", "opentelemetry", "fastapi", "uvicorn", "starlette", "numpy", "prometheus_client", "vllm", "rich"}

MAY: dict[str, set[str]] = {
    "millrace.processes.fork_server": set(),
    "millrace.orchestrator.serve": set(),
    "millrace.env_server.run": set(),
    "millrace.trainer.serve": set(),  # registers, and imports torch meanwhile
    "millrace.trainer.publish.share_process": set(),  # started anew for every run, and when it is killed
    "millrace.tinker.serve": set(),  # its trainer and sampler are other processes
    "millrace.inference.main": set(),
    "millrace.inference.launcher": set(),  # vLLM is another process
    "millrace.inference.embedded.replica": {"torch", "transformers", "sympy", "PIL"},
}


COMMANDS: dict[str, set[str]] = {
    "millrace.cli.main": {"grpc", "pydantic", "psutil"},  # not even these
    "millrace.client": set(),
    "millrace.cli.session.prepare": set(),
    "millrace.cli.session.run_session": set(),
    "millrace.local.stack": set(),
}
"""What runs before the first process of a stack is started, or before a run is submitted."""
MOST_MODULES = {
    "millrace.cli.session.run_session, millrace.local.stack": 700,  # 512 when this was written
    "millrace.orchestrator.serve": 1150,  # 874
    "millrace.env_server.run": 1350,  # 1022
    "millrace.env_server.workers.env_worker": 700,  # 502
    "millrace.trainer.publish.share_process": 500,  # 388
}
"""How many modules at most: each costs a third of a millisecond, and one `import` of another's package brings hundreds.

`benchmarks/first_token.py` has the seconds.
"""


@functools.cache
def imported(modules: str) -> frozenset[str]:
    """Return the names of all modules that a process has after importing these."""
    code = f"import sys, {modules}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110, check=True)
    return frozenset(done.stdout.split())


@pytest.mark.parametrize("module", MAY)
def test_a_service_starts_without(module: str) -> None:
    assert HEAVY & imported(module) <= MAY[module]


@pytest.mark.parametrize("module", COMMANDS)
def test_a_command_does_without(module: str) -> None:
    assert not (HEAVY | SERVERS | COMMANDS[module]) & imported(module)


@pytest.mark.parametrize("modules", MOST_MODULES)
def test_what_is_imported_stays_small(modules: str) -> None:
    found = imported(modules)
    by_package = Counter(name.partition(".")[0] for name in found)
    assert len(found) <= MOST_MODULES[modules], by_package.most_common(12)


def test_workers_of_v0_do_not_pay_for_v1() -> None:
    found = imported("millrace.env_server.workers.env_worker, millrace.env_server.adapters.v0")
    assert not {"millrace.env_server.adapters.v1", "millrace.env_server.adapters.runtimes_v1"} & found


def test_no_store_client_but_that_of_the_store_in_use() -> None:
    code = (
        "import sys, tempfile, millrace.storage as s; s.open_store('file://' + tempfile.mkdtemp());"
        "print('boto3' in sys.modules, 'botocore' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110, check=True)
    assert done.stdout.split() == ["False", "False"]
