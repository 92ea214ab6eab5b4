"""No key without effect: every field of the schema is read by code that uses configs, or has a reason here."""

import ast
import functools
from pathlib import Path

import pytest

from millrace.config import RLConfig, SFTConfig
from millrace.config.sections.eval import EvalRunConfig
from millrace.config.sections.inference import ReplicaConfig
from millrace.config.tree import Kind, SchemaKey, schema_tree
from millrace_testing import syntax

SERVICES = Path(__file__).parents[2] / "services" / "millrace"
COLUMNS = ("prompt", "completion", "tool_defs", "chat_template_kwargs")
TABLES = ("data", "val.data", "trainer.dataset")
UNREAD = {
    "wandb.project": "readers/exports/wandb_run.py reads the stored document, also of runs of another release",
    "wandb.entity": "as wandb.project",
    "wandb.group": "as wandb.project",
    "wandb.tags": "as wandb.project",
    "wandb.offline": "as wandb.project",
    "wandb.log_extras.samples": "as wandb.project",
    "wandb.log_extras.distributions": "as wandb.project",
    "wandb.log_extras.interval": "as wandb.project",
    "data.loss_mask.system": "read by the name of the message's role",
    "data.loss_mask.tool": "as data.loss_mask.system",
    "val.data.loss_mask.system": "as data.loss_mask.system",
    "val.data.loss_mask.tool": "as data.loss_mask.system",
    "trainer.dataset.loss_mask.system": "as data.loss_mask.system",
    "trainer.dataset.loss_mask.tool": "as data.loss_mask.system",
    **{f"{key}.columns.{name}": "read by the name of the column" for key in TABLES for name in COLUMNS},
    "seq_len": "only fills the services' keys",
    "algo.preset": "only fills the keys of both sides",
}
USES = ("from millrace.config", "prepared.config", "context.record", "loaded.config", ".training")
"""How a module comes by a config."""


@functools.cache
def _read_names() -> set[str]:
    """Return attributes that modules read which import the schema, or are handed a part of it."""
    names: set[str] = set()
    for path in SERVICES.rglob("*.py"):
        if path.name.endswith(("_pb2.py", "_pb2_grpc.py")) or "generated" in path.parts:
            continue
        text = path.read_text()
        if "config" in path.parts[-2:-1] or not any(word in text for word in USES):
            continue
        tree = syntax.parse(text)
        names |= {
            node.attr
            for node in syntax.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
        }
    return names


def _leaves(model: type) -> list[SchemaKey]:
    return [node for node in schema_tree(model).walk() if node.kind is not Kind.SECTION]


@pytest.mark.parametrize("model", [RLConfig, SFTConfig, EvalRunConfig, ReplicaConfig])
def test_every_field_has_a_reader(model):
    unread = [".".join(node.path) for node in _leaves(model) if node.name not in _read_names()]
    assert [key for key in unread if key not in UNREAD] == []


def test_the_exceptions_are_keys():
    known = {".".join(node.path) for model in (RLConfig, SFTConfig, EvalRunConfig) for node in _leaves(model)}
    assert set(UNREAD) <= known


def test_a_field_without_a_reader_is_seen():
    assert "nobody_reads_this_field" not in _read_names() and "batch_size" in _read_names()
