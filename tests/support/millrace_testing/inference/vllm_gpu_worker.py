"""A program for vLLM's interpreter: vLLM's worker for GPUs with our extension in it, on CPU tensors.

    python vllm_gpu_worker.py MODEL_DIRECTORY ORDERS OUT 1|2 FRESH

vLLM itself builds class and worker, and the model runner of that number; only what needs CUDA is mocked:
streams, events and pinned memory as vLLM's build for CPUs mocks them, and that there is Triton, whose kernels only
generate. The worker then takes ORDERS, a JSON list of orders of `millrace.inference.vllm.ranks`: the first one is
loaded, the others are applied as deltas, and at last vLLM itself loads the directory FRESH. OUT gets who hides whom in
the class, and digests of what the model holds after each of these.
"""

import ast
import hashlib
import inspect
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(sys.argv[4] == "2"))
import torch
import vllm.config.vllm as vllm_config_module  # pyright: ignore[reportMissingImports] - another environment's
import vllm.v1.worker.cpu.shm  # pyright: ignore[reportMissingImports] - it mocks when it is imported
from vllm.config import set_current_vllm_config  # pyright: ignore[reportMissingImports]
from vllm.engine.arg_utils import EngineArgs  # pyright: ignore[reportMissingImports]
from vllm.v1.worker import gpu_worker  # pyright: ignore[reportMissingImports]
from vllm.v1.worker.worker_base import WorkerWrapperBase  # pyright: ignore[reportMissingImports]

EXTENSION = "millrace.inference.vllm.workers.extension.PolicyExtension"
vllm_config_module.HAS_TRITON = True


def assigned(classes: list[type]) -> set[str]:
    """Return the names that the methods of these classes assign to `self`, so that no class has them before an
    object does.
    """
    trees = [ast.parse(inspect.getsource(each)) for each in classes if each is not object]
    return {
        node.attr
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if isinstance(node.value, ast.Name) and node.value.id == "self"
    }


def built(model: str, store: Path) -> Any:
    """Return vLLM's worker for GPUs with a model runner and its model, on the CPU, as the executor builds it."""
    config = EngineArgs(
        model=model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        kv_cache_memory_bytes=64 << 20,
        worker_extension_cls=EXTENSION,
    ).create_engine_config()
    config.parallel_config.worker_cls = f"{gpu_worker.__name__}.{gpu_worker.Worker.__name__}"
    wrapper = WorkerWrapperBase()
    options = {"local_rank": 0, "rank": 0, "is_driver_worker": True, "distributed_init_method": f"file://{store}"}
    wrapper.init_worker([{"vllm_config": config, **options}])
    worker: Any = wrapper.worker
    worker.device = torch.device("cpu")
    with set_current_vllm_config(config):
        gpu_worker.init_worker_distributed_environment(config, 0, worker.distributed_init_method, 0, "gloo")
        worker._init_workspace_and_model_runner()
        worker.load_model()
    return worker


def call(worker: Any, method: str, *args: Any) -> Any:
    """Return the result of a method of the extension."""
    [_, result, error] = worker.millrace_call(0, method, args)
    if error:
        raise SystemExit(f"{method}: {error}")
    return result


def held(worker: Any) -> dict[str, str]:
    """Return a SHA-256 of every tensor of the model, by its name."""
    tensors = worker.model_runner.get_model().state_dict()
    raw = {name: tensor.contiguous().reshape(-1).view(torch.uint8) for name, tensor in tensors.items()}
    return {name: hashlib.sha256(each.numpy().tobytes()).hexdigest() for name, each in raw.items()}


def updated(worker: Any, orders: list[dict[str, Any]], fresh: str) -> dict[str, Any]:
    """Return the digests of the model's tensors after the first order, after the others, and after vLLM itself has
    loaded the directory `fresh`.
    """
    call(worker, "millrace_fetch", orders[0])  # for other nodes than this one
    call(worker, "millrace_reload", orders[0])
    call(worker, "millrace_digests", list(worker.millrace_held.layout.regions))
    first = held(worker)
    for version, order in enumerate(orders[1:], 1):
        staged = call(worker, "millrace_stage", order)
        call(worker, "millrace_gather", 0, len(staged["slices"]))
        call(worker, "millrace_prepare", 0, len(staged["units"]))
        while call(worker, "millrace_foreseen")["is_pending"]:
            time.sleep(0.05)  # a thread of the worker digests
        call(worker, "millrace_activate", version)
    while (verified := call(worker, "millrace_verify_next"))[0]:
        time.sleep(0.05)  # a thread of the worker reads
    last = held(worker)
    call(worker, "millrace_reload_directory", fresh)
    return {"first": first, "last": last, "fresh": held(worker), "verified": verified}


def relations(kind: type, of_vllm: list[type], names_of_vllm: set[str], before: dict[str, int]) -> dict[str, list[str]]:
    """Return which names of the extension and of vLLM's classes clash, hide each other or cannot be reached."""
    ours = [each for each in kind.__mro__ if each not in of_vllm]
    members = {(name, id(value)) for each in ours for name, value in vars(each).items() if not name.startswith("__")}
    now = {name: id(inspect.getattr_static(kind, name)) for name in dir(kind)}
    return {
        "mro": [f"{each.__module__}.{each.__qualname__}" for each in kind.__mro__],
        "members": sorted(name for name, _ in members),
        "clashes": sorted(({name for name, _ in members} | assigned(ours)) & names_of_vllm),
        "hidden": sorted(name for name, value in before.items() if now[name] != value),
        "unreachable": sorted(name for name, value in members if now[name] != value),
    }


def main(model: str, orders: list[dict[str, Any]], out: Path, fresh: str) -> None:
    """Apply the orders in vLLM's worker, and write the results to `out`."""
    of_vllm = list(gpu_worker.Worker.__mro__)
    before = {name: id(inspect.getattr_static(gpu_worker.Worker, name)) for name in dir(gpu_worker.Worker)}
    with tempfile.TemporaryDirectory() as directory:
        worker = built(model, Path(directory) / "init")
        names_of_vllm = {*before, *assigned(of_vllm), *vars(worker)}
        contents = updated(worker, orders, fresh)
    runner = type(worker.model_runner)
    found = {"runner": f"{runner.__module__}.{runner.__qualname__}", **contents}
    out.write_text(json.dumps(found | relations(type(worker), of_vllm, names_of_vllm, before)))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3]), sys.argv[5])
