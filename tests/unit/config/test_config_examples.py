import os
import tomllib
from pathlib import Path

import pytest

from millrace.config import RLConfig, SFTConfig, load
from millrace.config.files import toml_lines

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples").rglob("*.toml"))
RL = ROOT / "examples/reverse_text/rl.toml"
SPLIT = ROOT / "examples/reverse_text_split"


@pytest.mark.parametrize(
    ("path", "model"),
    [
        pytest.param(path, model, id=f"{path.parent.name}-{path.stem}")
        for name, model in (("rl", RLConfig), ("sft", SFTConfig))
        for path in sorted((ROOT / "examples").glob(f"*/{name}.toml"))
    ],
)
def test_examples_load_and_are_what_their_resolved_text_says(path: Path, model: type[RLConfig] | type[SFTConfig]):
    loaded = load(model, ["@", os.fspath(path)], {})
    assert model.model_validate_json(loaded.config.resolved_json()) == loaded.config


def test_sft_writes_what_rl_begins_with():
    sft, rl = (
        load(SFTConfig, ["@", str(RL.with_name("sft.toml"))], {}).config,
        load(RLConfig, ["@", str(RL)], {}).config,
    )
    assert rl.model.name == f"{sft.output_dir}/{sft.run.name}/model"


def test_split_form_is_the_combined_form():
    argv = []
    for service in ("trainer", "orchestrator", "inference"):
        argv += [f"--{service}", "@", str(SPLIT / f"{service}.toml")]
    assert load(RLConfig, argv, {}).config == load(RLConfig, ["@", str(RL)], {}).config


def _leaves(value: object, path: tuple = ()) -> list[tuple]:
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in _leaves(item, (*path, key))]
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [leaf for index, item in enumerate(value) for leaf in _leaves(item, (*path, index))]
    return [path]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_key_of_the_examples_is_found_in_its_line(path: Path):
    text = path.read_text()
    lines = toml_lines(text)
    for leaf in _leaves(tomllib.loads(text)):
        known = next(leaf[:length] for length in range(len(leaf), 0, -1) if leaf[:length] in lines)
        assert text.splitlines()[lines[known] - 1].startswith(f"{known[-1]} =")
