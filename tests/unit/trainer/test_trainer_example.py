"""What the demo starts from is made whole or not at all, and made again where it is not whole."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MakeExample = Callable[[Path], None]


@pytest.mark.parametrize("method", ["PreTrainedModel.save_pretrained", "PreTrainedTokenizerFast.save_pretrained"])
def test_an_interrupted_making_leaves_nothing_that_looks_made(
    make_example: MakeExample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    import transformers

    name, _, attribute = method.partition(".")
    original = getattr(getattr(transformers, name), attribute)

    def interrupted(*args: object, **kwargs: object) -> None:
        original(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(f"transformers.{method}", interrupted)
        make_example(tmp_path)
    assert not (tmp_path / "base").exists() and not (tmp_path / "sft.jsonl").exists()
    make_example(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "sft.jsonl"]
    assert (tmp_path / "base" / "tokenizer.json").is_file() and (tmp_path / "base" / "model.safetensors").is_file()


def test_interrupted_pairs_are_not_there(
    make_example: MakeExample, example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(example, tmp_path, dirs_exist_ok=True)
    write_text = Path.write_text

    def interrupted(self: Path, data: str, encoding: str | None = None) -> int:
        if "sft.jsonl" in self.name:
            write_text(self, data[:1000], encoding=encoding)
            raise KeyboardInterrupt
        return write_text(self, data, encoding=encoding)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "write_text", interrupted)
        make_example(tmp_path)
    assert not (tmp_path / "sft.jsonl").exists()
    make_example(tmp_path)
    assert (tmp_path / "sft.jsonl").read_bytes() == (example / "sft.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("there", "makes"),
    [([], True), (["base/config.json"], True), (["sft.jsonl"], True), (["base/config.json", "sft.jsonl"], False)],
)
def test_the_demo_makes_what_is_not_whole(tmp_path: Path, there: list[str], makes: bool) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "demo.sh", tmp_path / "scripts")
    for name in there:
        path = tmp_path / "outputs" / "reverse-text" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    commands = tmp_path / ".venv" / "bin"
    commands.mkdir(parents=True)
    for name in ("python", "millrace"):
        (commands / name).write_text(f'#!/bin/sh\necho {name} "$@" >> calls\n')
        (commands / name).chmod(0o755)
    subprocess.run(["bash", "scripts/demo.sh", "--max-steps", "1"], cwd=tmp_path, check=True, timeout=30)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[-2:] == [
        "millrace sft @ examples/reverse_text/sft.toml",
        "millrace rl @ examples/reverse_text/rl.toml --max-steps 1",
    ]
    assert calls[:-2] == (["python examples/reverse_text/make_model.py"] if makes else [])


def test_the_texts_are_had_without_the_heavy_imports() -> None:
    script = "import sys, reverse_text; reverse_text.make_texts(3, 0); print('verifiers' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert ended.stdout.strip() == "False"
