"""Directories for large files: gone with their owner, and with the next one if the owner was killed."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.errors import UnavailableError
from millrace.storage.scratch import SCRATCH_VARIABLE, owned_directory, scratch_parent

_OWNER = """
import subprocess, sys
from millrace.storage.scratch import owned_directory
with owned_directory("policy") as directory:
    (directory / "policy.safetensors").write_bytes(b"x" * 1000)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)  # holds no lock
    print(directory, flush=True)
    sys.stdin.read()
child.kill()
"""


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(SCRATCH_VARIABLE, str(tmp_path / "scratch"))
    return tmp_path / "scratch"


def start() -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen([sys.executable, "-c", _OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_it_is_gone_at_the_end(parent: Path) -> None:
    with pytest.raises(ValueError, match="vLLM died"), owned_directory("checkpoint") as directory:
        (directory / "below").mkdir()
        assert directory.parent == parent and directory.name.startswith("millrace-checkpoint-")
        raise ValueError("vLLM died")
    assert not list(parent.iterdir())


def test_that_of_a_killed_owner_goes_with_the_next_and_that_of_a_living_one_stays(parent: Path) -> None:
    living, kept = start()
    killed, left = start()
    try:
        killed.send_signal(signal.SIGKILL)
        killed.wait(30)
        assert (left / "policy.safetensors").exists() and (kept / "policy.safetensors").exists()
        stranger = parent / "millrace-policy-by-hand"
        stranger.mkdir()
        with owned_directory("checkpoint") as own:
            assert set(parent.iterdir()) == {kept, stranger, own}
        living.communicate("", timeout=30)
        assert list(parent.iterdir()) == [stranger]
    finally:
        for process in (living, killed):
            process.kill()
            process.communicate()


def test_a_removal_that_is_cut_short_is_taken_up_by_the_next(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as cut, pytest.raises(KeyboardInterrupt), owned_directory("checkpoint") as first:
        (first / "shards").mkdir()
        cut.setattr(shutil, "rmtree", die)
    assert (first / "shards").exists()
    with owned_directory("checkpoint") as second:
        assert list(parent.iterdir()) == [second]


def test_what_only_looks_like_ours_is_left_alone(parent: Path, tmp_path: Path) -> None:
    theirs = parent / "millrace-x"
    theirs.mkdir(parents=True)
    (tmp_path / "target").touch()
    (theirs / "owner.lock").symlink_to(tmp_path / "target")
    with owned_directory("checkpoint") as own:
        assert set(parent.iterdir()) == {theirs, own}


def test_a_place_that_cannot_be_written_is_named_with_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(SCRATCH_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(UnavailableError, match=r"file.*MILLRACE_SCRATCH_DIR"):
        scratch_parent()
