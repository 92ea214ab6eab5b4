"""`docs/configuration.md`, made from the schema. this script prints it; a test compares."""

import json
import re
import sys
import textwrap
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal, get_args, get_origin

from pydantic import BaseModel

from millrace.config.filling import shared_keys
from millrace.config.sections.eval import EvalRunConfig
from millrace.config.sections.rl import RLConfig
from millrace.config.sections.sft import SFTConfig
from millrace.config.tree import Kind, SchemaKey, dotted, schema_tree, type_text

_INTRODUCTION = """# Configuration

<!-- Made by `python scripts/configuration_reference.py > docs/configuration.md`; a test fails where the two differ. -->

All errors of a config are reported at once, each with key, value, place and remedy; an unknown key is one. Most keys
are named as in prime-rl, whose files are read, too: [prime_rl_keys.md](prime_rl_keys.md).

## Sources

The later one wins:

1. the defaults below;
2. environment variables: `MILLRACE_CONFIG__trainer__optim__lr=1e-5`;
3. files (TOML, or `.json`), left to right: `millrace rl @ base.toml @ more.toml`. Tables are merged, lists replaced;
   paths are relative to the working directory;
4. flags: `--trainer.optim.lr 1e-5`, in kebab or snake case.

| To | write |
|---|---|
| give a table or list in a flag | JSON: `--orchestrator.env '[{"id": "reverse-text"}]'` |
| read a table from a file | `--trainer.optim @ optim.toml` |
| switch a table on that is off by default | `--ckpt`, or an empty table in a file |
| switch it off | `--no-ckpt` |
| set or clear a boolean | `--wandb.offline`, `--no-wandb.offline` |
| see the resolved config as JSON | `--dry-run` |

A source that changes the `type` of a table drops what earlier sources wrote into it. Addresses and credentials are
`MILLRACE_*` variables of the processes ([operations.md](operations.md)).

## One file or one per service

A shared key at the top fills those of the services, and is filled from them if they agree. If both are written, the
stronger source wins: `--max-steps 3` shortens any run. Different values in equally strong sources are an error.

"""

_SPLIT = """
The split form has a file per service, as in `examples/reverse_text_split`:
`millrace rl --trainer @ trainer.toml --orchestrator @ orchestrator.toml --inference @ inference.toml`.

Below, a key's default follows its name, or its type if it has no default, and then its bounds, unless they are 0 or 1.
Of several choices, the default is bold. A table with the keys of another has its tables, too.
"""


@dataclass(frozen=True, slots=True)
class _Printed:
    """A section that is on the page, for others to refer to."""

    path: str
    anchor: str
    presence: str
    rows: dict[str, str]

    @property
    def table(self) -> str:
        """Return the section's path with dots."""
        return self.path.strip("[]")

    @property
    def link(self) -> str:
        """Return a link to the section."""
        return f"[`{self.path}`](#{self.anchor})"


def render() -> str:
    """Return the whole page."""
    page = _Page()
    text = _INTRODUCTION + _shared_rows() + _SPLIT
    text += page.command("rl", RLConfig)
    text += page.command("sft", SFTConfig)
    return text + page.command("eval", EvalRunConfig)


def _shared_rows() -> str:
    rows = "| Shared key | Fills |\n|---|---|\n"
    for shared in shared_keys(RLConfig):
        rows += f"| `{dotted(shared.top)}` | {', '.join(f'`{dotted(path)}`' for path in shared.targets)} |\n"
    return rows


_LONG_ROW, _MOST_REPEATED = 40, 3
"""Characters of a row that is not written twice, if another section has so many rows of this one."""
_UNSAID = re.compile(r".* (-?1|0|2\.14748e\+09)|at least 2")
"""Bounds that a key's meaning implies, as those of shares and counts, or that no user comes near."""
_OWN_MEANING = ("trainer.model.seq_len", "orchestrator.seq_len", "inference.model.name")
"""Keys that a key at the top fills, and that have something to add."""


