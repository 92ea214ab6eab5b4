"""Aliases of endpoints: `endpoints.toml` as verifiers has it, and the older `endpoints.py`, which is read, not run."""

import ast
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.cli.errors import CliError

_PLACES = (Path("configs"), Path())
_NAMES = ("endpoints.toml", "endpoints.py")
_FORM = 'write [[endpoint]] with endpoint_id = "…", model = "…", url = "https://…/v1", key = "NAME_OF_THE_VARIABLE"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One alias: the model as the endpoint knows it, the endpoint's URLs, the variable with its key."""

    model: str
    urls: tuple[str, ...]
    key_var: str | None


def find_endpoint(alias: str, path: str | None) -> Endpoint | None:
    """The endpoint that is called `alias` in a file, a directory with one, or `configs/` and here; None if none is."""
    file = _file(path)
    if file is None:
        return None
    try:
        found = (_from_toml if file.suffix == ".toml" else _from_python)(file)
    except (OSError, ValueError, SyntaxError) as error:
        raise CliError(f"{file} lists no endpoints: {error}", hint=_FORM) from error
    variants = found.get(alias)
    if not variants:
        if path is not None:
            raise CliError(f"{file} has no endpoint {alias!r}", hint=f"it has {', '.join(sorted(found)) or 'none'}")
        return None
    first = variants[0]
    for name in ("model", "key"):
        if len({each.get(name) for each in variants}) > 1:
            raise CliError(f"{file}: the endpoints called {alias!r} differ in {name!r}", hint="give each its own name")
    urls = dict.fromkeys(str(each["url"]) for each in variants)
    return Endpoint(model=str(first["model"]), urls=tuple(urls), key_var=first.get("key"))


def _file(path: str | None) -> Path | None:
    if path is not None and not Path(path).is_dir():
        if not Path(path).is_file():
            raise CliError(f"--endpoints-path {path} does not exist", hint="name endpoints.toml or its directory")
        return Path(path)
    places = _PLACES if path is None else (Path(path),)
    return next((place / name for place in places for name in _NAMES if (place / name).is_file()), None)


def _from_toml(path: Path) -> dict[str, list[dict[str, Any]]]:
    entries = tomllib.loads(path.read_text()).get("endpoint", [])
    found: dict[str, list[dict[str, Any]]] = {}
    if not isinstance(entries, list):
        raise ValueError("`endpoint` is no array of tables")
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, Mapping) or not isinstance(alias := entry.get("endpoint_id"), str):
            raise ValueError(f"the {number}. [[endpoint]] has no endpoint_id")
        found.setdefault(alias, []).append(_checked(alias, entry))
    return found


def _from_python(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The literal that the module assigns to ENDPOINTS; its code is not run."""
    for node in ast.parse(path.read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "ENDPOINTS" for target in targets):
            entries = ast.literal_eval(getattr(node, "value", None) or ast.Constant(None))
            if not isinstance(entries, dict):
                break
            return {
                str(alias): [_checked(str(alias), each) for each in (entry if isinstance(entry, list) else [entry])]
                for alias, entry in entries.items()
            }
    raise ValueError("it assigns no literal dict to ENDPOINTS")


def _checked(alias: str, entry: Any) -> dict[str, Any]:
    if not isinstance(entry, Mapping):
        raise ValueError(f"endpoint {alias!r} is no table")
    found = {
        "model": entry.get("model"),
        "url": entry.get("url", entry.get("api_base_url")),
        "key": entry.get("key", entry.get("api_key_var")),
    }
    for name in ("model", "url"):
        if not isinstance(found[name], str) or not found[name]:
            raise ValueError(f"endpoint {alias!r} has no {name}")
    kind = entry.get("type", entry.get("api_client_type", "openai_chat_completions"))
    if kind not in ("openai_chat_completions", "openai"):
        raise ValueError(f"endpoint {alias!r} is of type {kind!r}; only openai_chat_completions is spoken")
    if entry.get("headers") or entry.get("extra_headers"):
        raise ValueError(f"endpoint {alias!r} has headers, which are not sent; leave them out")
    return found
