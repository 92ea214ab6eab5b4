"""`[algo] preset`: one word that fills both sides of an algorithm, the advantages and the loss.

A preset fills keys that nobody has written. Where the `type` of a side is written and another one, the preset's other
keys of that side are left alone: they belong to its own type.
"""

from typing import Any

from millrace.config.layers import ABSENT, Tree
from millrace.config.tree import Path

KEY: Path = ("algo", "preset")
ADVANTAGE: Path = ("orchestrator", "algo")
LOSS: Path = ("trainer", "loss")
_SEQ_LEN: Path = ("trainer", "model", "seq_len")

PRESETS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"type": "grpo", "std_norm": "group"}, {"type": "ppo", "aggregation": "sequence"}),
    "dr_grpo": ({"type": "grpo"}, {"type": "ppo", "aggregation": "constant", "constant_tokens": _SEQ_LEN}),
    "dapo": ({"type": "grpo", "std_norm": "group"}, {"type": "ppo", "clip_high": 0.28}),
    "gspo": ({"type": "grpo", "std_norm": "group"}, {"type": "gspo"}),
    "cispo": ({"type": "grpo", "std_norm": "group"}, {"type": "cispo"}),
    "rloo": ({"type": "rloo"}, {"type": "importance_sampling", "aggregation": "sequence"}),
    "opo": ({"type": "opo"}, {"type": "importance_sampling"}),
    "reinforce_pp": ({"type": "reinforce_pp"}, {"type": "ppo"}),
    "max_rl": ({"type": "max_rl"}, {"type": "importance_sampling"}),
    "opd": ({"type": "opd"}, {"type": "importance_sampling"}),
    "opsd": ({"type": "opsd"}, {"type": "importance_sampling"}),
}
"""Of each preset, the keys of `[orchestrator.algo]` and of `[trainer.loss]`; a path stands for the value there."""
_MORE: dict[str, dict[Path, Any]] = {"dapo": {("orchestrator", "filter_zero_advantages"): "refill"}}


def apply_preset(tree: Tree) -> None:
    """Fill what the preset of a document says, if it has one."""
    preset = tree.get(KEY)
    if not isinstance(preset, str) or preset not in PRESETS:
        return  # none, or one that does not exist, which is reported when the config is built
    advantage, loss = PRESETS[preset]
    for table, keys in ((ADVANTAGE, advantage), (LOSS, loss)):
        if tree.get((*table, "type")) in (ABSENT, keys["type"]):
            for name, value in keys.items():
                _fill(tree, (*table, name), value)
    for path, value in _MORE.get(preset, {}).items():
        _fill(tree, path, value)


def _fill(tree: Tree, path: Path, value: Any) -> None:
    if tree.get(path) is not ABSENT:
        return
    if isinstance(value, tuple):
        other, node = tree.get(value), tree.schema.find(value)
        value = node.default if other is ABSENT and node else other
    tree.fill(path, value, KEY)
