"""CPU of rollouts of real size, in milliseconds per thousand tokens, by process, beside another checkout's.

    python benchmarks/rollout_sizes.py [--tokens 4096 16384] [--turns 2 10 50] [--rollouts 32] [--repeats 3]
        [--against CHECKOUT] [--profile PART]

Each rollout takes the path of a run. An environment of verifiers with so many turns is played by the env worker's
adapter, all rollouts of a cell at the same time. A process with our HTTP routes answers, with random tokens at once
instead of a model (`front`). Then the env-server reads the workers' frames and encodes the rollouts for its spool, the
orchestrator decodes them and packs the batch and its archive, and the trainer reads the batch. A quarter of the tokens
are the prompt's and the environment's. A token of the example's tokenizer is a byte.

CPU is user and system time of all threads. Redis, the store, gRPC and the model are left out. With `--against` the same
is measured of the services of another checkout, in turns with this one. `--profile` prints where this checkout spends
the time of one part.
"""

import argparse
import asyncio
import cProfile
import gc
import importlib.util
import io
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
from report import REPOSITORY, end_like_interrupt, machine, progress, table

PARTS = ("front", "env worker", "env-server", "orchestrator", "trainer")
OWN_SHARE = 4
SHOWN = 30
LETTERS = "abcdefghijklmnopqrstuvwxyz "
RUN, ENV = "r" + "0" * 27, "talk"
CHILD_S = 1800.0
FRAME_HEAD_BYTES = 4


class Clock:
    """CPU seconds by part, and the profile of one of them."""

    def __init__(self, profiled: str) -> None:
        self.cpu_s: dict[str, float] = defaultdict(float)
        self.profile = cProfile.Profile()
        self._profiled = profiled

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        began = time.process_time()
        if part == self._profiled:
            self.profile.enable()
        try:
            yield
        finally:
            self.profile.disable()
            self.cpu_s[part] += time.process_time() - began


