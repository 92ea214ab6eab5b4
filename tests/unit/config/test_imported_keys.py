"""No key of a foreign config vanishes: take it out or misspell it, and the result or what is said of it is another."""

import copy
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.config.layers import Layer, Provenance, Tree
from millrace.config.load import build, load
from millrace.config.messages import Effect
from millrace.config.prime_rl import translate
from millrace.config.prime_rl.keys import EVAL_KEYS, RL_KEYS, SFT_KEYS
from millrace.config.prime_rl.meanings import UNBUILT_ALGORITHMS
from millrace.config.sections.algo import COMPARING, DISTILLING, PER_AGENT
from millrace.config.sections.eval import EvalRunConfig
from millrace.config.sections.rl import RLConfig
from millrace.config.sections.sft import SFTConfig
from millrace.config.tree import Kind, SchemaKey, schema_tree
from millrace.config.tree import Path as KeyPath
from millrace.errors import InvalidSpecError

Tables = dict[str, Any]

FOREIGN = Path(__file__).parent / "foreign"
MODELS = {id(RL_KEYS): RLConfig, id(SFT_KEYS): SFTConfig, id(EVAL_KEYS): EvalRunConfig}


def _said(tables: Tables, keys: dict[str, Any], *, is_built: bool = True) -> tuple[Any, ...]:
    """Return the layer in our schema, and everything that is said of it, by its rules too if it is built."""
    schema = schema_tree(MODELS[id(keys)])
    made = translate(Layer(tree=copy.deepcopy(tables), origin=Provenance(label="a.toml")), schema)
    tree = Tree(schema)
    tree.violations += made.violations
    tree.lay([made.layer])
    violations = [str(violation) for violation in tree.violations]
    try:
        if is_built:
            build(MODELS[id(keys)], tree)
    except InvalidSpecError as error:
        violations = [str(violation) for violation in error.violations]
    return made.layer.tree, [str(note) for note in made.notes], violations


def _leaves(value: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    match value:
        case dict():
            for key, item in value.items():
                yield from _leaves(item, (*path, key))
        case list() if value and all(isinstance(item, dict) for item in value):
            for index, item in enumerate(value):
                yield from _leaves(item, (*path, index))
        case _:
            yield path


def _without(tables: Tables, path: KeyPath, renamed: str | None = None) -> Tables:
    """Return the tables without a key, or with another name for it."""
    other = copy.deepcopy(tables)
    here: Any = other
    for part in path[:-1]:
        here = here[part]
    value = here.pop(path[-1])
    if renamed:
        here[renamed] = value
    return other


def _vanishing(tables: Tables, keys: dict[str, Any]) -> list[str]:
    whole = _said(tables, keys)
    found = []
    for path in _leaves(tables):
        wrong = f"{path[-1]}_zz"
        if _said(_without(tables, path), keys) == whole:
            found.append(f"{path} is taken out")
        misspelt = _said(_without(tables, path, wrong), keys)
        if misspelt == whole or wrong not in str(misspelt):
            found.append(f"{path} is misspelt")
    return found


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        *((name, RL_KEYS) for name in ("autumn", "summer", "spring", "hosted", "later_hosted", "vf_rl", "first_vf_rl")),
        *((name, SFT_KEYS) for name in ("fine_tuning", "vf_sft")),
        *((name, EVAL_KEYS) for name in ("vf_eval", "prime_eval", "several_evals", "one_eval")),
    ],
)
def test_every_leaf_of_a_file_counts(name, keys):
    assert _vanishing(tomllib.loads((FOREIGN / f"{name}.toml").read_text()), keys) == []


@pytest.mark.computes
@pytest.mark.parametrize("keys", [RL_KEYS, SFT_KEYS, EVAL_KEYS], ids=["rl", "sft", "eval"])
@pytest.mark.parametrize(
    "value", [{"inner": 1}, *(pytest.param(value, marks=pytest.mark.long) for value in (1, "x"))], ids=str
)
def test_every_key_of_the_tables_counts(keys, value):
    unheard = []
    for name in keys:
        tables: Tables = {}
        here, *parts = tables, *name.split(".")
        for part in parts[:-1]:
            inner: Tables = {}
            here[part.removesuffix("[]")] = [inner] if part.endswith("[]") else inner
            here = inner
        key = parts[-1].removesuffix("[]")
        bare = _said(tables, keys, is_built=False)
        here[key] = value
        if _said(tables, keys, is_built=False) == bare:
            unheard.append(name)
        here[f"{key}_zz"] = here.pop(key)
        if f"{key}_zz" not in str(_said(tables, keys, is_built=False)):
            unheard.append(f"{name}_zz")
    assert unheard == []


