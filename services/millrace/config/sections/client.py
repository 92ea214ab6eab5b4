"""`[client]`: an OpenAI-compatible endpoint that is not one of ours."""

from typing import Any
from urllib.parse import urlsplit

from pydantic import model_validator

from millrace.config.layers import as_tree
from millrace.config.rules import BrokenRule, broken
from millrace.config.section import ConfigSection, option, required

VARIABLE_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]{0,127}$"
WITHHELD_KEY_PREFIX = "MILLRACE_KEY_"
"""Begins the variables of keys that the env-server itself uses: environments do not inherit them."""


class ClientConfig(ConfigSection):
    """OpenAI-compatible endpoints to evaluate. If left out, the stack itself serves the model."""

    base_url: list[str] = required(
        "The endpoint's URLs, each ending in `/v1`; rollouts are spread over several.",
        min_length=1,
    )
    api_key_var: str | None = option(
        None,
        "Environment variable of the env-server with the API key, which environments use and can read. Its name must "
        f"not begin with `{WITHHELD_KEY_PREFIX}`: they do not get those. The key is never stored. No key is sent if "
        "left out.",
        pattern=VARIABLE_PATTERN,
    )

    @model_validator(mode="before")
    @classmethod
    def _one_is_a_list(cls, data: Any) -> Any:
        """Take a single URL for a list of one, and URLs with and without a slash at the end for the same."""
        tree = as_tree(data)
        if isinstance(tree, dict) and isinstance(urls := tree.get("base_url"), str | list):
            found = [urls] if isinstance(urls, str) else urls
            tree["base_url"] = [url.rstrip("/") if isinstance(url, str) else url for url in found]
        return tree

    def broken_rules(self, path: str) -> list[BrokenRule]:
        """What is wrong with the URLs; `path` is where this section stands in the config."""
        problems = [_problem(url, f"{path}.api_key_var") for url in self.base_url]
        problems += [
            f"must not name {url} twice" for index, url in enumerate(self.base_url) if url in self.base_url[:index]
        ]
        return [broken(problem, f"{path}.base_url") for problem in problems if problem]


def _problem(url: str, variable: str) -> str | None:
    """What is wrong with one URL."""
    try:
        parts = urlsplit(url)
        is_http = parts.scheme in ("http", "https") and parts.hostname
    except ValueError:  # a bracket without its other
        is_http, parts = False, urlsplit("")
    if not is_http:
        return "must be a URL that begins with http:// or https://, such as https://api.example.com/v1"
    if parts.username or parts.password or parts.query:
        return f"must not carry credentials or a query: name the variable with the key in `{variable}`"
    return None
