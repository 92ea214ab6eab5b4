"""Interpreters that environments bring with them: which are allowed, what is said of those that cannot be used."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from millrace.env_server.interpreters import (
    ANY,
    NEEDED,
    parse_pythons,
    problem_of,
    require_allowed,
    require_usable,
    shown_files,
)
from millrace.env_server.library import releases, v1
from millrace.env_server.workers.starter import preloaded
from millrace.errors import InvalidSpecError
from millrace_testing.repository import REPOSITORY


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a virtual environment without any package."""
    place = tmp_path_factory.mktemp("venvs") / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True, timeout=120)
    return str(place / "bin" / "python")


def script(path: Path, text: str, *, mode: int = 0o755) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_only_what_lies_below_an_allowed_directory_may_be_named(bare: str, tmp_path: Path) -> None:
    place = str(Path(bare).parents[2])
    assert problem_of("", ()) == "" and problem_of(bare, [place]) == "" and problem_of(bare, [ANY]) == ""
    assert "MILLRACE_ENV_PYTHONS of the env-server is not set" in problem_of(bare, [])
    assert f"MILLRACE_ENV_PYTHONS={Path(bare).parents[1]}" in problem_of(bare, []), "the remedy can be copied"
    assert f"allows what lies below {tmp_path}" in problem_of(bare, [str(tmp_path)])
    assert "not allowed" in problem_of(f"{tmp_path}/../../{bare}", [str(tmp_path)])
    assert "not allowed" in problem_of(bare, [f"{place}/ba"]), "a directory, not the beginning of a name"
    (tmp_path / "link").symlink_to(Path(bare).parent)
    assert "not allowed" in problem_of(str(tmp_path / "link" / "python"), [str(tmp_path)])
    with pytest.raises(InvalidSpecError) as raised:
        require_allowed(bare, ())
    [wrong] = raised.value.violations
    assert (wrong.field, wrong.value, raised.value.reason) == ("orchestrator.env.python", bare, "ENV_PYTHON_REFUSED")


def test_what_is_no_program_is_refused_before_anything_runs(bare: str, tmp_path: Path) -> None:
    assert "must be an absolute path" in problem_of("venv/bin/python", [ANY])
    assert f"python3 -m venv {tmp_path}/venv" in problem_of(f"{tmp_path}/venv/bin/python", [ANY])
    assert "is no program" in problem_of(str(Path(bare).parent), [ANY])
    assert "is no program" in problem_of(script(tmp_path / "text", "", mode=0o644), [ANY])


def test_the_setting_is_a_list_of_absolute_paths() -> None:
    assert parse_pythons("/opt/a:/opt/b:") == ("/opt/a", "/opt/b") and parse_pythons("*") == (ANY,)
    with pytest.raises(ValueError, match="absolute paths of directories"):
        parse_pythons("/opt/a:venvs")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("#!/bin/sh\necho no such thing >&2; exit 3\n", "is no Python interpreter that works: no such thing"),
        ("#!/bin/sh\necho hello\n", "is no Python interpreter that works: exit code 0"),
        ("just text\n", "cannot be run here"),
        ('#!/bin/sh\necho \'{"python": [3, 9, 1], "versions": {}}\'\n', "is Python 3.9.1, and workers need 3.11"),
    ],
)
def test_what_is_no_fitting_python_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidSpecError) as raised:
        require_usable(script(tmp_path / "python", text))
    assert said in raised.value.violations[0].message and raised.value.reason == "ENV_PYTHON_UNUSABLE"


def test_what_it_lacks_is_named_with_the_command_that_installs_it(bare: str) -> None:
    with pytest.raises(InvalidSpecError) as raised:
        require_usable(bare)
    message = raised.value.violations[0].message
    assert "lacks what a worker needs: aiohttp>=3.12, " in message
    assert f"`{bare} -m pip install 'aiohttp>=3.12' " in message and "'protobuf>=6.33.5,<8'" in message
    assert "'zstandard>=0.23' 'verifiers'`" in message


