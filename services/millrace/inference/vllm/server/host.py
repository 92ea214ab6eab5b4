"""The vLLM server process of a replica: `python -m millrace.inference.vllm.server.host`, started by the launcher alone.

It imports vLLM at once, while the launcher still waits for a policy, checks the flags with vLLM's own parser, and
becomes vLLM's OpenAI server when the launcher sends the model's arguments. See `handover.py` for the messages.
"""

import argparse
import difflib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any, NoReturn

from millrace.errors import Violation
from millrace.inference.launch_env import PLUGIN_NAME, PYTHON_VARIABLE, TYPED_FLAGS
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


# The config's keys as vLLM's flags, checked by vLLM's own argument parser before anything heavy starts. What follows is
# pure functions over an `argparse.ArgumentParser`, so that tests of them need no vLLM.

FREE = "inference.vllm."
SLEEP_KEY = "inference.sleep_while_training"
_RECORDS = "enable_return_routed_experts"
_CUTOFF = 0.6

_ONE_NODE_CORES = "the engine cores of a replica are all on its node; start more replicas instead"

OWNED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "model": ((), "the model is `inference.model.name`, or comes with the run's policy"),
    "model_tag": ((), "the model is `inference.model.name`, or comes with the run's policy"),
    "tokenizer": ((), "the tokenizer comes with the model"),
    "host": ((), "it listens where `inference.server.host` says"),
    "port": ((), "it listens where `inference.server.port` says"),
    "uds": ((), "workers are reached by address; see `inference.server`"),
    "served_model_name": ((), "environments ask for the model `policy`"),
    "worker_extension_cls": ((), "Millrace's own puts new weights into the workers"),
    "logprobs_mode": (("processed_logprobs",), "training needs log-probs of the distribution that was sampled from"),
    "enable_scale_out": ((True,), "rollouts are made token in, token out"),
    "load_format": (("auto",), "weights come from the model's directory or the run's policy"),
    "api_server_count": ((1,), "one process serves one replica; start more replicas instead"),
    "headless": ((False,), "a node that does not serve is one with a `node_rank` above 0"),
    "grpc": ((False,), "the gRPC server of a replica is Millrace's"),
    "grpc_port": ((), "the gRPC server of a replica is Millrace's, at MILLRACE_LISTEN"),
    "api_key": ((), "environments send none; put a proxy in front of what strangers can reach"),
    "config": ((), "write its keys into `inference.vllm`"),
    "tool_strict_level": (("auto",), "a call that is forced into its schema is not sampled as the trainer computes it"),
    "enable_eplb": (
        (False,),
        "experts that move or are copied are where no version is written or read back",
    ),
    "offload_backend": (("auto", "uva"), "layers that are fetched from the host anew would miss what a version writes"),
    "offload_group_size": ((0,), "layers that are fetched from the host anew would miss what a version writes"),
    "ssl_keyfile": ((), "put a proxy in front of the replica"),
    "ssl_certfile": ((), "put a proxy in front of the replica"),
    "root_path": ((), "environments and the orchestrator expect the routes at the root"),
    "data_parallel_backend": (("mp",), _ONE_NODE_CORES),
    "data_parallel_address": ((), _ONE_NODE_CORES),
    "data_parallel_rank": ((), _ONE_NODE_CORES),
    "data_parallel_start_rank": ((), _ONE_NODE_CORES),
    "data_parallel_size_local": ((), _ONE_NODE_CORES),
    "data_parallel_external_lb": ((False,), _ONE_NODE_CORES),
    "data_parallel_hybrid_lb": ((False,), _ONE_NODE_CORES),
    "data_parallel_multi_port_external_lb": ((False,), _ONE_NODE_CORES),
    "enable_elastic_ep": ((False,), "the number of engine cores of a replica is fixed; start more replicas instead"),
}
"""Flags that Millrace sets itself: the values that are allowed, and why others are not."""

_SEVERAL_NODES: Mapping[str, tuple[tuple[object, ...], str]] = {
    "data_parallel_size": ((1, "1"), "the engine cores of a replica are all on one node; start more replicas instead"),
    "enable_lora": ((False,), "adapters are not brought to other nodes; train all weights, or serve it on one node"),
    "distributed_executor_backend": (("mp",), "policies reach only workers that `nnodes` and `node_rank` have started"),
}
"""Flags that are limited for a replica over several nodes: the values that are allowed, and why others are not."""


class _Refused(Exception):
    """argparse refused a value."""


