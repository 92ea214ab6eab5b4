"""In which interpreter an environment is played that names none: what packages' metadata says, none of them run."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from millrace.env_server import interpreters
from millrace.env_server.interpreters import ANY, Choice, choose, default_place, known_interpreters, own_pythons
from millrace.errors import InvalidSpecError

OURS = "0.3.1"


def installed(site: Path, name: str, version: str, *, asks: Sequence[str] = (), files: Sequence[str] = ()) -> Path:
    """Return a package as pip leaves it: its metadata, and its files."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    needs = "".join(f"Requires-Dist: {each}\n" for each in asks)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}\n")
    (info / "RECORD").write_text("".join(f"{each},,\n" for each in files))
    for each in files:
        (site / each).parent.mkdir(parents=True, exist_ok=True)
        (site / each).write_text("raise SystemExit('nothing of it is run')\n")
    return info


class Venvs:
    """Virtual environments, as files, in one directory; `ours` is where the env-server finds its own packages."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.ours = place.parent / "ours"
        installed(self.ours, "verifiers", OURS, asks=["textarena==0.7.4; extra == 'ta'"])

    def make(self, name: str, release: str) -> Path:
        """Make one with that release; returns its packages' directory."""
        home = self.place / name
        site = home / "lib" / "python3.11" / "site-packages"
        (home / "bin").mkdir(parents=True)
        (home / "bin" / "python").symlink_to(sys.executable)
        tasksets = ["verifiers/v1/tasksets/textarena/__init__.py"]
        installed(site, "verifiers", release, asks=["textarena==0.7.4; extra == 'ta'"], files=tasksets)
        return site

    def choose(self, env_id: str, *, allowed: Sequence[str] | None = None) -> Choice:
        return choose(env_id, [str(self.place), ANY] if allowed is None else allowed)

    def python(self, name: str) -> str:
        return str(self.place / name / "bin" / "python")


@pytest.fixture
def venvs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Venvs:
    made = Venvs(tmp_path / "venvs")
    monkeypatch.syspath_prepend(str(made.ours))
    return made


def test_an_environment_is_played_where_its_package_finds_its_release(venvs: Venvs) -> None:
    installed(venvs.ours, "new-env", "1.0", asks=["verifiers>=0.4"], files=["new_env.py"])
    installed(venvs.ours, "any-env", "1.0", asks=["verifiers>=0.1.9"], files=["any_env.py"])
    for name, release in (("a", "0.1.14"), ("b", "0.4.0")):
        site = venvs.make(name, release)
        installed(site, "new-env", "1.0", asks=["verifiers>=0.4"], files=["new_env.py"])
        installed(site, "any-env", "1.0", asks=["verifiers>=0.1.9"], files=["any_env.py"])
    chosen = venvs.choose("new-env")
    assert chosen.python == venvs.python("b")
    assert chosen.why == f"played in {chosen.python} (verifiers 0.4.0): its package asks for verifiers>=0.4"
    assert venvs.choose("owner/new-env@1.0") == chosen, "as the hub writes it"
    assert venvs.choose("any-env") == Choice(), "ours is the first that fits"
    assert [each.release for each in known_interpreters([str(venvs.place)])] == [OURS, "0.1.14", "0.4.0"]


def test_one_that_only_another_interpreter_has_is_played_there(venvs: Venvs) -> None:
    installed(venvs.make("a", "0.4.0"), "other", "1.0", asks=["verifiers<0.2"], files=["elsewhere.py"])
    site = venvs.make("b", "0.1.14")
    installed(site, "its-package", "2.0", asks=["verifiers[ta] (<0.2)"], files=["elsewhere.py"])
    chosen = venvs.choose("elsewhere")
    assert chosen.python == venvs.python("b"), "a module may be named otherwise than its package"
    assert "the env-server's own interpreter does not have it" in chosen.why
    beside = venvs.place.parent / "checkout"
    beside.mkdir()
    (beside / "loose_env.py").write_text("")
    (site / "loose.pth").write_text(f"# where it is worked on\nimport sys; sys.exit(1)\n{beside}\n")
    assert venvs.choose("loose-env").python == venvs.python("b")
    assert venvs.choose("nowhere") == Choice(), "whose worker says what is missing"


def test_a_taskset_of_the_library_is_played_where_its_games_are(venvs: Venvs) -> None:
    taskset = venvs.ours / "verifiers" / "v1" / "tasksets" / "textarena"
    taskset.mkdir(parents=True)
    (taskset / "__init__.py").write_text("")
    site = venvs.make("a", "0.4.0")
    assert venvs.choose("textarena") == Choice(), "the games are nowhere, so ours says it"
    old = installed(site, "textarena", "0.6.0")
    assert old.is_dir() and venvs.choose("textarena").python == ""
    old.rename(old.with_name("textarena-0.7.4.dist-info"))
    (old.with_name("textarena-0.7.4.dist-info") / "METADATA").write_text("Name: textarena\nVersion: 0.7.4\n")
    chosen = venvs.choose("textarena")
    assert chosen.python == venvs.python("a") and "what it plays with is there" in chosen.why


