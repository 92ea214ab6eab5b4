"""A program for vLLM's interpreter: what models say of a prompt as they are in their directories, and after updates.

    python vllm_said.py JOBS

JOBS is a JSON list of objects with `model` (a directory), `prompt`, `options` of vLLM, `orders` of
`millrace.inference.vllm.ranks` (the first one is loaded into a model that was started without weights, the others are
deltas), `tensors` (the names of all that a version is made of) and `out`. Each `out` gets the log-probs of the prompt's
tokens by the directory, by every version, and by the directory put in their place again, and digests of what the worker
holds of each version; or an error, and what follows goes on.
"""

import gc
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports] - another environment's
from vllm.distributed import cleanup_dist_env_and_memory  # pyright: ignore[reportMissingImports]
from vllm_memory import EXTENSION, caller, take  # pyright: ignore[reportMissingImports] - it is beside this program


def said(llm: Any, prompt: list[int]) -> list[float]:
    """Return the log-probs of a prompt's tokens but the first, each given those before it."""
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False, temperature=0)
    [answer] = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    [_, *entries] = answer.prompt_logprobs
    return [entry[token].logprob for token, entry in zip(prompt[1:], entries, strict=True)]


def started(job: dict[str, Any], load_format: str, **options: Any) -> Any:
    """Return a vLLM with the model of a job."""
    return LLM(
        load_format=load_format,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_num_seqs=2,
        kv_cache_memory_bytes=64 << 20,
        worker_extension_cls=EXTENSION,
        **{"model": job["model"], **job["options"], **options},
    )


def work(job: dict[str, Any]) -> dict[str, Any]:
    """Do one job, and return its results."""
    llm = started(job, "auto")
    [held] = llm.apply_model(lambda model: type(model).__name__)
    found: dict[str, Any] = {"class": held, "said": [said(llm, job["prompt"])], "rows": []}
    del llm
    end()
    llm = started(job, "dummy")
    logprobs, found["rows"] = follow(llm, job)
    found["said"] += logprobs
    # The second one was started without weights, and this reads them as it was told then.
    llm.llm_engine.vllm_config.load_config.load_format = "auto"
    caller(llm)("millrace_reload_directory", job["model"])
    found["said"].append(said(llm, job["prompt"]))
    if "parent" in job:
        del llm
        end()
        llm = started(job, "dummy", model=job["parent"], language_model_only=True)
        found["said"] += follow(llm, job, is_text_part=True)[0]
    return found


def follow(llm: Any, job: dict[str, Any], **more: Any) -> tuple[list[list[float]], list[Any]]:
    """Return the log-probs of the prompt after each version, and what the worker then reports about its memory."""
    call, logprobs, rows = caller(llm), [], []
    for version, order in enumerate(job["orders"]):
        if version:
            take(call, order, version)
        else:
            call("millrace_reload", order | more)
        logprobs.append(said(llm, job["prompt"]))
        rows.append(call("millrace_digests", job["tensors"]))
    return logprobs, rows


def end() -> None:
    """Free everything that a vLLM which is no longer used has left."""
    gc.collect()
    cleanup_dist_env_and_memory()


def main(jobs: list[dict[str, Any]]) -> None:
    """Do all jobs, and write the results of each to its `out`."""
    for job in jobs:
        try:
            found = work(job)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the edge of foreign code: what it does not run is what is asked
            found = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        Path(job["out"]).write_text(json.dumps(found))
        end()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