def to_argv(
    parser: argparse.ArgumentParser, given: Mapping[str, Any], *, can_sleep: bool = True, can_record: bool = True
) -> tuple[list[str], list[Violation]]:
    """Return vLLM's arguments for the flags in `given`, and a violation for each flag that is wrong.

    `given` maps keys of the config (`inference.vllm.enforce_eager`, `inference.parallel.tp`) or bare names of flags to
    JSON values; None leaves a flag out. `parser` is vLLM's. With `can_sleep` False (on a CPU) the key for sleeping is
    left out, and a replica that is to sleep pauses instead. With `can_record` False (elsewhere than on CUDA) it cannot
    record experts.
    """
    if not can_sleep:
        given = {key: value for key, value in given.items() if key != SLEEP_KEY}
    argv: list[str] = []
    violations: list[Violation] = []
    seen: dict[str, str] = {}
    is_spread = any(_name(key) == "nnodes" and str(value) not in ("None", "1") for key, value in given.items())
    for key, value in given.items():
        name = _name(key)
        problem = _owned(name, value) or _set_twice(seen.get(name)) or _out_of_reach(name, value, is_spread=is_spread)
        if problem is None and name == _RECORDS and value and not can_record:
            problem = "vLLM records the experts of tokens on CUDA only; leave it out, or serve with the embedded engine"
        seen[name] = key
        action = _action(parser, name)
        if problem is None and action is None:
            problem = _unknown(parser, name)
        if problem is None and action is not None and value is not None and name not in OWNED:
            words = _words(action, name, value)
            problem = _refusal(parser, words)
            argv += words
        if problem is not None:
            violations.append(Violation(field=key, value=json.dumps(value), message=problem, source="vLLM's flags"))
    return argv, violations


def _owned(name: str, value: object) -> str | None:
    """Return why a flag that Millrace sets itself cannot have this value; None if it can, or is another flag."""
    if name not in OWNED:
        return None
    fine, why = OWNED[name]
    if value is None or value in fine:
        return None
    allowed = f"; only {' or '.join(json.dumps(one) for one in fine)} is possible" if fine else "; leave it out"
    return f"is set by Millrace: {why}{allowed}"


def _name(key: str) -> str:
    """Return the name of vLLM's flag, with underscores, for a whole key of the config or the bare name of a flag.

    `inference.parallel.tp` gives `tensor_parallel_size`, and `inference.vllm.max-num-seqs` gives `max_num_seqs`.
    """
    return TYPED_FLAGS.get(key) or key.removeprefix(FREE).replace("-", "_")


def _out_of_reach(name: str, value: object, *, is_spread: bool) -> str | None:
    """Return why the flag keeps policies from reaching every worker of a replica; None if it does not.

    `is_spread` is whether the replica is over several nodes.
    """
    if value == "ray" and name == "distributed_executor_backend":
        return _SEVERAL_NODES[name][1]
    if not is_spread or name not in _SEVERAL_NODES or value is None or value in _SEVERAL_NODES[name][0]:
        return None
    return f"is not possible over several nodes: {_SEVERAL_NODES[name][1]}"


def _set_twice(other: str | None) -> str | None:
    """Return the problem of a flag that the key `other` has set already; None without one."""
    return None if other is None else f"says the same as `{other}`; keep one of them"


def _action(parser: argparse.ArgumentParser, name: str) -> argparse.Action | None:
    """Return the parser's action for a flag; None if it has no such flag."""
    option = f"--{name.replace('_', '-')}"
    return next((action for action in parser._actions if option in action.option_strings), None)


def _unknown(parser: argparse.ArgumentParser, name: str) -> str:
    """Return the problem of a flag that the parser does not have, with the most similar one that it has."""
    known = sorted({option[2:].replace("-", "_") for action in parser._actions for option in action.option_strings})
    near = difflib.get_close_matches(name, known, n=1, cutoff=_CUTOFF)
    return "vLLM has no such flag" + (f"; did you mean `{near[0]}`?" if near else "; see `vllm serve --help=all`")


def _words(action: argparse.Action, name: str, value: Any) -> list[str]:
    """Return the command-line words that set one flag to a JSON value; none for a switch that is off by default.

    A word is `--flag=value`, because a value may begin with a dash; a flag with several values is followed by these.
    """
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool) and action.nargs == 0:
        # `--no-flag`, where the parser has one; a switch that is off is left out.
        negative = f"--no-{name.replace('_', '-')}"
        return [flag] if value else ([negative] if negative in action.option_strings else [])
    if isinstance(value, list) and action.nargs in ("+", "*"):
        return [flag, *(_text(item) for item in value)] if value else []
    return [f"{flag}={_text(value)}"]


def _text(value: Any) -> str:
    """Return a text as it is, and any other value as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def _refusal(parser: argparse.ArgumentParser, words: Sequence[str]) -> str | None:
    """Return why vLLM's parser refuses the words of one flag; None if it accepts them."""
    if not words:
        return None
    ordinary = parser.error

    def refuse(message: str) -> NoReturn:
        """Raise the parser's message, where argparse would end the process."""
        raise _Refused(message)

    parser.error = refuse  # type: ignore[method-assign] - the parser is ours, and argparse would end the process
    try:
        # One flag at a time, because argparse stops at the first error and all of them are to be reported.
        parser.parse_args(list(words))
    except (_Refused, argparse.ArgumentTypeError, ValueError, TypeError) as error:
        text = " ".join(str(error).split())
        return f"vLLM refuses it: {text.partition(': ')[2] if text.startswith('argument ') else text}"
    finally:
        parser.error = ordinary  # type: ignore[method-assign]
    return None


if __name__ == "__mp_main__":
    # A process that multiprocessing spawns imports this module first, before it runs what it is for. Not all of vLLM's
    # load its plugins (`lineage.register`): the coordinator of data parallelism would outlive a killed launcher.
    if os.getppid() == 1:  # vLLM's server, which starts them, is never that; it has died
        os._exit(1)
    die_with_parent(parent=os.getppid())

if __name__ == "__main__":
    main()
