"""What of the file system a worker of level `container` sees: programs and what they need, and nothing of ours.

A list of what is shown, not of what is hidden: everything else is not there. It is shown read-only.
"""

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from millrace.env_server.interpreters.allowed import PYTHONS_VARIABLE

VISIBLE_VARIABLE = "MILLRACE_ENV_VISIBLE"
_OURS = "MILLRACE_"
# Of each worker's own, over what the machine has there.
_OWN = ("/tmp", "/dev", "/proc")
# Links to /usr on most systems, which are shown as what they lead to.
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
# Of /etc, what programs look up; not what services keep there.
_ETC = (
    *("passwd", "group", "nsswitch.conf", "host.conf", "gai.conf", "protocols", "services", "localtime", "timezone"),
    *("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "mime.types", "ssl/certs", "ssl/openssl.cnf"),
    *("ca-certificates", "pki/tls", "pki/ca-trust", "os-release", "debian_version", "locale.alias"),
)
# Caches of data sets and of certificates that an operator has named.
_NAMED = ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE")


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleFiles:
    """Absolute paths; what does not exist when a worker starts is left out."""

    shown: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    """Shown to nobody, also where they lie in what is shown."""

    def to_json(self) -> dict[str, Any]:
        """For the worker's process."""
        return {"shown": list(self.shown), "hidden": list(self.hidden)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read what `to_json` made."""
        return cls(shown=tuple(map(str, values["shown"])), hidden=tuple(map(str, values["hidden"])))

    def with_shown(self, paths: Iterable[str]) -> Self:
        """It, and these, which are not hidden."""
        added = list(paths)
        hidden = tuple(path for path in self.hidden if path not in added)
        return type(self)(shown=tuple(dict.fromkeys([*self.shown, *added])), hidden=hidden)


def covered(files: VisibleFiles) -> list[str]:
    """Return what is there and cannot be shown: workers have directories of their own in the place where it lies."""
    found = [path for path in files.shown if os.path.exists(path)]
    return [
        path
        for path in found
        if any(Path(place).is_relative_to(own) for own in _OWN for place in (path, os.path.realpath(path)))
    ]


def visible_to_workers(environ: Mapping[str, str], visible: Sequence[str]) -> VisibleFiles:
    """What workers of this env-server see; `visible` are paths that the operator adds.

    Where environments are found is where this process finds modules, but for its working directory, which may be
    anything: an operator who wants it shown names it in PYTHONPATH.
    """
    search = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    modules = [path for path in sys.path if path and path != os.getcwd()]
    named = [path for name in _NAMED for path in environ.get(name, "").split(os.pathsep)]
    shown = [*_SYSTEM, *(f"/etc/{name}" for name in _ETC), sys.prefix, sys.base_prefix, *modules, *search]
    shown = [path for path in [*shown, *named, *visible] if os.path.isabs(path)]
    return VisibleFiles(shown=tuple(dict.fromkeys(shown)), hidden=tuple(_hidden(environ, shown)))


def _hidden(environ: Mapping[str, str], shown: Iterable[str]) -> list[str]:
    """Every directory and file that a variable of ours names: spool, scratch, store, the URL of Redis, keys, tokens.

    Of a file, its whole directory, unless something that is shown lies in there: beside the URL of the one-machine
    stack's Redis lie its password and its data.
    """
    found: list[str] = []
    for name, value in environ.items():
        path = urlsplit(value).path if value.startswith("file://") else value
        if (
            not name.startswith(_OURS)
            or name in (VISIBLE_VARIABLE, PYTHONS_VARIABLE)
            or not os.path.isabs(path)
            or path == "/"
        ):
            continue
        found.append(path)
        parent = Path(os.path.realpath(path)).parent
        if name.endswith("_FILE") and not any(Path(os.path.realpath(one)).is_relative_to(parent) for one in shown):
            found.append(str(parent))
    return list(dict.fromkeys(found))
