"""What `scripts/setup.sh` tells uv of pip's configuration."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "pip_indexes.py"


@pytest.mark.parametrize(
    ("configured", "variables", "options"),
    [
        ("[list]\nformat = columns\n[global]\ntimeout = 180\n", {}, []),
        (
            "[global]\nindex-url = https://one\n[install]\nindex-url = https://two\n",
            {},
            ["--default-index", "https://two"],
        ),
        (
            "[global]\nindex-url = https://one\nfind-links = /wheels\n",
            {"PIP_INDEX_URL": "https://three", "PIP_EXTRA_INDEX_URL": "https://cpu https://own"},
            [
                *("--default-index", "https://three", "--index", "https://cpu", "--index", "https://own"),
                *("--find-links", "/wheels", "--index-strategy", "unsafe-best-match"),
            ],
        ),
        (
            "[install]\nno-index = true\nfind-links =\n    /wheels\n    /more\ntrusted-host = mirror\n",
            {},
            [
                *("--find-links", "/wheels", "--find-links", "/more", "--allow-insecure-host", "mirror", "--no-index"),
                *("--index-strategy", "unsafe-best-match"),
            ],
        ),
    ],
)
def test_pips_configuration_in_words_of_uv(
    configured: str, variables: dict[str, str], options: list[str], tmp_path: Path
) -> None:
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "pip.conf").write_text(configured)
    places = {"XDG_CONFIG_DIRS": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "none"), "HOME": str(tmp_path)}
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    said = subprocess.run(
        [sys.executable, str(_SCRIPT)], env=ours | places | variables, check=True, capture_output=True, text=True
    )
    assert said.stdout.split() == options