def test_one_that_fits_nowhere_is_refused_with_the_command_that_makes_its_interpreter(venvs: Venvs) -> None:
    installed(venvs.ours, "new-env", "1.2", asks=["verifiers>=0.4,<0.5"], files=["new_env.py"])
    venvs.make("a", "0.4.0")
    with pytest.raises(InvalidSpecError) as raised:
        venvs.choose("new-env")
    [wrong] = raised.value.violations
    assert (wrong.field, wrong.value, raised.value.reason) == (
        "orchestrator.env.id",
        "new-env",
        "ENV_RELEASE_UNSUPPORTED",
    )
    place = venvs.place / "new-env"
    made = f"`python3 -m venv {place} && {place}/bin/python -m pip install new-env==1.2 'verifiers==0.4.0' 'aiohttp"
    assert "asks for verifiers<0.5,>=0.4, and no interpreter here has it" in wrong.message
    assert f"the env-server has 0.3.1, {venvs.python('a')} has 0.4.0" in wrong.message and made in wrong.message
    assert "MILLRACE_ENV_PYTHONS" not in wrong.message
    with pytest.raises(InvalidSpecError, match="start the env-server with MILLRACE_ENV_PYTHONS=") as raised:
        venvs.choose("new-env", allowed=[])
    assert default_place() in str(raised.value)


def test_the_command_names_the_directory_of_what_is_worked_on_and_the_release_that_it_asks_for(venvs: Venvs) -> None:
    info = installed(venvs.ours, "my-env", "0.1", asks=["verifiers<0.2"], files=["my_env.py"])
    (info / "direct_url.json").write_text(json.dumps({"url": "file:///src/my-env", "dir_info": {"editable": True}}))
    with pytest.raises(InvalidSpecError, match=r"pip install /src/my-env 'verifiers==0\.1\.14'"):
        venvs.choose("my-env")
    installed(venvs.ours, "far-env", "0.1", asks=["verifiers>=0.9"], files=["far_env.py"])
    with pytest.raises(InvalidSpecError, match=r"Millrace plays v0 with 0\.1\.14 to 0\.3\.1 and v1 with 0"):
        venvs.choose("far-env")


def test_what_cannot_be_read_as_a_requirement_asks_for_nothing(venvs: Venvs) -> None:
    asks = ["verifiers @@@", "verifiers>=0.4; extra == 'new'", "verifiers>=9; python_version < '3'", "verifiers-rl>=9"]
    info = installed(venvs.ours, "odd-env", "1.0", asks=asks, files=["odd_env.py"])
    (info / "direct_url.json").write_text("[")
    assert venvs.choose("odd-env") == Choice()
    assert venvs.choose("..") == venvs.choose("a.b") == venvs.choose("") == Choice()


def test_only_interpreters_below_allowed_directories_are_known(venvs: Venvs, tmp_path: Path) -> None:
    installed(venvs.make("a", "0.4.0"), "there-env", "1.0", files=["there_env.py"])
    assert venvs.choose("there-env").python == venvs.python("a")
    assert venvs.choose("there-env", allowed=[ANY]) == venvs.choose("there-env", allowed=[]) == Choice()
    outside = tmp_path / "links"
    outside.mkdir()
    (outside / "a").symlink_to(venvs.place / "a")
    assert venvs.choose("there-env", allowed=[str(outside)]) == Choice(), "a link leads out of what is allowed"
    assert venvs.choose("there-env", allowed=[str(venvs.place / "a")]).python == venvs.python("a")
    assert own_pythons({}) == (default_place(), ANY)
    assert own_pythons({"MILLRACE_ENV_PYTHONS": ""}) == (), "as the env-server understands it"
    assert own_pythons({"MILLRACE_ENV_PYTHONS": "/a:/b"}) == ("/a", "/b")


def test_a_package_that_is_installed_later_is_found(venvs: Venvs) -> None:
    site = venvs.make("a", "0.4.0")
    assert venvs.choose("late") == Choice()
    installed(site, "late-package", "1.0", asks=["verifiers"], files=["late/__init__.py"])
    assert venvs.choose("late").python == venvs.python("a")


def test_no_code_of_an_interpreter_is_run(venvs: Venvs, monkeypatch: pytest.MonkeyPatch) -> None:
    site = venvs.make("a", "0.4.0")
    (site / "sitecustomize.py").write_text("raise SystemExit(1)\n")
    installed(site, "there-env", "1.0", files=["there_env/__init__.py"])
    monkeypatch.setattr(subprocess, "Popen", None)
    assert interpreters.choose("there-env", [str(venvs.place)]).python == venvs.python("a")
    assert "there_env" not in sys.modules
