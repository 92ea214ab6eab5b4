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
    """Modules that a process may load, each with its submodules; `*` allows every module."""

    modules: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the allowed modules that a comma-separated text names, such as `my_losses, team.rl`.

        `*` allows all.
        """
        return cls(tuple(name.strip() for name in text.split(",") if name.strip()))

    def allows(self, module: str) -> bool:
        """Return whether `module` (a dotted name) is one of the allowed modules or below one of them."""
        return any(each == ANY or f"{module}.".startswith(f"{each}.") for each in self.modules)

    def require(self, import_path: str, *, field: str, service: str = "this service") -> None:
        """Raise InvalidSpecError unless the module of `import_path` (`my.module:fn`) is one of the allowed modules.

        `field` is the key of the config that the error names, and `service` the process that may load these modules.
        """
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
        """Import the module of `import_path` (`my.module:fn`) and return its function `fn`.

        The module is found as `python -m` would find it, and imported anew if its file has changed since the last time.
        Raises InvalidSpecError, which names the config's key `field`, if the path is malformed, the module is not
        allowed or cannot be imported, or it has no such function. `remedy` replaces the advice to fix or install the
        module; a module that is not allowed has advice of its own.
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
    """Return the error, with `reason`, for a function of the user's that cannot be used.

    `field` is the key of the config that names it by `import_path`; `problem` says what is wrong; with an empty
    `remedy` the advice is to fix or install the module.
    """
    return InvalidSpecError(
        [Violation(field=field, value=import_path, message=problem)],
        reason=reason,
        remedy=remedy or "fix the module, or install it where the service can import it (PYTHONPATH)",
    )


def _imported(name: str) -> ModuleType:
    """Import the module `name` and return it; reload it if its file's modification time differs from the last load's.

    Puts the working directory first on `sys.path`, if it is not there. What the module raises is passed on.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # an installed command has its own directory there instead
    # A module that was written a moment ago may be missing in the cached listing of its directory.
    importlib.invalidate_caches()
    is_loaded = name in sys.modules
    module = importlib.import_module(name)
    mtime = Path(module.__file__).stat().st_mtime_ns if module.__file__ else 0
    # A service lives longer than a user's edits: without a reload a second run would silently use the first run's
    # function.
    if is_loaded and _MTIMES.setdefault(name, mtime) != mtime:
        module = importlib.reload(module)
    _MTIMES[name] = mtime
    return module


def environment_module(env_id: str) -> str:
    """Return the name of an environment's Python module, by its id: `owner/reverse-text@1.0` gives `reverse_text`."""
    return env_id.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_")
