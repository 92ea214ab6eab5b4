"""What `scripts/setup.sh` tells uv of pip's configuration."""

import importlib.util
from pathlib import Path

import pytest

_PATH = Path(__file__).resolve().parents[2] / "scripts" / "pip_indexes.py"


@pytest.mark.parametrize(
    ("listed", "options"),
    [
        ("", []),
        (":env:.timeout='180'\nlist.format='columns'\nglobal.cert='/etc/ca.crt'\n", []),
        ("global.index-url='https://mirror/simple'\n", ["--default-index", "https://mirror/simple"]),
        (
            "global.index-url='https://one'\ninstall.index-url='https://two'\n:env:.index-url='https://three'\n",
            ["--default-index", "https://three"],
        ),
        (
            "global.extra-index-url='\\nhttps://cpu\\nhttps://own'\nglobal.find-links='/wheels'\n",
            [
                *("--index", "https://cpu", "--index", "https://own", "--find-links", "/wheels"),
                *("--index-strategy", "unsafe-best-match"),
            ],
        ),
        (
            "install.no-index='true'\ninstall.find-links='/wheels'\ninstall.trusted-host='mirror'\n",
            [
                *("--find-links", "/wheels", "--allow-insecure-host", "mirror", "--no-index"),
                *("--index-strategy", "unsafe-best-match"),
            ],
        ),
    ],
)
def test_pips_configuration_in_words_of_uv(listed: str, options: list[str]) -> None:
    spec = importlib.util.spec_from_file_location("pip_indexes", _PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert list(module.uv_options(listed)) == options
