"""Model directories whose weights cannot be loaded are named with a remedy."""

import json
import shutil
from pathlib import Path

import pytest

from millrace.errors import CorruptObjectError
from millrace.trainer.model.pretrained import load_model


@pytest.mark.parametrize("damage", ["cut", "sizes"])
def test_weights_that_do_not_load_are_named(example: Path, tmp_path: Path, damage: str) -> None:
    directory = tmp_path / "model"
    shutil.copytree(example / "base", directory)
    if damage == "cut":
        weights = directory / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1000])
    else:
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**config, "hidden_size": 32}))
    with pytest.raises(CorruptObjectError, match=r"safetensors.*config\.json.*model\.name") as raised:
        load_model(directory)
    assert raised.value.reason == "MODEL_CORRUPT" and str(directory) in str(raised.value)
    assert "\n" not in str(raised.value)
