"""The config's keys as vLLM's flags, checked by vLLM's own argument parser before anything heavy starts.

Pure functions over an `argparse.ArgumentParser`, so they import no vLLM; `host.py` gives them vLLM's.
"""

import argparse
import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from millrace.errors import Violation
from millrace.inference.launch_env import TYPED_FLAGS

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