class _Page:
    """The sections of all commands; one that has the keys of another refers to it."""

    def __init__(self) -> None:
        """Begin with an empty page."""
        self._printed: list[_Printed] = []
        self._anchors: Counter[str] = Counter()
        self._models: dict[str, str] = {}

    def command(self, name: str, model: type[BaseModel]) -> str:
        """Return the sections of one command; those that are the same as others by their names, at the end."""
        root = schema_tree(model)
        text = f"\n## `millrace {name}`\n\n{_prose(model.__doc__)}\n"
        same: defaultdict[str, list[str]] = defaultdict(list)
        unchanged: list[str] = []
        for section in (root, *(node for node in root.walk() if node.kind in (Kind.SECTION, Kind.SECTION_LIST))):
            rows = {node.name: _row(node) for node in section.children.values() if not node.children}
            model_section = self._model_of(section, rows)
            if model_section and model_section.rows == rows:
                differs = "" if _presence(section) == model_section.presence else _presence(section)
                if not differs and _header(section) == model_section.path:
                    unchanged.append(model_section.link)
                elif differs or self._table_of_model(section) != model_section.table:
                    same[model_section.link].append(f"`{_header(section)}`{differs}")
            elif rows or (section.path and _class_doc(section) not in text):
                text += self._section(section, rows, model_section)
            if model_section:
                self._models[dotted(section.path)] = model_section.table
        lines = "".join(f"| {', '.join(names)} | {link} |\n" for link, names in same.items())
        text += f"\n| Tables | Have the keys of |\n|---|---|\n{lines}" if same else ""
        return text + ("\n" + wrapped(f"As above: {', '.join(unchanged)}.", indent="") if unchanged else "")

    def _table_of_model(self, section: SchemaKey) -> str:
        """Return the table that a section refers to because the table around it has the keys of another one."""
        table = ""
        for name in section.path[:-1]:
            table = f"{table}.{name}" if table else name
            table = self._models.get(table, table)
        table += f".{section.name}"
        return self._models.get(table, table)

    def _section(self, section: SchemaKey, rows: Mapping[str, str], other: _Printed | None) -> str:
        """Return one section: its heading, its purpose, and an item for each key that is no section itself."""
        heading = _header(section) if section.path else "Top"
        self._add(heading, _presence(section), dict(rows))
        text = f"\n### {f'`{heading}`' if section.path else heading}\n"
        if section.path:
            text += "\n" + wrapped(_class_doc(section) + _presence(section), indent="")
        if other:
            missing = [f"`{name}`" for name in other.rows if name not in rows]
            text += f"\nThe keys of {other.link}{f' but {_and(missing)}' if missing else ''}"
            rows = {name: row for name, row in rows.items() if other.rows.get(name) != row}
            text += ", and:\n" if rows else ".\n"
        return text + _list(self._as_elsewhere(rows) if not other else rows)

    def _as_elsewhere(self, rows: Mapping[str, str]) -> dict[str, str]:
        """Return the rows of the section that was added last, with a reference for those that another one has, too.

        Only long rows count, and only if the other section has several of them.
        """
        best = max(self._printed[:-1], key=lambda each: _long_count(each, rows), default=None)
        if best is None or _long_count(best, rows) < _MOST_REPEATED:
            return dict(rows)
        return {name: f"as in {best.link}." if _is_long(best, name, row) else row for name, row in rows.items()}

    def _add(self, heading: str, presence: str, rows: dict[str, str]) -> None:
        anchor = re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
        suffix = f"-{self._anchors[anchor]}" if self._anchors[anchor] else ""
        self._anchors[anchor] += 1
        self._printed.append(_Printed(heading, anchor + suffix, presence, rows))

    def _model_of(self, section: SchemaKey, rows: Mapping[str, str]) -> _Printed | None:
        """Return the section with the most rows of this one, if it has at least half of them and little beside them."""
        best = max(self._printed, key=lambda each: _shared_count(each, rows), default=None)
        if best is None or not section.path:
            return None
        shared, missing = _shared_count(best, rows), len(best.rows.keys() - rows.keys())
        return best if rows and shared > missing and 2 * shared >= len(rows) else None


def _is_long(printed: _Printed, name: str, row: str) -> bool:
    """Return whether the printed section has the same row, and a reference to it is shorter."""
    return printed.rows.get(name) == row and len(row) > _LONG_ROW


def _long_count(printed: _Printed, rows: Mapping[str, str]) -> int:
    return sum(_is_long(printed, name, row) for name, row in rows.items())


def _shared_count(printed: _Printed, rows: Mapping[str, str]) -> int:
    return sum(printed.rows.get(name) == row for name, row in rows.items())


def _row(node: SchemaKey) -> str:
    """Return what follows the name of a key: its value and its meaning, or the place that has both."""
    default = node.facts.default_text or ""
    if default.startswith("as in ") and node.description.startswith("As `") and ";" not in node.description:
        return f"{default}."
    if node.facts.shared and not node.children and dotted(node.path) not in _OWN_MEANING:
        return "shared."
    meaning, defined = _with_choices(node)
    value, meaning = _value(node, defined), _linked(meaning)
    return f"{value}. {meaning}" if value else meaning


