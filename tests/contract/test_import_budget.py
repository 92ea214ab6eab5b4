"""What a service may import before it serves, by name: seconds differ by machine, modules do not."""

import subprocess
import sys

import pytest

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

MAY: dict[str, set[str]] = {
    "millrace.cli.main": set(),
    "millrace.local.stack": set(),
    "millrace.processes.fork_server": set(),
    "millrace.orchestrator.api.serve": set(),
    "millrace.env_server.run": set(),
    "millrace.trainer.serve": set(),  # registers, and imports torch meanwhile
    "millrace.inference.main": set(),
    "millrace.inference.launch.launcher": set(),  # vLLM is another process
    "millrace.inference.embedded.replica": {"torch", "transformers", "sympy", "PIL"},
}


@pytest.mark.parametrize("module", MAY)
def test_a_service_starts_without(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110, check=True)
    assert set(done.stdout.split()) <= MAY[module]


def test_no_store_client_but_that_of_the_store_in_use() -> None:
    code = (
        "import sys, tempfile, millrace.storage as s; s.open_store('file://' + tempfile.mkdtemp());"
        "print('boto3' in sys.modules, 'botocore' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110, check=True)
    assert done.stdout.split() == ["False", "False"]
