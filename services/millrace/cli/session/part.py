"""A config that holds one service's section, with or without the section's name above its keys."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.config.section import Document
from millrace.config.sections.inference import ReplicaConfig
from millrace.config.sections.parts import OrchestratorPart, TrainerPart
from millrace.config.suggest import close
from millrace.config.tree import schema_tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A section and the document that holds it."""

    section: str
    document: type[Document]

    def named(self, arguments: Sequence[str], *, reserved: Mapping[str, bool]) -> list[str]:
        """The arguments with every key of the section under its name: files and flags may leave it out."""
        words: list[str] = []
        rest = list(arguments)
        while rest:
            word = rest.pop(0)
            if word.startswith("@"):
                name = word[1:] or (rest.pop(0) if rest else "")
                words += [*([] if self._has_name(name) else [f"--{self.section}"]), "@", *([name] if name else [])]
            elif word.startswith("--") and len(word) > 2:
                words.append(self._prefixed(word[2:], reserved))
            else:
                words.append(word)
        return words

    def _prefixed(self, flag: str, reserved: Mapping[str, bool]) -> str:
        """`--inference.parallel.tp=2` for `parallel.tp=2`; `--no-inference.…` for `no-…`."""
        off = flag[:3] if flag.startswith(("no-", "no_")) else ""
        name, equals, value = flag.removeprefix(off).partition("=")
        first = name.partition(".")[0].replace("-", "_")
        root = schema_tree(self.document)
        own = root.child(self.section)
        is_known = own is not None and own.child(first) is not None
        is_whole = root.child(first) is not None and not is_known
        if is_whole or name.replace("_", "-") in reserved:
            return f"--{off}{name}{equals}{value}"
        inner = "" if is_known or self.section != "inference" or not _is_vllm_flag(name, own, reserved) else "vllm."
        return f"--{off}{self.section}.{inner}{name}{equals}{value}"

    def _has_name(self, name: str) -> bool:
        """Whether a file has the section, or nothing but what stands beside it; errors are the loader's to report."""
        tree = read_raw(name)
        own = schema_tree(self.document).child(self.section)
        if tree is None or own is None or self.section in tree:
            return True
        return bool(tree) and all(schema_tree(self.document).child(key) and not own.child(key) for key in tree)


PARTS: Mapping[str, Part] = {
    "orchestrator": Part(section="orchestrator", document=OrchestratorPart),
    "trainer": Part(section="trainer", document=TrainerPart),
    "inference": Part(section="inference", document=ReplicaConfig),
}


def read_raw(name: str) -> dict[str, Any] | None:
    """The tables of a file; None if it cannot be read, which is the loader's to report."""
    try:
        text = Path(name).read_text()
        tree = json.loads(text) if name.endswith(".json") else tomllib.loads(text)
    except (OSError, ValueError):
        return None
    return tree if isinstance(tree, dict) else None


def _is_vllm_flag(name: str, own: Any, reserved: Mapping[str, bool]) -> bool:
    """Whether a flag that is no key of ours is passed to `vllm serve`: its name is like none of ours."""
    from millrace.config.prime_rl.rl_keys import RL_KEYS

    spelled = name.replace("-", "_")
    ours = [*own.children, *(flag.replace("-", "_") for flag in reserved)]
    known = RL_KEYS.get(f"inference.{spelled}")
    is_ours = bool(close(spelled, ours, most=1)) if known is None else not known.to.startswith("inference.vllm.")
    return "." not in name and not is_ours