def _is_key(schema: SchemaKey, path: KeyPath) -> bool:
    """Return whether the schema has the key, or a free table that it may stand in."""
    above = [schema.find(path[:length]) for length in range(1, len(path))]
    return schema.find(path) is not None or any(node and node.kind is Kind.FREE_TABLE for node in above)


def test_what_a_message_promises_or_names_is_so():
    """A key that is there is not said to be missing, and what a message sends people to exists."""
    for keys, model in ((RL_KEYS, RLConfig), (SFT_KEYS, SFTConfig), (EVAL_KEYS, EvalRunConfig)):
        schemas = [schema_tree(model), schema_tree(RLConfig)]
        for name, meaning in keys.items():
            path = tuple(name.replace("[]", "").split("."))
            if meaning.effect in (Effect.LATER, Effect.BLOCKS):
                assert schemas[0].find(path) is None, f"{name} is there: {meaning.text}"
            said = meaning.text if meaning.act is None else ""
            for named in re.findall(r"`\[?\[?((?:orchestrator|trainer|inference|data)\.[a-z0-9_.]+)\b", said):
                assert any(_is_key(schema, tuple(named.split("."))) for schema in schemas) or named in keys, name
    (choices,) = [node for node in schema_tree(RLConfig).walk() if node.path == ("orchestrator", "algo", "type")]
    built = {*COMPARING, *PER_AGENT, *DISTILLING, "custom"}
    assert set(choices.annotation.__args__) - built <= set(UNBUILT_ALGORITHMS)
    assert not built & set(UNBUILT_ALGORITHMS)


def test_an_endpoint_is_read_where_the_file_lists_it(tmp_path):
    (tmp_path / "eval.toml").write_text('endpoints_path = "all.toml"\nendpoint_id = "small"\n[[eval]]\nid = "a"\n')
    (tmp_path / "all.toml").write_text(
        '[[endpoint]]\nendpoint_id = "small"\nmodel = "m"\nurl = "http://127.0.0.1:1/v1"\nkey = "KEY"\n'
    )
    config = load(EvalRunConfig, ["@", str(tmp_path / "eval.toml")], {}).config
    assert config.client is not None
    assert (config.model.name, config.client.base_url, config.client.api_key_var) == (
        "m",
        ["http://127.0.0.1:1/v1"],
        "KEY",
    )
    for text, says in (
        ("[[endpoint]]\nendpoint_id = 1", "is none of the endpoints"),
        ("[[", "all.toml"),
        ("", "none of"),
    ):
        (tmp_path / "all.toml").write_text(text)
        with pytest.raises(InvalidSpecError, match=says):
            load(EvalRunConfig, ["@", str(tmp_path / "eval.toml")], {})
    (tmp_path / "all.toml").unlink()
    with pytest.raises(InvalidSpecError, match="no such file"):
        load(EvalRunConfig, ["@", str(tmp_path / "eval.toml")], {})


def test_what_a_layout_or_adapters_leave_no_room_for_is_left_out_with_a_note(tmp_path):
    (tmp_path / "sft.toml").write_text('[model]\nname = "m"\ncp = 2\ncompile = { fullgraph = true }\n')
    loaded = load(SFTConfig, ["@", str(tmp_path / "sft.toml")], {})
    assert loaded.config.model.compile is not None and not loaded.config.model.compile.fullgraph
    assert [(note.path[-1], note.effect) for note in loaded.notes] == [("fullgraph", Effect.LATER)]
    (tmp_path / "sft.toml").write_text('[model]\nname = "m"\ntp = 2\ncompile = {}\n')
    loaded = load(SFTConfig, ["@", str(tmp_path / "sft.toml")], {})
    assert loaded.config.model.compile is None and [note.path[-1] for note in loaded.notes] == ["compile"]
    (tmp_path / "sft.toml").write_text(
        '[model]\nname = "m"\ncp = 2\ncompile = {}\noptimization_dtype = "bfloat16"\nlora = { rank = 4 }\n'
    )
    loaded = load(SFTConfig, ["@", str(tmp_path / "sft.toml")], {})
    assert loaded.config.model.compile is not None and loaded.config.model.optimization_dtype == "float32"
    assert [note.path[-1] for note in loaded.notes] == ["optimization_dtype"]
    assert all(note.effect is Effect.LATER for note in loaded.notes)
