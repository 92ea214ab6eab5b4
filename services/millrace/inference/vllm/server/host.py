"""The vLLM server process of a replica: `python -m millrace.inference.vllm.server.host`, started by the launcher alone.

It imports vLLM at once, while the launcher still waits for a policy, checks the flags with vLLM's own parser, and
becomes vLLM's OpenAI server when the launcher sends the model's arguments. See `handover.py` for the messages.
"""

import os
import sys
from importlib.metadata import entry_points
from types import ModuleType

from millrace.inference.launch_env import PLUGIN_NAME, PYTHON_VARIABLE
from millrace.inference.vllm.handover import PARENT_VARIABLE, Line, line
from millrace.processes.sessions import die_with_parent
from millrace.telemetry.startup import without_gc

_PLUGIN_GROUPS = ("vllm.endpoint_plugins", "vllm.general_plugins")


def main() -> None:
    """Check the flags that the launcher sends, then run vLLM's server, or headless workers, with the model's arguments.

    Exits with vLLM's code, or with 2 for flags that are refused or without a launcher.
    """
    die_with_parent(parent=int(os.environ.pop(PARENT_VARIABLE)))
    to_launcher = line()
    if to_launcher is None:
        print("millrace: this is started by `millrace inference`, not by hand", file=sys.stderr)
        sys.exit(2)
    argv = _check(to_launcher, _missing_plugins())
    if argv is None:
        sys.exit(2)
    _warm_up()
    order = to_launcher.receive()
    sys.argv = ["vllm", *argv, *order["argv"]]
    if order.get("is_headless"):
        _work_for_head()
        return
    # vllm is in its own environment, which the type checker does not see.
    from vllm.entrypoints.launchers.api_server.entry import main as serve  # pyright: ignore[reportMissingImports]

    serve()


def _work_for_head() -> None:
    """Run this node's workers of a replica whose head is elsewhere; exit with an error when one of them ends."""
    from vllm.entrypoints.cli.serve import run_headless  # pyright: ignore[reportMissingImports]
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # pyright: ignore[reportMissingImports]

    args = _cli_args().make_arg_parser(FlexibleArgumentParser()).parse_args([*sys.argv[1:], "--headless"])
    args.api_server_count = 0
    run_headless(args)
    sys.exit("a worker of this node has ended")  # vLLM returns when one does


def _cli_args() -> ModuleType:
    """Return the module with the parser of vLLM's server, which moved between releases."""
    try:
        from vllm.entrypoints.common import cli_args  # pyright: ignore[reportMissingImports]
    except ImportError:  # vLLM 0.32
        from vllm.entrypoints.launchers import cli_args  # pyright: ignore[reportMissingImports]
    return cli_args


def _missing_plugins() -> list[dict[str, str | None]]:
    """Return a violation if vLLM would not find Millrace's plugins here, as it would silently serve without them."""
    missing = [group for group in _PLUGIN_GROUPS if PLUGIN_NAME not in entry_points(group=group).names]
    if not missing:
        return []
    where = ", ".join(missing)
    message = f"the millrace installed for {sys.executable} has no entry point in {where}: install it again"
    return [{"field": PYTHON_VARIABLE, "value": sys.executable, "message": message}]


def _check(to_launcher: Line, problems: list[dict[str, str | None]]) -> list[str] | None:
    """Receive flags from the launcher, check them with vLLM's parser, and send all violations, `problems` among them.

    Returns the arguments for vLLM; None if there is a violation.
    """
    given = to_launcher.receive()["flags"]
    with without_gc():
        cli_args = _cli_args()
        from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]
        from vllm.utils.argparse_utils import FlexibleArgumentParser  # pyright: ignore[reportMissingImports]

    from millrace.inference.vllm.server.flags import to_argv

    parser = cli_args.make_arg_parser(FlexibleArgumentParser())
    can = {"can_sleep": current_platform.is_sleep_mode_available(), "can_record": current_platform.is_cuda()}
    argv, violations = to_argv(parser, given, **can)
    problems = problems + [{"field": one.field, "value": one.value, "message": one.message} for one in violations]
    if not problems:
        try:
            cli_args.validate_parsed_serve_args(parser.parse_args(argv))
        except (TypeError, ValueError) as error:
            text = " ".join(str(error).removeprefix("Error: ").split())
            problems = [*problems, {"field": "inference.vllm", "value": None, "message": f"vLLM refuses it: {text}"}]
    to_launcher.send({"violations": problems})
    return None if problems else argv


def _warm_up() -> None:
    """Import what vLLM's server needs in any case, while the model is still unknown."""
    with without_gc():
        import vllm.entrypoints.launchers.api_server.entry  # pyright: ignore[reportMissingImports]
        import vllm.v1.engine.async_llm  # pyright: ignore[reportMissingImports]  # noqa: F401


if __name__ == "__mp_main__":
    # A process that multiprocessing spawns imports this module first, before it runs what it is for. Not all of vLLM's
    # load its plugins (`lineage.register`): the coordinator of data parallelism would outlive a killed launcher.
    if os.getppid() == 1:  # vLLM's server, which starts them, is never that; it has died
        os._exit(1)
    die_with_parent(parent=os.getppid())

if __name__ == "__main__":
    main()
