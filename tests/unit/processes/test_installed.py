"""A release that was not tried is named, with what was tried, before anything of it is imported."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from millrace.errors import InvalidSpecError, InvalidStateError
from millrace.processes.installed import may_be_untried, require_tried, untried_packages

Install = Callable[[str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return puts the metadata of a package before those that are installed."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(name: str, release: str, requires: str = "") -> None:
        directory = tmp_path / f"{name}-{release}.dist-info"
        directory.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {release}"]
        lines += [f"Requires-Dist: {each}" for each in requires.splitlines()]
        (directory / "METADATA").write_text("\n".join(lines) + "\n")

    return install


@pytest.mark.parametrize("extra", ["trainer", "inference", "env-server", "local"])
def test_what_is_installed_for_these_tests_was_tried(extra: str) -> None:
    assert untried_packages(extra) == {}


@pytest.mark.parametrize(
    "extra, name",
    [("trainer", "torch"), ("trainer", "transformers"), ("env-server", "verifiers"), ("local", "renderers")],
)
def test_a_later_release_is_refused_by_name(install: Install, extra: str, name: str) -> None:
    install(name, "99.1")
    with pytest.raises(InvalidStateError) as caught:
        require_tried(extra, {})
    assert caught.value.reason == "VERSION_NOT_TRIED" and "\n" not in caught.value.message
    assert caught.value.message.startswith(f"{name} 99.1 is installed, and Millrace was tried with {name}")
    assert f"pip install '{name}" in str(caught.value.remedy) and "MILLRACE_UNTRIED=1" in str(caught.value.remedy)


@pytest.mark.parametrize(
    "release, is_tried",
    [
        *[(release, True) for release in ("2.13.0", "2.13.1+cpu", "2.15.0+cu132", "2.15.1rc1")],
        *[(release, False) for release in ("2.12.9", "2.14.0", "2.14.1+cu130", "2.16.0", "2.16.0.dev1", "?", "")],
    ],
)
def test_patches_and_builds_are_taken_and_what_lies_between_is_not(
    install: Install, release: str, is_tried: bool
) -> None:
    install("millrace", "0.1", 'click>=99\ntorch>=2.13,!=2.14.*,<2.16; extra == "trainer"')
    install("torch", release)
    assert untried_packages("trainer") == ({} if is_tried else {"torch": (release, "!=2.14.*,<2.16,>=2.13")})
    assert untried_packages("env-server") == {}


def test_packages_that_are_not_there_are_named_elsewhere(install: Install) -> None:
    install("millrace", "0.1", 'no-such-package>=1; extra == "trainer"')
    require_tried("trainer", {})
    assert untried_packages("trainer") == {}


def test_a_user_may_try_all_the_same_and_is_warned(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    install("torch", "99.1")
    require_tried("trainer", {"MILLRACE_UNTRIED": "1"})
    assert [record.message.partition(",")[0] for record in caplog.records] == ["torch 99.1 is installed"]
    with pytest.raises(InvalidSpecError, match="MILLRACE_UNTRIED"):
        may_be_untried({"MILLRACE_UNTRIED": "yes"})


def test_a_trainer_says_it_in_one_line_before_torch_is_imported(install: Install, tmp_path: Path) -> None:
    install("torch", "99.1")
    (tmp_path / "torch.py").write_text("raise AttributeError('imported')\n")
    command = [sys.executable, "-m", "millrace.trainer.main", "sft", "--config", "none.json"]
    ended = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=60
    )
    first, *rest = ended.stderr.splitlines()
    assert ended.returncode == 2 and first.startswith("Error: torch 99.1 is installed"), ended.stderr
    assert len(rest) == 1 and rest[0].startswith("  remedy: run `python -m pip install 'torch")
