"""A run that publishes adapters of the tiny model, and adapters of many runs on one base."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from millrace.inference.embedded import loader
from millrace.inference.engine import PolicyIdentity
from millrace.inference.updater import DesiredPolicy
from millrace.internal.v1.policy_pb2 import PolicyEntry
from millrace.models.files import ADAPTER_CONFIG
from millrace.policies.manifest import AdapterEntry, PolicyPlace, Probe, StagedPolicy
from millrace.policies.peft.config import AdapterSpec
from millrace.policies.publish import PolicyContents, publish_policy
from millrace.storage.local import LocalStore
from millrace_testing.inference.logprobs import prompt_logprobs
from millrace_testing.inference.tiny import staged_of

SPEC = AdapterSpec(rank=4, alpha=6.0, target_modules=("q_proj", "down_proj"), modules_to_save=("norm",))
LAYERS = [f"model.layers.{layer}.{name}" for layer in range(2) for name in ("self_attn.q_proj", "mlp.down_proj")]


class Run:
    """A run that trains adapters on `base`; every adapter's merged twin is a fresh model."""

    def __init__(
        self, store: LocalStore, base: torch.nn.Module, files: dict[str, bytes], spec: AdapterSpec = SPEC
    ) -> None:
        self.store, self.base, self.spec = store, base, spec
        self.files = {**files, ADAPTER_CONFIG: spec.to_config()}
        tensors = {n: t for n, t in base.state_dict().items() if n != "lm_head.weight"}
        self.base_manifest, self.base_desired = self._publish(0, tensors, base)
        self.twins = {0: base}

    def adapter(self, version: int, *, damage: Callable[[dict[str, torch.Tensor]], Any] | None = None) -> DesiredPolicy:
        generator = torch.Generator().manual_seed(version)
        twin = copy.deepcopy(self.base)
        tensors: dict[str, torch.Tensor] = {}
        for layer in LAYERS:
            weight = twin.get_parameter(f"{layer}.weight")
            low = (torch.randn(self.spec.rank, weight.shape[1], generator=generator) * 0.1).to(weight.dtype)
            high = (torch.randn(weight.shape[0], self.spec.rank, generator=generator) * 0.1).to(weight.dtype)
            tensors |= {f"{layer}.lora_A.weight": low, f"{layer}.lora_B.weight": high}
            weight += self.spec.scaling * high @ low
        if self.spec.modules_to_save:
            norm = twin.get_parameter("model.norm.weight")
            norm += 0.1 * version
            tensors["model.norm.weight"] = norm.clone()
        if damage is not None:
            damage(tensors)
        self.twins[version] = twin
        named = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
        return self._publish(version, named, twin, is_adapter=True)[1]

    def _publish(self, version: int, tensors: dict[str, torch.Tensor], twin: torch.nn.Module, *, is_adapter=False):
        adapter = None
        if is_adapter:
            manifest = self.base_manifest
            adapter = AdapterEntry(
                rank=self.spec.rank,
                alpha=self.spec.alpha,
                target_modules=self.spec.target_modules,
                modules_to_save=self.spec.modules_to_save,
                base_key=manifest.key,
                base_digest=manifest.digest,
                base_bytes=manifest.full_bytes,
            )
        tokens = tuple(range(1, 17))
        published = publish_policy(
            self.store,
            PolicyPlace(prefix="test", uid="run1", lineage=0, version=version),
            PolicyContents(
                tensors=[(name, loader.as_tensor_bytes(tensor)) for name, tensor in tensors.items()],
                files=self.files,
                probe=Probe(token_ids=tokens, logprobs=tuple(prompt_logprobs(twin, tokens))),
                adapter=adapter,
            ),
            epoch=1,
        )
        entry = PolicyEntry(
            lineage=0,
            version=version,
            manifest_key=published.manifest_key,
            manifest_sha256=published.manifest_sha256,
            digest=published.manifest.digest,
        )
        return published.manifest, DesiredPolicy(run_uid="run1", entry=entry)


def half(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{LAYERS[0]}.lora_A.weight"]


@dataclass(frozen=True)
class Tenant:
    """An adapter of one run on a base that several share, without a store; `twin` is the model with it merged."""

    identity: PolicyIdentity
    staged: StagedPolicy
    twin: torch.nn.Module

    def changed(self, tensors: Mapping[str, torch.Tensor], **changes: Any) -> StagedPolicy:
        """Return the staged adapter with other tensors, and fields of its manifest or of its entry changed."""
        entry = self.staged.manifest.adapter
        assert entry is not None
        probe = changes.pop("probe", self.staged.manifest.probe)
        found = {**self.staged.tensors, **{name: loader.as_tensor_bytes(tensor) for name, tensor in tensors.items()}}
        return staged_of(found, probe=probe, adapter=replace(entry, **changes))


def tenant(
    base: torch.nn.Module,
    *,
    run_uid: str,
    seed: int,
    base_digest: str,
    version: int = 1,
    rank: int = 4,
    targets: tuple[str, ...] = ("q_proj", "down_proj"),
) -> Tenant:
    """Return an adapter with random weights on every layer of `base` that `targets` names."""
    generator, twin, alpha = torch.Generator().manual_seed(seed), copy.deepcopy(base), 1.5 * rank
    tensors: dict[str, torch.Tensor] = {}
    for name, layer in base.named_modules():
        if isinstance(layer, torch.nn.Linear) and name.endswith(targets):
            low = (torch.randn(rank, layer.in_features, generator=generator) * 0.1).to(layer.weight.dtype)
            high = (torch.randn(layer.out_features, rank, generator=generator) * 0.1).to(layer.weight.dtype)
            named = f"base_model.model.{name}"
            tensors |= {f"{named}.lora_A.weight": low, f"{named}.lora_B.weight": high}
            twin.get_parameter(f"{name}.weight").add_(alpha / rank * high @ low)
    entry = AdapterEntry(
        rank=rank,
        alpha=alpha,
        target_modules=targets,
        modules_to_save=(),
        base_key="base/manifest.json",
        base_digest=base_digest,
        base_bytes=0,
    )
    tokens = tuple(range(1, 17))
    staged = staged_of(
        {name: loader.as_tensor_bytes(tensor) for name, tensor in tensors.items()},
        probe=Probe(token_ids=tokens, logprobs=tuple(prompt_logprobs(twin, tokens))),
        adapter=entry,
    )
    return Tenant(PolicyIdentity(run_uid=run_uid, lineage=0, version=version), staged, twin)