def _list(rows: Mapping[str, str]) -> str:
    """Return a list of keys; those with the same text share an item."""
    names: defaultdict[str, list[str]] = defaultdict(list)
    for name, text in rows.items():
        names[text].append(f"`{name}`")
    return "\n" + "".join(wrapped(f"* {', '.join(each)}: {text}") for text, each in names.items()) if rows else ""


def wrapped(text: str, *, indent: str = "  ") -> str:
    """Return the text in lines, the later ones indented. Code stays on one line; no line begins like an item."""
    text = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "\0"), text)
    text = re.sub(r" ([-+*>#]|1\.) ", "\0\\1\0", text)
    lines = textwrap.wrap(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ") + "\n"


def _choices(node: SchemaKey) -> tuple[str, ...]:
    """Return the values of a key that has only some; none for other keys."""
    return tuple(map(_plain, get_args(node.annotation))) if get_origin(node.annotation) is Literal else ()


def _plain(value: object) -> str:
    return json.dumps(value).replace('"', "")


def _code(choice: str, node: SchemaKey) -> str:
    """Return a choice as code, in bold if it is the default."""
    is_default = node.default is not None and not node.facts.default_text and choice == _plain(node.default)
    return f"**`{choice}`**" if is_default else f"`{choice}`"


def _with_choices(node: SchemaKey) -> tuple[str, set[str]]:
    """Return the description with the choices that it defines (`name: …`) as code, and those choices."""
    either, defined = "|".join(sorted(_choices(node), key=len, reverse=True)), set[str]()
    if not either:
        return node.description, defined

    def marked(names: re.Match[str]) -> str:
        defined.update(re.findall(either, names[0]))
        return re.sub(either, lambda name: _code(name[0], node), names[0])

    return re.sub(rf"(?<![\w`])(?:(?:{either}), )*(?:{either}):", marked, node.description), defined


def _value(node: SchemaKey, defined: Set[str]) -> str:
    """Return the type, the default and the bounds of a key. A default shows its type; defined choices are left out."""
    if choices := _choices(node):
        default = _default(node) if node.default is None or node.facts.default_text else ""
        default = f"default: {default}" if node.facts.default_text else default
        rest = [_code(choice, node) for choice in choices if choice not in defined]
        return "; ".join(filter(None, (", ".join(rest), default)))
    default, kind = _default(node), _kind(node)
    kind, default = (f"{kind} ({default})", "") if node.facts.default_text else (kind, default)
    bounds = [bound for bound in node.bounds if not _UNSAID.fullmatch(bound)]
    if (limit := node.facts.limit) and limit.key not in (node.facts.default_text or ""):
        bounds.append(f"{limit.words} `{dotted(node.other(limit.key))}`")
    return ", ".join(filter(None, (kind, default, *(_signed(bound) for bound in bounds))))


def _kind(node: SchemaKey) -> str:
    """Return the type of a key whose default does not show it."""
    if node.kind is Kind.LEAF and node.default not in (None, []) and not node.facts.default_text:
        return ""
    return {"true or false": "boolean", "free table": "table"}.get(
        text := type_text(node), text.removeprefix("list of ")
    )


def _signed(bound: str) -> str:
    """Return `at least 1` as `≥ 1`."""
    for words, sign in (("at least", "≥"), ("at most", "≤"), ("above", ">"), ("below", "<")):
        if bound.startswith(words):
            return sign + bound.removeprefix(words)
    raise ValueError(bound)


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _prose(docstring: str | None) -> str:
    return _linked(" ".join((docstring or "").split()).replace("``", "`"))


def _linked(text: str) -> str:
    """Return the text with its names of pages as links."""
    return re.sub(r"docs/(\w+\.md)", r"[\1](\1)", text)


def _class_doc(section: SchemaKey) -> str:
    """The docstring of a section's class, or of the class in its list."""
    annotation = section.annotation
    inner = annotation.__args__[0] if section.kind is Kind.SECTION_LIST else annotation
    return _prose(inner.__doc__)


def _presence(section: SchemaKey) -> str:
    if not section.path:
        return ""
    if section.is_required and section.kind is Kind.SECTION_LIST:
        return " At least one is required."
    if section.facts.default_text:
        return f" Default: {section.facts.default_text}."
    return " Default: off." if section.is_optional else ""


def _header(node: SchemaKey) -> str:
    return f"[[{dotted(node.path)}]]" if node.kind is Kind.SECTION_LIST else f"[{dotted(node.path)}]"


def _default(node: SchemaKey) -> str:
    if node.facts.default_text:
        return node.facts.default_text
    if node.is_required:
        return "required"
    return "" if node.kind is Kind.FREE_TABLE or node.default is None else f"`{json.dumps(node.default)}`"


if __name__ == "__main__":
    sys.stdout.write(render())
