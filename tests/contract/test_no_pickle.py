"""No object and no message is a pickle: nothing under services/ reads or writes one, or loads what may be one."""

import ast
from pathlib import Path

import pytest

from millrace_testing import syntax

SERVICES = Path(__file__).parents[2] / "services"
MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "shelve"}
"""What executes, or brings the interpreter down, when it reads bytes of others."""
PACKAGES = ("torch.distributed.checkpoint",)
"""Its metadata is a pickle."""
CALLS = {"Unpickler", "broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"}


def problems(source: str) -> list[str]:
    """Return what a module may not do, with the line."""
    found = []
    for node in syntax.walk(syntax.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        found += [f"{node.lineno}: imports {name}" for name in names if _is_forbidden(name)]
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            keywords = {keyword.arg: keyword.value for keyword in node.keywords}
            only = keywords.get("weights_only")
            is_safe = isinstance(only, ast.Constant) and only.value is True
            if called == "torch.load" and not is_safe:
                found.append(f"{node.lineno}: torch.load without weights_only=True")
            if called in ("np.load", "numpy.load") and "allow_pickle" in keywords:
                found.append(f"{node.lineno}: {called} with allow_pickle")
            if called.rpartition(".")[2] in CALLS:
                found.append(f"{node.lineno}: {called}")
    return found


def _is_forbidden(name: str) -> bool:
    return name.partition(".")[0] in MODULES or any(name == each or name.startswith(f"{each}.") for each in PACKAGES)


def test_no_module_reads_or_writes_pickles() -> None:
    paths = sorted(SERVICES.rglob("*.py"))
    assert len(paths) > 200
    found = [f"{path.relative_to(SERVICES)}:{each}" for path in paths for each in problems(path.read_text())]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import Unpickler",
        "import os, cloudpickle as c",
        "from torch.distributed.checkpoint.filesystem import FileSystemReader",
        "from torch.distributed import checkpoint",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "dist.all_gather_object(rows, row)",
    ],
)
def test_the_contract_sees_them(source: str) -> None:
    assert problems(source)


def test_the_contract_lets_weights_pass() -> None:
    assert problems("torch.load(path, weights_only=True)\nnp.load(path)") == []
