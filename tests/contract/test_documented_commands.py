"""Every command line in documents and messages exists: the command, and each of its options or config keys."""

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest
from pydantic import BaseModel

from millrace.cli.main import cli
from millrace.config.prime_rl.keys import EVAL_KEYS, RL_KEYS, SFT_KEYS
from millrace.config.sections.eval import EvalRunConfig
from millrace.config.sections.inference import InferenceConfig
from millrace.config.sections.orchestrator import OrchestratorConfig
from millrace.config.sections.rl import RLConfig
from millrace.config.sections.sft import SFTConfig
from millrace.config.sections.trainer import TrainerConfig
from millrace.config.tree import schema_tree

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")})
EVERYWHERE = {"--debug", "--help", "--token-file", "--tls-ca", "--insecure", "--KEY"}
MODELS: dict[str, tuple[type[BaseModel], ...]] = {
    "rl": (RLConfig,),
    "submit": (RLConfig,),
    "fork": (RLConfig,),
    "estimate": (RLConfig, SFTConfig),
    "sft": (SFTConfig,),
    "eval": (EvalRunConfig,),
    "inference": (InferenceConfig,),
    "trainer": (TrainerConfig,),
    "orchestrator": (OrchestratorConfig,),
}
THEIRS = {"rl": RL_KEYS, "sft": SFT_KEYS, "eval": EVAL_KEYS, "trainer": SFT_KEYS, "inference": {}, "orchestrator": {}}
_CODE = re.compile(r"^ *```\w*[^\n]*\n(.*?)^ *```|`([^`\n]+)`", re.MULTILINE | re.DOTALL)


def lines_of(text: str) -> Iterator[list[str]]:
    """Yield the words after `millrace` of each command line in code; `|| true` marks one that shows a mistake."""
    for block, inline in _CODE.findall(text):
        for line in (block or inline).replace("\\\n", " ").splitlines():
            if line.rstrip().endswith("|| true"):
                continue
            for part in re.split(r"&&|\|\||[|;&](?=\s|$)|\$ ", line.partition(" #")[0]):
                words = re.sub(r"^(\s*(export )?[A-Z_]+=\S+)*\s*(nice -n \d+ |time )?", "", part).strip()
                if words.startswith("millrace ") and (found := _split(words)):
                    yield found


def _split(words: str) -> list[str]:
    """Return the words after `millrace`; none if the first is a placeholder such as `COMMAND`."""
    try:
        parts = shlex.split(words)[1:]
    except ValueError:  # an apostrophe of a sentence
        parts = words.split()[1:]
    return parts if parts and re.fullmatch(r"[a-z-]+", parts[0]) else []


def command_of(words: list[str]) -> tuple[list[str], click.Command | None]:
    """Return the path of the command that the words begin with, and the command; None where there is none."""
    found, path = cli, []
    for word in words:
        if not isinstance(found, click.Group) or word.startswith("-"):
            break
        inner = found.get_command(click.Context(found), word)
        if inner is None:
            return [*path, word], None
        found, path = inner, [*path, word]
    return path, found


def unknown_options(path: list[str], command: click.Command, words: list[str]) -> set[str]:
    """Return what looks like an option and is neither one of the command nor a key of its config."""
    known = EVERYWHERE | {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    known |= set(re.findall(r"(?<![\w-])--?[\w-]+", command.epilog or "") + re.findall(r"--[\w-]+", command.help or ""))
    if "show" in words and path == ["eval"]:
        return set()  # `eval show` takes the filters of `run samples`, which its own tests have
    given = {word.partition("=")[0] for word in words if re.match(r"--[A-Za-z]|-[A-Za-z]$", word)}
    return {
        name
        for name in given - known
        if not _is_key(path[-1] if path else "", name.removeprefix("--").removeprefix("no-"))
    }


def _is_key(command: str, name: str) -> bool:
    """Return whether a flag is a key of the command's config, with its dots and with dashes or underscores."""
    if command == "inference" and "." not in name:
        return True  # any flag of `vllm serve`
    key = name.replace("-", "_")
    if key in ("bench.steps",) or key.startswith(("data.fake.", "trainer.data.fake.")):
        return command in ("rl", "sft", "trainer", "inference", "orchestrator")
    if any(key == each or each.startswith(f"{key}.") for each in THEIRS.get(command, {})):
        return True
    models = MODELS.get(command, ())
    return any(schema_tree(model).find(tuple(key.split("."))) or _in_free_table(model, key) for model in models)


def _in_free_table(model: type[BaseModel], key: str) -> bool:
    return any(".".join(node.path) == key.rpartition(".")[0] for node in schema_tree(model).walk() if not node.children)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_command_that_a_document_names_exists(path: Path) -> None:
    wrong: list[str] = []
    for words in lines_of(path.read_text()):
        name, command = command_of(words)
        if command is None:
            wrong.append(f"millrace {' '.join(name)}")
        else:
            wrong += [f"millrace {' '.join(words)}: {option}" for option in unknown_options(name, command, words)]
    assert not wrong


def messages_of(path: Path) -> Iterator[str]:
    """Yield the texts of a module that are no docstrings; what an f-string fills in is `X`."""
    source = path.read_text()
    tree = ast.parse(source if "`millrace " in source or "`--" in source else "")
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in statements | inner:
            yield node.value


@cache
def every_option() -> frozenset[str]:
    """Return the options of all commands."""

    def options(command: click.Command) -> Iterator[str]:
        yield from (name for each in command.params for name in (*each.opts, *each.secondary_opts))
        yield from re.findall(r"--[\w-]+", f"{command.epilog} {command.help}")
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                if inner := command.get_command(context, name):
                    yield from options(inner)

    return frozenset(options(cli)) | EVERYWHERE


def test_commands_and_flags_that_messages_name_exist() -> None:
    wrong, count = set[str](), 0
    for path in (ROOT / "services/millrace").rglob("*.py"):
        for text in messages_of(path) if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")) else ():
            for words in lines_of(text) if "`millrace " in text else ():
                count += 1
                name, command = command_of(words)
                if command is None or unknown_options(name, command, words):
                    wrong.add(f"{path.name}: millrace {' '.join(words)}")
            for flag in re.findall(r"`(--[a-z][\w.-]*)[` =]", text):
                key = flag.removeprefix("--").removeprefix("no-")
                if flag not in every_option() and not any(_is_key(each, key) for each in MODELS if each != "inference"):
                    wrong.add(f"{path.name}: {flag}")
    assert not wrong and count > 60


def test_documents_name_many_commands() -> None:
    named = {" ".join(command_of(words)[0]) for path in DOCUMENTS for words in lines_of(path.read_text())}
    assert len(named) > 25


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("millrace rl @ a.toml --orchestrator.batch-sise 3", "--orchestrator.batch-sise"),
        ("millrace run audit RUN --deeep", "--deeep"),
        ("millrace eval --model.nam x", "--model.nam"),
    ],
)
def test_a_misspelt_option_is_found(line: str, wrong: str) -> None:
    [words] = lines_of(f"```\n{line}\n```\n")
    path, command = command_of(words)
    assert command is not None and unknown_options(path, command, words) == {wrong}


def test_a_command_that_does_not_exist_is_found() -> None:
    [words] = lines_of("Write `millrace run adit RUN`.")
    assert command_of(words) == (["run", "adit"], None)