def example_tokenizer() -> Any:
    """The tokenizer of examples/reverse_text."""
    path = REPOSITORY / "examples" / "reverse_text" / "make_model.py"
    spec = importlib.util.spec_from_file_location("make_model", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.make_tokenizer()


class InstantEngine:
    """Answers with as many random letters as it may, and the end of the turn."""

    def __init__(self, tokenizer: Any) -> None:
        import numpy as np

        self._letters = np.asarray(tokenizer.encode(LETTERS), np.int32)
        self._end = tokenizer.eos_token_id
        self._rng = np.random.default_rng(0)

    def status(self) -> Any:
        """Ready, with room for everything."""
        from millrace.inference.engine import EngineState, EngineStatus

        return EngineStatus(
            state=EngineState.READY,
            identity=None,
            is_paused=False,
            num_running=0,
            num_waiting=0,
            max_num_seqs=256,
            max_model_len=1 << 20,
            progress_age_s=0.0,
            num_generated_tokens=0,
            num_finished=0,
        )

    async def generate(self, request: Any) -> Any:
        """One completion."""
        import numpy as np

        from millrace.inference.engine import FinishReason, Generation
        from millrace.rollouts.types import PolicySpan

        count = request.sampling.max_tokens
        ids = self._rng.choice(self._letters, count)
        ids[-1] = self._end
        return Generation(
            token_ids=ids,
            logprobs=-self._rng.exponential(0.5, count).astype(np.float32),
            policy_spans=(PolicySpan(lineage=0, version=3, start=0, end=count),),
            finish_reason=FinishReason.STOP,
        )

    async def abort_all(self) -> None:
        """Nothing is ever in flight."""


async def serve_front(is_profiled: bool) -> None:
    """Serve our HTTP routes until stdin closes; the first line on stdout is the port, the rest the profile."""
    from millrace.inference.http.server import HttpApi, start_http
    from millrace.inference.model_files import ModelSlot, ServedModel

    tokenizer = example_tokenizer()
    engine: Any = InstantEngine(tokenizer)
    slot = ModelSlot(current=ServedModel(names=("policy",), directory=Path("."), tokenizer=tokenizer))
    server = await start_http(HttpApi(engine, slot), "127.0.0.1", 0)
    print(server.port, flush=True)
    profile = cProfile.Profile()
    if is_profiled:
        profile.enable()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    profile.disable()
    await server.stop()
    if is_profiled:
        print(shown(profile))


def shown(profile: cProfile.Profile) -> str:
    """The functions in which a profile spent most."""
    out = io.StringIO()
    pstats.Stats(profile, stream=out).sort_stats("tottime").print_stats(SHOWN)
    return out.getvalue()


@contextmanager
def front(*, is_profiled: bool) -> Iterator[tuple[int, psutil.Process]]:
    """A process with our HTTP routes: its port, and the process."""
    words = [sys.executable, __file__, "--serve", *(["--profile", "front"] if is_profiled else [])]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        port = int(process.stdout.readline())
        yield port, psutil.Process(process.pid)
        process.stdin.close()
        print(process.stdout.read(), file=sys.stderr)


def make_adapter(turns: int, added: int) -> Any:
    """The worker's adapter of an environment with so many turns, which adds so many letters before each."""
    import verifiers as vf
    from datasets import Dataset

    from millrace.env_server.adapters.v0 import V0Adapter
    from millrace.internal.v1.play_pb2 import EnvSpec

    text = (LETTERS * (added // len(LETTERS) + 1))[:added]

    def half(**_: Any) -> float:
        return 0.5

    class Talk(vf.MultiTurnEnv):
        async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
            return [vf.UserMessage(content=text)]

    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": text}], "answer": "a"}])
    module = ModuleType(ENV)
    module.load_environment = lambda: Talk(  # type: ignore[attr-defined]
        dataset=rows, rubric=vf.Rubric(funcs=[half]), max_turns=turns
    )
    return V0Adapter.load(EnvSpec(name=ENV, id=ENV), module, {"renderer": "off"})


async def play(clock: Clock, port: int, tokens: int, turns: int, rollouts: int) -> list[bytes]:
    """Play the rollouts, and return the worker's frames."""
    from millrace.env_server.workers.env_worker import answer_of
    from millrace.env_server.workers.frames import encode_frame
    from millrace.internal.v1 import env_worker_pb2
    from millrace.internal.v1.play_pb2 import EnvSpec, PlayGroupRequest, Sampling
    from millrace.internal.v1.rollout_pb2 import PURPOSE_TRAIN

    added = tokens // turns // OWN_SHARE
    adapter = make_adapter(turns, added)
    await adapter.start()

    async def one(member: int) -> bytes:
        request = PlayGroupRequest(
            run_uid=RUN,
            purpose=PURPOSE_TRAIN,
            ordinal=0,
            members=[member],
            group_size=rollouts,
            env=EnvSpec(name=ENV, id=ENV),
            base_url=f"http://127.0.0.1:{port}/v1",
            use_train_tasks=True,
            model="policy",
            sampling=Sampling(temperature=1.0, max_tokens=tokens // turns - added),
            rollout_timeout_seconds=CHILD_S,
        )
        [outcome] = await adapter.play(request, tokenizer_dir="")
        answer = answer_of(request, member, "t", outcome, 1.0)
        return encode_frame(env_worker_pb2.PlayEnded(rollouts=[answer]))[FRAME_HEAD_BYTES:]

    # One alone before, which imports, connects, and learns what the engine can do.
    await one(0)
    with clock("env worker"):
        frames = await asyncio.gather(*(one(member) for member in range(rollouts)))
    await adapter.close()
    return frames


def handle(clock: Clock, frames: Sequence[bytes]) -> int:
    """Take the frames through env-server, orchestrator and trainer; the number of tokens."""
    import numpy as np
    import torch

    from millrace.env_server.workers.frames import decode_frame
    from millrace.internal.v1 import batch_pb2, env_worker_pb2
    from millrace.rollouts.batch_wire import decode_header, iter_chunks, unpack_batch
    from millrace.rollouts.types import TrainSample
    from millrace.rollouts.wire import decode_rollout, encode_archive, encode_rollout, rollout_from_proto
    from millrace.trainer.learning.batch import build_micro_batch

    with clock("env-server"):
        ended = [decode_frame(env_worker_pb2.PlayEnded, frame) for frame in frames]
        spooled = [encode_rollout(rollout_from_proto(rollout)) for each in ended for rollout in each.rollouts]
    with clock("orchestrator"):
        read = [decode_rollout(data) for data in spooled]
        bad = [rollout.error for rollout in read if not rollout.samples]
        if bad:
            raise RuntimeError(f"{len(bad)} rollouts failed: {bad[0]}")
        samples = [
            TrainSample(
                token_ids=sample.token_ids,
                loss_mask=sample.loss_mask,
                inference_logprobs=sample.inference_logprobs,
                advantages=sample.loss_mask * np.float32(0.5),
                ordinal=rollout.ordinal,
                member=rollout.member,
                attempt=rollout.attempt,
                env=rollout.env,
                reward=rollout.reward,
                temperature=rollout.temperature,
                min_version=3,
                max_version=3,
                lineage=0,
            )
            for rollout in read
            for sample in rollout.samples
        ]
        header = batch_pb2.BatchHeader(kind=batch_pb2.BATCH_KIND_TRAIN, run_uid=RUN, step=1)
        chunks = list(iter_chunks(header, samples))
        archive, packed = encode_archive(read), header.SerializeToString()
    assert archive
    with clock("trainer"):
        known = decode_header(packed)
        rows = unpack_batch(known, dict(enumerate(chunks)))
        longest = max(row.num_tokens for row in rows)
        for row in rows:
            build_micro_batch([row], rows=[[0]], seq_len=longest, device=torch.device("cpu"))
    return sum(sample.num_tokens for sample in samples)


def measure_here(tokens: int, turns: int, rollouts: int, profiled: str) -> dict[str, float]:
    """Milliseconds of CPU per thousand tokens, by part."""
    clock = Clock(profiled)
    with front(is_profiled=profiled == "front") as (port, process):
        began = process.cpu_times()
        frames = asyncio.run(play(clock, port, tokens, turns, rollouts))
        ended = process.cpu_times()
    share = rollouts / (rollouts + 1)  # without the one before
    clock.cpu_s["front"] = (ended.user - began.user + ended.system - began.system) * share
    gc.collect()
    num_tokens = handle(clock, frames)
    if profiled in PARTS[1:]:
        print(shown(clock.profile), file=sys.stderr)
    return {part: clock.cpu_s[part] * 1e6 / num_tokens for part in PARTS}


def measure_of(services: Path, cell: tuple[int, int], rollouts: int, profiled: str) -> dict[str, float]:
    """The same of a checkout's services, in a process of its own."""
    words = [sys.executable, __file__, "--here", "--tokens", str(cell[0]), "--turns", str(cell[1])]
    words += ["--rollouts", str(rollouts), *(["--profile", profiled] if profiled else [])]
    with tempfile.TemporaryDirectory(prefix="millrace-rollout-sizes-") as place:
        environment = os.environ | {"PYTHONPATH": f"{services}:{REPOSITORY / 'benchmarks'}", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, cwd=place, env=environment, stdout=subprocess.PIPE, timeout=CHILD_S, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def report(options: argparse.Namespace) -> str:
    """The report as Markdown."""
    checkouts = {"": REPOSITORY / "services"}
    if options.against:
        checkouts = {"before": options.against.resolve() / "services", "now": REPOSITORY / "services"}
    rows = []
    for cell in [(tokens, turns) for tokens in options.tokens for turns in options.turns]:
        found: dict[str, list[dict[str, float]]] = defaultdict(list)
        for number in range(options.repeats):
            for name, services in checkouts.items():
                progress(f"{cell[0]} tokens, {cell[1]} turns, {number + 1} of {options.repeats} {name}")
                profiled = options.profile if name != "before" else ""
                found[name].append(measure_of(services, cell, options.rollouts, profiled))
        medians = {
            name: [statistics.median(each[part] for each in measured) for part in PARTS]
            for name, measured in found.items()
        }
        shown_parts = [" → ".join(f"{value:.2f}" for value in values) for values in zip(*medians.values(), strict=True)]
        rows.append([str(cell[0]), str(cell[1]), *shown_parts])
    title = f"## Rollouts of real size, ms of CPU per thousand tokens, {options.rollouts} in flight"
    return f"{title}\n\n{machine()}, medians of {options.repeats}\n\n{table(['tokens', 'turns', *PARTS], rows)}\n"


def main() -> None:
    end_like_interrupt()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16_384])
    parser.add_argument("--turns", type=int, nargs="+", default=[2, 10, 50])
    parser.add_argument("--rollouts", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout, measured in turns")
    parser.add_argument("--profile", default="", choices=PARTS, help="where a part spends its time")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve_front(options.profile == "front"))
    elif options.here:
        found = measure_here(options.tokens[0], options.turns[0], options.rollouts, options.profile)
        print(json.dumps(found))
    else:
        print(report(options))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
