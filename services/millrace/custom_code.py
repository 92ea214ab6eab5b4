"""Functions of a user's own that a config names as `my.module:fn`, loaded only where the service allows their modules.

A user who may submit runs must not thereby run code in the services: `MILLRACE_CUSTOM_CODE` lists the modules that a
process may load, and is empty unless the operator sets it.
"""

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from millrace.errors import InvalidSpecError, Violation

ANY = "*"
"""Stands for every module in `MILLRACE_CUSTOM_CODE`: for a stack of the user's own."""
_MTIMES: dict[str, int] = {}
"""When the source of each loaded module was last changed, in nanoseconds, at the time when it was loaded."""


@dataclass(frozen=True, slots=True)
class CustomCode:
    """What a process may load: modules, with what is below them."""

    modules: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `my_losses, team.rl`, or `*`."""
        return cls(tuple(name.strip() for name in text.split(",") if name.strip()))

    def allows(self, module: str) -> bool:
        """Return whether a module may be loaded."""
        return any(each == ANY or f"{module}.".startswith(f"{each}.") for each in self.modules)

    def require(self, import_path: str, *, field: str, service: str = "this service") -> None:
        """Raise InvalidSpecError unless `service`, which may load these modules, may load the one of `my.module:fn`."""
        name = import_path.partition(":")[0]
        if self.allows(name):
            return
        allowed = f"allows {', '.join(self.modules)}" if self.modules else "is not set, which allows none"
        raise bad_code(
            field,
            import_path,
            f"{service} may not load the module {name!r}: MILLRACE_CUSTOM_CODE {allowed}",
            reason="CUSTOM_CODE_NOT_ALLOWED",
            remedy=f"the operator adds {name} to MILLRACE_CUSTOM_CODE of the service, and starts it again",
        )

    def load(self, import_path: str, *, field: str, remedy: str = "") -> Callable[..., Any]:
        """Return the function `fn` of `my.module:fn`; InvalidSpecError names `field` and says what is wrong.

        `remedy` takes the place of the usual one. The module is found as `python -m` would find it, and loaded anew if
        its file has changed since it was loaded.
        """
        module_name, _, name = import_path.partition(":")
        if not module_name or not name.isidentifier():
            raise bad_code(field, import_path, "must be module:function, such as my.module:fn", remedy=remedy)
        self.require(import_path, field=field)
        try:
            module = _imported(module_name)
        except Exception as error:  # a user's module may raise anything while it is imported
            problem = f"module {module_name!r} cannot be imported: {type(error).__name__}: {error}"
            raise bad_code(field, import_path, problem, remedy=remedy) from error
        function = getattr(module, name, None)
        if not callable(function):
            found = "has no" if function is None else f"has a {type(function).__name__}, not a function, as"
            problem = f"module {module_name!r} ({module.__file__}) {found} {name!r}"
            raise bad_code(field, import_path, problem, remedy=remedy)
        return function


EVERYTHING = CustomCode((ANY,))
"""For commands, which run as the user."""


def bad_code(
    field: str, import_path: str, problem: str, *, reason: str = "CUSTOM_CODE_INVALID", remedy: str = ""
) -> InvalidSpecError:
    """Return the error of a function that cannot be used."""
    return InvalidSpecError(
        [Violation(field=field, value=import_path, message=problem)],
        reason=reason,
        remedy=remedy or "fix the module, or install it where the service can import it (PYTHONPATH)",
    )


def _imported(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # an installed command has its own directory there instead
    importlib.invalidate_caches()
    is_loaded = name in sys.modules
    module = importlib.import_module(name)
    mtime = Path(module.__file__).stat().st_mtime_ns if module.__file__ else 0
    if is_loaded and _MTIMES.setdefault(name, mtime) != mtime:
        module = importlib.reload(module)
    _MTIMES[name] = mtime
    return module


def environment_module(env_id: str) -> str:
    """Return the Python module of an environment id: `owner/reverse-text@1.0` → `reverse_text`."""
    return env_id.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_")
