"""What our code takes of vLLM is there in every release that it says it runs on: read from sources, nothing imported.

The release of `.venv-vllm` is looked at where there is one; `make test-vllm-next` looks at the wheels of all of them.
"""

import ast
from pathlib import Path

import pytest

from millrace.inference.launch_env import TYPED_FLAGS
from millrace.inference.vllm.releases import TRIED
from millrace.inference.vllm.server.host import OWNED
from millrace_testing.inference.vllm_names import ENVIRONMENT, FLAGS, NAMES
from millrace_testing.inference.vllm_sources import Sources, own_imports
from millrace_testing.repository import REPOSITORY

FLAG_MODULES = (
    "vllm.engine.arg_utils",
    "vllm.entrypoints.common.cli_args",
    "vllm.entrypoints.launchers.cli_args",
)


@pytest.fixture(scope="module")
def installed() -> Sources:
    """Return vLLM as `make setup-vllm` installs it."""
    found = sorted((REPOSITORY / ".venv-vllm/lib").glob("python*/site-packages/vllm/_version.py"))
    if not found:
        pytest.skip("no vLLM: run scripts/setup_vllm.sh")
    return Sources(found[0].parents[1])


def problems(sources: Sources) -> list[str]:
    """Return everything that this release lacks."""
    found = [problem for module, uses in NAMES.items() for use in uses if (problem := sources.problem(module, use))]
    for file, alternatives in own_imports():
        wrong = [[f"{file}: {each}" for each in names if not sources.has(*each)] for names in alternatives]
        found += min(wrong, key=len)
    return found + missing_flags(sources) + missing_variables(sources)


def missing_flags(sources: Sources) -> list[str]:
    """Return flags that vLLM's parser does not have: it makes them of the fields of classes, or adds them by name."""
    known: set[str] = set()
    for module in FLAG_MODULES:
        for node in ast.walk(sources.tree(module)) if sources.path(module) is not None else ():
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                known.add(node.target.id)
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".add_argument"):
                known |= {
                    each.value.lstrip("-").replace("-", "_") for each in node.args if isinstance(each, ast.Constant)
                }
    wanted = {*FLAGS, *TYPED_FLAGS.values(), *OWNED}
    return [f"vLLM {sources.release} has no flag {name}" for name in sorted(wanted - known)]


def missing_variables(sources: Sources) -> list[str]:
    """Return variables that vLLM does not read."""
    text = (sources.directory / "vllm/envs.py").read_text()
    return [f"vLLM {sources.release} reads no {name}" for name in ENVIRONMENT if f'"{name}"' not in text]


def test_what_we_take_of_the_installed_vllm_is_there(installed: Sources) -> None:
    assert not problems(installed)


@pytest.mark.parametrize("release", TRIED)
def test_what_we_take_of_vllm_is_in_every_release_that_was_tried(vllm_wheels: Path, release: str) -> None:
    sources = Sources(vllm_wheels / release)
    assert sources.release == release
    assert not problems(sources)


def test_what_is_not_there_or_called_otherwise_is_named(tmp_path: Path) -> None:
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "_version.py").write_text("__version__ = version = '9.9'\n")
    (package / "old.py").write_text("from vllm.new import moved\n\ndef gone(a): ...\n")
    (package / "new.py").write_text(
        "class Base:\n    def stop(self, mode, *, level=1): ...\n\n"
        "class Client(Base):\n    def __init__(self):\n        self.state = 1\n\n"
        "def moved(one, two=2): ...\n"
    )
    sources = Sources(tmp_path)
    fine = [("vllm.old", "moved(_, two)"), ("vllm.new", "Client.stop(_, level)"), ("vllm.new", "Client.state")]
    assert [sources.problem(*use) for use in fine] == ["", "", ""]
    assert sources.problem("vllm.new", "Base.stop[self, mode]") == ""
    assert "has no module vllm.older" in sources.problem("vllm.older", "x")
    assert "has no Client.go" in sources.problem("vllm.new", "Client.go")
    assert "is not called so: got an unexpected keyword argument 'three'" in sources.problem(
        "vllm.old", "moved(_, three)"
    )
    assert "missing a required argument: 'mode'" in sources.problem("vllm.new", "Client.stop(level)")
    assert "takes ['self', 'mode', 'level'], and ours takes" in sources.problem("vllm.new", "Client.stop[self, level]")
