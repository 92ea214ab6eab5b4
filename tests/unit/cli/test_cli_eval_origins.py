"""What `--resume` of an evaluation takes for changed: everything that is at the paths which it was begun with."""

from collections.abc import Callable
from pathlib import Path

import pytest

from millrace.cli.evals.policies import digest_directory, digest_environment, digests_of
from millrace.cli.evals.prepare import prepare_eval


@pytest.fixture
def envs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def written(path: Path, text: str = "VALUE = 1\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def changes(digest: Callable[[], object], file: Path) -> bool:
    """Return whether a digest is another one with other bytes in a file, and the same with the old ones."""
    before, text = digest(), file.read_text()
    file.write_text(text + "OTHER = 1\n")
    after = digest()
    file.write_text(text)
    assert digest() == before
    return after != before


def test_an_environment_is_also_the_modules_beside_it_that_it_imports(envs: Path) -> None:
    written(envs / "origins_env.py", "import json\nfrom _origins_common import VALUE\n")
    common = written(envs / "_origins_common.py", "from origins_tools.more import VALUE\n")
    tool = written(envs / "origins_tools" / "more.py")
    written(envs / "origins_tools" / "__init__.py", "import origins_env\nimport no_such_module\n")
    others = [written(envs / "unrelated.py"), written(envs / "json_lines.py")]
    found = [changes(lambda: digest_environment("origins-env"), file) for file in (common, tool, *others)]
    assert found == [True, True, False, False]


def test_a_package_is_also_the_modules_beside_it_that_it_imports(envs: Path) -> None:
    written(envs / "origins_package" / "__init__.py", "from . import tasks\n")
    tasks = written(envs / "origins_package" / "tasks.py", "import origins_shared\n")
    shared = written(envs / "origins_shared.py")
    written(envs / "origins_package" / "broken.py", "def (")
    assert all(changes(lambda: digest_environment("origins-package"), file) for file in (tasks, shared))


def test_where_packages_are_installed_nothing_beside_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = tmp_path / "site-packages"
    written(places / "origins_installed.py", "import origins_large\n")
    large = written(places / "origins_large.py")
    monkeypatch.syspath_prepend(places)
    assert not changes(lambda: digest_environment("origins-installed"), large)


def test_linked_directories_are_part_of_what_they_lie_in_and_may_be_circles(tmp_path: Path) -> None:
    elsewhere = written(tmp_path / "elsewhere" / "weights")
    model = written(tmp_path / "model" / "config.json").parent
    (model / "linked").symlink_to(elsewhere.parent)
    (model / "circle").symlink_to(model)
    assert changes(lambda: digest_directory(model), elsewhere)


def test_files_that_args_name_are_part_of_their_environment(envs: Path) -> None:
    written(envs / "model" / "config.json", "{}")
    written(envs / "origins_env.py")
    tasks = written(envs / "tasks.jsonl", "{}\n")
    toml = f"""
[model]
name = "{envs / "model"}"
[[env]]
id = "origins-env"
args = {{ sources = [{{ path = "{tasks}" }}], level = "hard" }}
"""
    prepared = prepare_eval(["@", str(written(envs / "eval.toml", toml))], environ={})
    digests = digests_of(prepared.config)
    assert set(digests) == {"model", "environment origins-env", "args.sources[0].path of environment origins-env"}
    assert changes(lambda: digests_of(prepared.config), tasks)
