"""Every clean-up goes through `storage/clean_up.py`, which fails nothing; what has to be gone is listed here."""

import ast
from pathlib import Path

import millrace
from millrace_testing import syntax

ROOT = Path(millrace.__file__).parent
REMOVING = {"rmtree", "unlink", "remove", "rmdir", "TemporaryDirectory"}
MODULES = {"os", "shutil", "tempfile", "Path"}
HAS_TO_BE_GONE = {
    "cli/commands/dashboard.py": "the page before, whose code is spent, gives its name to the new one",
    "readers/dashboard/index.py": "the files of a damaged index, which is made anew",
    "env_server/spool.py": "half a file, where the error of writing it is raised",
    "inference/vllm/ranks.py": "the file of the order before, which workers may still have mapped",
    "local/redis.py": "a file of the same process id, which gives its name to the new one",
    "policies/host_copy.py": "the file before, which processes may still have mapped",
    "policies/peft/directory.py": "the directory that the files were moved out of",
    "storage/clean_up.py": "the one place",
    "storage/local.py": "what `delete` deletes",
    "telemetry/faults.py": "of tests",
}


def _removes(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in REMOVING:
        return False
    owner = node.func.value
    if node.func.attr in ("unlink", "rmdir"):
        return True
    return isinstance(owner, ast.Name) and owner.id in MODULES


def test_nothing_else_removes_files() -> None:
    found = {
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*.py")
        if any(map(_removes, syntax.walk(syntax.parse(path.read_text()))))
    }
    assert found == set(HAS_TO_BE_GONE), "a clean-up is `clean_up.remove`; of what has to be gone, say why here"
