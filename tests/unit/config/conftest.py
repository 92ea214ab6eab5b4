"""What the config tests share: a minimal command line and files in a temporary directory."""

from collections.abc import Callable
from pathlib import Path

import pytest

from millrace.config import Loaded, RLConfig, load
from millrace.errors import InvalidSpecError, Violation

MINIMAL = ["--orchestrator.env", '[{"id": "reverse-text"}]', "--orchestrator.rollouts-per-example", "16"]


@pytest.fixture
def load_rl(tmp_path: Path) -> Callable[..., Loaded[RLConfig]]:
    """Return loads an RL config from flags behind the least that is required, with files relative to a temporary
    directory.
    """

    def run(*argv: str, env: dict[str, str] | None = None, minimal: bool = True) -> Loaded[RLConfig]:
        return load(RLConfig, [*(MINIMAL if minimal else []), *argv], env or {}, cwd=tmp_path)

    return run


@pytest.fixture
def violations(load_rl: Callable[..., Loaded[RLConfig]]) -> Callable[..., list[Violation]]:
    """Return loads a config that must be refused and returns why."""

    def run(*argv: str, env: dict[str, str] | None = None, minimal: bool = True) -> list[Violation]:
        with pytest.raises(InvalidSpecError) as caught:
            load_rl(*argv, env=env, minimal=minimal)
        assert caught.value.exit_code == 2
        return list(caught.value.violations)

    return run
