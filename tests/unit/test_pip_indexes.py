"""What `scripts/setup.sh` tells uv of pip's configuration."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "pip_indexes.py"


@pytest.mark.computes
@pytest.mark.parametrize(
    ("configured", "environ", "variables"),
    [
        ("[list]\nformat = columns\n[global]\ntimeout = 180\n", {}, []),
        (
            "[global]\nindex-url = https://one\n[install]\nindex-url = https://two\n",
            {},
            ["UV_DEFAULT_INDEX=https://two"],
        ),
        (
            "[global]\nindex-url = https://one\nfind-links = /wheels\n",
            {"PIP_INDEX_URL": "https://three", "PIP_EXTRA_INDEX_URL": "https://cpu https://own"},
            [
                "UV_DEFAULT_INDEX=https://three",
                "UV_INDEX=https://cpu https://own",
                "UV_FIND_LINKS=/wheels",
                "UV_INDEX_STRATEGY=unsafe-best-match",
            ],
        ),
        (
            "[install]\nno-index = true\nfind-links =\n    /wheels\n    /more\ntrusted-host = mirror\n",
            {},
            [
                "UV_FIND_LINKS=/wheels,/more",
                "UV_INSECURE_HOST=mirror",
                "MILLRACE_NO_INDEX=1",
                "UV_INDEX_STRATEGY=unsafe-best-match",
            ],
        ),
    ],
)
def test_pips_configuration_in_words_of_uv(
    configured: str, environ: dict[str, str], variables: list[str], tmp_path: Path
) -> None:
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "pip.conf").write_text(configured)
    places = {"XDG_CONFIG_DIRS": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "none"), "HOME": str(tmp_path)}
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    said = subprocess.run(
        [sys.executable, str(_SCRIPT)], env=ours | places | environ, check=True, capture_output=True, text=True
    )
    assert said.stdout.split("\n")[:-1] == (variables or [""])
