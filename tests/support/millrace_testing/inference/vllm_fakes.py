"""A vLLM engine client that a test directs, the engine over it, and what the updater does with that."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.errors import UnavailableError
from millrace.inference.engine import InflightMode, PolicyIdentity
from millrace.inference.vllm import ranks, staging
from millrace.inference.vllm.engine import VllmEngine
from millrace.inference.vllm.gate import GenerationGate
from millrace.policies.digest import digest_hex
from millrace.policies.manifest import Probe, TensorEntry

FIRST = PolicyIdentity(run_uid="r", lineage=0, version=1)
SECOND = PolicyIdentity(run_uid="r", lineage=0, version=2)
PROBE = Probe(token_ids=(1, 2), logprobs=(-1.0,))


class Client:
    """An engine that notes what it is told. `block` names calls that wait until the test lets them go on."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.is_generating = asyncio.Event()
        self.is_generating.set()
        self.fails = ""
        self.error: Exception = UnavailableError("too slow", reason="ENGINE_SILENT")
        self.blocks: dict[str, asyncio.Event] = {}
        self.reached: dict[str, asyncio.Event] = {}
        self.errored = False
        self.num_verified, self.damage, self.is_proved = 0, "", True
        self.num_unverified = 0
        self.verify_error: Exception | None = None
        foreseen = {"is_pending": False, "rows": [["w", "0:(4,)", 4, digest_hex(0)]]}
        self.answers: dict[str, Any] = {"millrace_check": [[], []], "millrace_foreseen": foreseen}
        self.answers["millrace_stage"] = {"units": [], "slices": [], "seconds": 0.0}
        self.output_processor = SimpleNamespace(request_states={})
        self.model_config = SimpleNamespace(dtype="torch.float32", model="nowhere", max_model_len=8, revision=None)
        scheduler = SimpleNamespace(max_num_seqs=1)
        self.model_config.enable_sleep_mode = True
        self.is_asleep = False
        self.vllm_config = SimpleNamespace(
            lora_config=None,
            device_config=SimpleNamespace(device_type="cuda"),
            scheduler_config=scheduler,
            model_config=self.model_config,
            load_config=SimpleNamespace(download_dir=None),
            parallel_config=SimpleNamespace(nnodes=1, data_parallel_size=1, world_size=1),
        )

    def block(self, name: str) -> tuple[asyncio.Event, asyncio.Event]:
        self.blocks[name], self.reached[name] = asyncio.Event(), asyncio.Event()
        return self.reached[name], self.blocks[name]

    async def reach(self, name: str) -> None:
        self.calls.append(name)
        if name in self.blocks:
            self.reached[name].set()
            await self.blocks.pop(name).wait()
        if self.fails == name:
            self.fails = ""
            raise self.error

    @property
    def is_paused(self) -> bool:
        return not self.is_generating.is_set()

    async def sleep(self, *, level: int, mode: str) -> None:
        assert level in (0, 1) and mode == "keep"
        self.is_generating.clear()  # a call whose answer is lost was done all the same
        self.is_asleep |= level == 1
        await self.reach("sleep" if level else "pause")

    async def wake_up(self, tags: list[str] | None) -> bool:
        assert tags in (None, ["scheduling"])
        await self.reach("wake" if tags is None else "resume")
        self.is_asleep &= tags is not None
        if not self.is_asleep:
            self.is_generating.set()
        return not self.is_asleep

    async def collective_rpc(self, method: str, args: Any = ()) -> list[Any]:
        assert method == "millrace_call"
        number, inner, _ = args
        if inner == "millrace_verify_next":
            self.num_verified += 1
            if self.verify_error is not None:
                raise self.verify_error
            assert not self.is_asleep, "it reads memory that is not there"
            return [[number, [self.num_unverified, self.damage, self.is_proved], ""]]
        await self.reach(inner)
        assert not self.is_asleep, f"{inner} reads or writes memory that is not there"
        return [[number, self.answers.get(inner, []), ""]]

    async def reset_prefix_cache(self, **_: Any) -> None: ...

    async def abort(self, request_ids: list[str]) -> None: ...

    async def update_weight_version(self, version: str) -> None:
        await asyncio.sleep(0)  # the way to the engine and back

    async def get_weight_version(self) -> str:
        await self.reach("ping")
        return "0"

    def pauses(self) -> list[str]:
        return [call for call in self.calls if call in ("pause", "resume", "sleep", "wake")]


def policy(**options: Any) -> Any:
    entry = TensorEntry(name="w", shape=(4,), dtype="float32", digest=digest_hex(0))
    manifest = SimpleNamespace(adapter=None, probe=PROBE, tensors=(entry,), digest="d")
    return SimpleNamespace(manifest=SimpleNamespace(**{**vars(manifest), **options}), tensors={})


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def gate() -> GenerationGate:
    return GenerationGate()


@pytest.fixture
async def engine(
    client: Client, gate: GenerationGate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[VllmEngine]:
    async def logprobs(client: Client, *_: Any, **__: Any) -> list[float]:
        client.calls.append("probe handed in")
        await client.is_generating.wait()
        await client.reach("probe")
        return [-1.0]

    monkeypatch.setattr(staging, "prompt_logprobs", logprobs)
    monkeypatch.setattr(ranks, "write_order", lambda *_: {})
    engine = VllmEngine(client, gate, directory=tmp_path)
    await engine.load(tmp_path, policy(), identity=FIRST)
    await engine.prove(policy())
    client.calls.clear()
    yield engine
    await engine.close()


async def update(engine: VllmEngine, staged: Any = None) -> None:
    """Update as the updater does."""
    staged = staged or policy()
    await engine.pause("update")
    try:
        await engine.apply_policy(staged, identity=SECOND, inflight_mode=InflightMode.KEEP)
        await engine.prove(staged)
    finally:
        await engine.resume("update")
