"""The index or the one file decides which tensors are the model; the rest of a directory is named and not read."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from millrace.errors import MillraceError
from millrace.models.files import INDEX, WeightFiles
from millrace.models.loading import check_weights, empty_model, fill_model
from millrace_testing.model_files import make_qwen3

STALE = "model-00001-of-00099.safetensors"


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model in several files with an index."""
    directory = make_qwen3(tmp_path_factory.mktemp("sharded"), is_tied=False, shard="8KB")
    assert (directory / INDEX).is_file()
    return directory


@pytest.fixture
def shards(sharded: Path, tmp_path: Path) -> Path:
    """Return a copy of it, to be damaged."""
    return shutil.copytree(sharded, tmp_path / "model")


def _older(directory: Path, name: str) -> None:
    """Write all tensors of another model into a file beside the model's."""
    older = make_qwen3(directory / "older", is_tied=False, seed=9)
    shutil.move(older / "model.safetensors", directory / name)
    shutil.rmtree(older)


@pytest.mark.parametrize("name", [STALE, "zzz.safetensors", "consolidated.safetensors"])
def test_what_lies_beside_the_index_is_named_and_not_read(
    sharded: Path, shards: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    _older(shards, name)
    with caplog.at_level(logging.WARNING):
        fill_model(model := empty_model(shards), shards, device=torch.device("cpu"))
    fill_model(expected := empty_model(sharded), sharded, device=torch.device("cpu"))
    values = expected.state_dict()
    assert all(torch.equal(tensor, values[key]) for key, tensor in model.state_dict().items())
    assert [vars(record)["not_read"] for record in caplog.records if "not_read" in vars(record)] == [name]


def test_what_lies_beside_the_one_file_is_named_and_not_read(copy: Path) -> None:
    _older(copy, STALE)
    found = WeightFiles.find(copy, {})
    assert found.files == (copy / "model.safetensors",) and found.beside == (STALE,)


def _index(change: Callable[[dict[str, str]], Any]) -> Callable[[Path], object]:
    def write(directory: Path) -> None:
        document = json.loads((directory / INDEX).read_text())
        document["weight_map"] = change(document["weight_map"])
        (directory / INDEX).write_text(json.dumps(document))

    return write


def _twice(directory: Path) -> None:
    text = (directory / INDEX).read_text()
    line = next(line for line in text.splitlines() if "lm_head.weight" in line)
    (directory / INDEX).write_text(text.replace(line, f"{line.rstrip(',')},\n{line}"))


def _cut_shard(directory: Path) -> None:
    file = json.loads((directory / INDEX).read_text())["weight_map"]["model.norm.weight"]
    tensors = load_file(directory / file)
    del tensors["model.norm.weight"]
    save_file(tensors, directory / file)


def _rename_to(name: str) -> Callable[[Path], object]:
    def rename(directory: Path) -> None:
        for path in directory.glob("model*safetensors*"):
            path.unlink()
        (directory / name).write_bytes(b"")

    return rename


BROKEN: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "a file that is not there": (
        _index(lambda names: {**names, "lm_head.weight": "model-00077-of-00077.safetensors"}),
        "MODEL_CORRUPT",
        "not there: model-00077-of-00077.safetensors",
    ),
    "a tensor that its file lacks": (_cut_shard, "MODEL_CORRUPT", "not in the files: model.norm.weight"),
    "a tensor less": (
        _index(lambda names: {name: file for name, file in names.items() if name != "model.norm.weight"}),
        "MODEL_CORRUPT",
        "1 tensor missing: model.norm.weight",
    ),
    "a tensor twice": (_twice, "MODEL_FILE_UNUSABLE", f"{INDEX}.*a key twice"),
    "a file elsewhere": (
        _index(lambda names: {**names, "lm_head.weight": "../model.safetensors"}),
        "MODEL_CORRUPT",
        "no \\*.safetensors beside it: ../model.safetensors",
    ),
    "no map": (_index(lambda _: ["model.safetensors"]), "MODEL_CORRUPT", "no weight_map"),
    "an index of nothing": (_index(lambda _: {}), "MODEL_CORRUPT", "no weight_map"),
    "an index that is cut": (
        lambda directory: (directory / INDEX).write_text((directory / INDEX).read_text()[:99]),
        "MODEL_FILE_UNUSABLE",
        INDEX,
    ),
    "one file besides": (lambda d: _older(d, "model.safetensors"), "MODEL_CORRUPT", "two models in it"),
    "pickles only": (_rename_to("pytorch_model.bin"), "MODEL_NOT_FOUND", "pytorch_model.bin is not read"),
    "consolidated only": (_rename_to("consolidated.safetensors"), "MODEL_NOT_FOUND", "consolidated.safetensors"),
    "nothing": (lambda d: [p.unlink() for p in d.glob("model*")], "MODEL_NOT_FOUND", "neither model.safetensors nor"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_files_that_contradict_each_other_are_refused(shards: Path, case: str) -> None:
    damage, reason, said = BROKEN[case]
    damage(shards)
    with pytest.raises(MillraceError, match=said) as raised:
        check_weights(shards)
    assert raised.value.reason == reason and raised.value.remedy


def test_an_index_of_the_one_file_is_that_file(copy: Path) -> None:
    names = load_file(copy / "model.safetensors")
    (copy / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    check_weights(copy)