def test_packages_on_our_own_search_path_are_not_the_interpreters(
    bare: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, bounds in {**NEEDED, "verifiers": ">=0.3.1"}.items():
        info = tmp_path / f"{name}-99.dist-info"
        info.mkdir()
        release = "7.0" if "<" in bounds else "99"
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(InvalidSpecError, match="lacks what a worker needs: aiohttp"):
        require_usable(bare)


def test_a_package_that_is_too_old_is_named_with_its_version(tmp_path: Path) -> None:
    versions = dict.fromkeys(NEEDED, "99") | {"protobuf": "7.1", "numpy": "1.25.9", "verifiers": "0.1.14"}
    answer = json.dumps({"python": [3, 12, 0], "versions": versions})
    with pytest.raises(InvalidSpecError) as raised:
        require_usable(script(tmp_path / "python", f"#!/bin/sh\necho '{answer}'\n"))
    assert "needs: numpy>=1.26 (found 1.25.9); run " in raised.value.violations[0].message


def test_a_package_that_its_library_cannot_be_imported_with_is_named(tmp_path: Path) -> None:
    """verifiers 0.3.1 takes any later renderers, and imports names that 0.1.11 no longer has."""
    needed = dict.fromkeys(NEEDED, "99") | {"protobuf": "7.1"}
    for versions, said in (
        ({"verifiers": "0.3.1", "renderers": "0.1.12"}, "'renderers>=0.1.10,<0.1.11'`"),
        ({"verifiers": "0.3.1"}, "needs: renderers>=0.1.10,<0.1.11; run"),
        ({"verifiers": "0.3.1", "renderers": "0.1.10"}, ""),
        ({"verifiers": "0.4.0", "renderers": "0.1.12"}, ""),
    ):
        answer = json.dumps({"python": [3, 12, 0], "versions": needed | versions})
        python = script(tmp_path / "python", f"#!/bin/sh\necho '{answer}'\n")
        if not said:
            require_usable(python)
            continue
        with pytest.raises(InvalidSpecError) as raised:
            require_usable(python)
        assert said in raised.value.violations[0].message


def test_this_interpreter_can_be_used() -> None:
    require_usable(sys.executable)


def test_the_extra_says_what_a_worker_needs() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    listed = [each for each in project["dependencies"] if each.startswith(("grpcio>", "protobuf", "pydantic"))]
    listed += project["optional-dependencies"]["env-worker"]
    assert sorted(listed) == sorted(f"{name}{bounds}" for name, bounds in NEEDED.items())


def test_a_container_shows_the_environment_and_the_python_that_it_is_made_of(bare: str) -> None:
    shown = shown_files(bare)
    assert str(Path(bare).parents[1]) in shown and sys.base_prefix in shown and shown_files("") == []


def test_a_container_shows_no_more_than_that(bare: str, tmp_path: Path) -> None:
    (tmp_path / "bin").symlink_to(Path(bare).parent)
    shown = shown_files(str(tmp_path / "bin" / "python"))
    assert str(tmp_path) not in shown and str(Path(bare).resolve().parents[1]) in shown_files(bare)
    assert "/" not in shown_files("/python")


@pytest.mark.parametrize(
    ("generation", "release", "said"),
    [
        ("v0", "0.1.14", ""),
        ("v0", "0.3.1", ""),
        ("v0", "0.1.9.post3", "is a v0 environment, and verifiers 0.1.9.post3 is installed with it"),
        ("v0", "0.4.0", "v0 environments are played with verifiers 0.1.14 to 0.3.1 (0.4 has no v0 API"),
        ("v1", "0.3.1", ""),
        ("v1", "0.4.0", ""),
        ("v1", "0.1.14", "v1 environments are played with verifiers 0.3.1 and 0.4"),
        ("v1", "0.5.0", "verifiers 0.5.0 is installed with it"),
        ("v0", "", "verifiers (none) is installed with it"),
    ],
)
def test_releases_that_are_hosted(generation: str, release: str, said: str) -> None:
    problem = releases.problem_of(generation, release)
    assert said in problem and bool(said) == bool(problem)


@pytest.mark.parametrize(
    ("stop", "error", "is_too_long"),
    [
        ("context_length", None, True),
        ("error", ("ProviderError", "This model's maximum context length is 8 tokens."), True),
        ("error", ("OverlongPromptError", "Prompt length (9) exceeds maximum context length (8)"), True),
        ("error", ("ProviderError", "boom"), False),
        ("error", ("TaskError", "maximum context length"), False),
        ("agent_completed", None, False),
    ],
)
def test_releases_say_in_their_own_words_that_a_prompt_does_not_fit(
    stop: str, error: tuple[str, str] | None, is_too_long: bool
) -> None:
    said = None if error is None else SimpleNamespace(type=error[0], message=error[1])
    assert v1.is_too_long(stop, said) == is_too_long


@pytest.mark.parametrize(("release", "generation"), [("0.1.14", "v0"), ("0.3.1", "v0"), ("0.4.0", "v1")])
def test_the_template_of_workers_imports_what_the_release_has(release: str, generation: str) -> None:
    adapters = [each for each in preloaded(release) if each.rpartition(".")[2] in ("v0", "v1")]
    assert adapters == [f"millrace.env_server.adapters.{generation}"]


def test_fields_of_the_mcp_library_are_found_by_either_name() -> None:
    assert v1.mcp_field(SimpleNamespace(inputSchema=1), "inputSchema") == 1
    assert v1.mcp_field(SimpleNamespace(input_schema=2), "inputSchema") == 2


def test_what_the_package_of_an_environment_asks_for_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "newer_tasks-1.2.dist-info"
    place.mkdir()
    needs = "Requires-Dist: verifiers-extras\nRequires-Dist: verifiers[ta]>=0.4.0; python_version > '3'\n"
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: newer-tasks\nVersion: 1.2\n{needs}")
    (place / "top_level.txt").write_text("newer_tasks\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    said = str(releases.unfit("org/newer-tasks", ImportError("no name 'select'")))
    assert "no name 'select'. Its package newer-tasks asks for verifiers[ta]>=0.4.0. Millrace plays" in said
    assert "orchestrator.env.python" in said and "Its package" not in str(releases.unfit("others", ImportError("x")))
    monkeypatch.setattr(releases, "installed", lambda: "0.1.0")
    with pytest.raises(InvalidSpecError, match=r"asks for verifiers\[ta\]>=0.4.0. To play it, install a release"):
        releases.require("v1", "newer-tasks")
