"""The wire: generated code is fresh, protos are clean, and nothing that was published breaks."""

import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROTO = ROOT / "proto"
GENERATED = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def buf() -> str:
    beside = Path(sys.executable).with_name("buf")
    found = str(beside) if beside.exists() else shutil.which("buf")
    if found is None:
        pytest.fail("buf is missing; install the dev dependencies (buf-bin)")
    return found


def run(*args: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(args, cwd=cwd, capture_output=True, text=True, timeout=110, check=False)


def generated_files(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for suffix in GENERATED
        for path in root.glob(f"millrace/**/*{suffix}")
    }


def test_generated_code_is_what_the_protos_give(tmp_path: Path) -> None:
    if not version("grpcio-tools").startswith("1.76."):
        pytest.skip(f"generated code is made with grpcio-tools 1.76, here is {version('grpcio-tools')}")
    sources = sorted(str(path.relative_to(PROTO)) for path in PROTO.rglob("*.proto"))
    outputs = (f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", f"--grpc_python_out={tmp_path}")
    done = run(sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO}", *outputs, *sources)
    assert done.returncode == 0, done.stderr
    fresh, kept = generated_files(tmp_path), generated_files(ROOT / "services")
    assert kept.keys() == fresh.keys(), "run `make protos`, and delete what no proto makes any more"
    stale = [name for name, content in fresh.items() if kept[name] != content]
    assert stale == [], "run `make protos`"


def test_protos_pass_the_linter() -> None:
    done = run(buf(), "lint", cwd=PROTO)
    assert done.returncode == 0, done.stdout + done.stderr


def before(tmp_path: Path) -> Path:
    """Return the protos of the commit before the one that last changed them, or of HEAD where they are changed now."""
    if shutil.which("git") is None or run("git", "rev-parse", "--git-dir").returncode != 0:
        pytest.skip("no git history here: nothing to compare with")
    touched = run("git", "log", "-n", "2", "--format=%H", "--", "proto").stdout.split()
    is_changed = bool(run("git", "status", "--porcelain", "--", "proto").stdout.strip())
    candidates = touched if is_changed else touched[1:]
    if not candidates:
        pytest.skip("the protos have no earlier commit to compare with (first commit, or a shallow clone)")
    archive = tmp_path / "before.tar"
    done = run("git", "archive", "--output", str(archive), candidates[0], "proto")
    assert done.returncode == 0, done.stderr
    shutil.unpack_archive(archive, tmp_path / "before", filter="data")
    return tmp_path / "before" / "proto"


def test_protos_do_not_break_those_of_the_commit_before(tmp_path: Path) -> None:
    done = run(buf(), "breaking", "--against", str(before(tmp_path)), cwd=PROTO)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_breaking_check_sees_a_break(tmp_path: Path) -> None:
    now = tmp_path / "now"
    shutil.copytree(PROTO, now)
    checkpoint = now / "millrace" / "v1" / "checkpoint.proto"
    text = checkpoint.read_text()
    assert "uint64 step = 2;" in text
    checkpoint.write_text(text.replace("uint64 step = 2;", "string step = 2;"))
    done = run(buf(), "breaking", "--against", str(PROTO), cwd=now)
    assert done.returncode != 0
    assert "checkpoint.proto" in done.stdout
