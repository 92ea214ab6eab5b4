"""Policies of a tiny model for vLLM tests, published full or as a delta, as a trainer does."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from millrace.internal.v1.policy_pb2 import PolicyEntry
from millrace.policies.delta_codec import encode_piece
from millrace.policies.digest import digest_hex, tensor_digest
from millrace.policies.manifest import PolicyManifest, PolicyPlace, Probe, TensorEntry, whole_digest
from millrace.policies.publish import (
    Frame,
    PolicyContents,
    PublishedPolicy,
    commit_policy,
    publish_policy,
    upload_delta,
    upload_prefix,
)
from millrace.policies.tensors import TensorBytes
from millrace.storage.base import ObjectStore
from millrace_testing.inference import tiny

PROBE_TOKENS = tuple((79 * index + 13) % 256 for index in range(16))


def model(seed: int, **changes: Any) -> torch.nn.Module:
    """Return the tiny model of a seed.

    Its heads have 32 dimensions, the smallest that vLLM's attention on CPUs supports.
    """
    return tiny.tiny_model(seed, **{"head_dim": 32, **changes})


def nudged(base: torch.nn.Module, seed: int, share: float = 0.03, scale: float = 0.5) -> torch.nn.Module:
    """Return a copy with some weights of every tensor changed."""
    new = type(base)(base.config)
    new.load_state_dict(base.state_dict())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in dict(new.named_parameters()).values():
            chosen = torch.rand(weight.shape, generator=generator) < share
            weight[chosen] += scale * weight.abs().mean() * torch.randn(int(chosen.sum()), generator=generator)
    return new.eval().requires_grad_(False)


def logprobs(held: torch.nn.Module, prompt: Sequence[int], completion: Sequence[int]) -> np.ndarray:
    """Return the log-probs [T] of a completion by one HF forward pass."""
    return tiny.reference_logprobs(held, list(prompt), list(completion))


def kept_logprobs(
    old: torch.nn.Module, new: torch.nn.Module, prompt: Sequence[int], completion: Sequence[int], cut: int
) -> np.ndarray:
    """Return the log-probs of a completion that model `old` began: from token `cut` on, `new` continues with the KV
    cache of `old`.
    """
    tokens, seen = torch.tensor([[*prompt, *completion]]), len(prompt) + cut - 1
    with torch.inference_mode():
        past = old(input_ids=tokens[:, :seen], use_cache=True).past_key_values
        logits = new(input_ids=tokens[:, seen:], past_key_values=past).logits[0, :-1].float()
    return torch.log_softmax(logits, dim=-1).gather(-1, tokens[0, seen + 1 :, None]).squeeze(-1).numpy()


def probe(held: torch.nn.Module) -> Probe:
    """Return the trainer's probe of a model."""
    found = logprobs(held, PROBE_TOKENS[:1], PROBE_TOKENS[1:])
    return Probe(token_ids=PROBE_TOKENS, logprobs=tuple(map(float, found)))


def files(held: torch.nn.Module, directory: Path) -> Mapping[str, bytes]:
    """Return config.json and the tokenizer's files, by name."""
    directory.mkdir(parents=True, exist_ok=True)
    held.config.save_pretrained(directory)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    tiny.tiny_tokenizer().save_pretrained(directory)
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


class Publisher:
    """Publishes one run's versions."""

    def __init__(
        self,
        store: ObjectStore,
        scratch: Path,
        uid: str,
        *,
        tensors_of: Callable[[torch.nn.Module], Mapping[str, TensorBytes]] = tiny.tensors_of,
    ) -> None:
        self.store, self.uid = store, uid
        self._tensors_of = tensors_of
        self._scratch = scratch / uid
        self._tensors: dict[int, dict[str, TensorBytes]] = {}
        self._published: dict[int, PublishedPolicy] = {}

    def full(
        self, held: torch.nn.Module, version: int, *, probed: Probe | None = None, like: torch.nn.Module | None = None
    ) -> PolicyEntry:
        """Publish a whole model as a version; with `like`, with another model's config."""
        self._tensors[version] = tensors = _copies(self._tensors_of(held))
        published = publish_policy(
            self.store,
            PolicyPlace(prefix="test", uid=self.uid, lineage=0, version=version),
            PolicyContents(
                tensors=tensors.items(), files=files(like or held, self._scratch), probe=probed or probe(held)
            ),
            epoch=1,
        )
        return self._noted(version, published)

    def delta(
        self, held: torch.nn.Module, version: int, *, base: int, probed: Probe | None = None, spoil: str = ""
    ) -> PolicyEntry:
        """Publish the difference to version `base`.

        `spoil` is "object" to lose the data, "codec" to name an unknown codec.
        """
        self._tensors[version] = tensors = _copies(self._tensors_of(held))
        against = self._published[base].manifest
        frames = []
        for name, tensor in tensors.items():
            piece = encode_piece(self._tensors[base][name].bits(), tensor.bits())
            if piece is not None:
                frames.append(Frame(tensor=name, start=0, count=tensor.bits().size, data=piece.data))
        key = PolicyPlace(prefix="test", uid=self.uid, lineage=0, version=version).manifest_key
        data = upload_prefix(PolicyPlace(prefix="test", uid=self.uid, lineage=0, version=version), epoch=1)
        encoding = upload_delta(self.store, data, frames, against=base, against_digest=against.digest)
        if spoil == "codec":
            encoding = dataclasses.replace(encoding, codec="mystery")
        entries = tuple(
            TensorEntry(name=n, shape=t.shape, dtype=t.dtype, digest=digest_hex(tensor_digest(t)))
            for n, t in tensors.items()
        )
        manifest = PolicyManifest(
            key=key,
            lineage=0,
            version=version,
            anchor=against.anchor,
            tensors=entries,
            encodings=(encoding,),
            files=against.files,
            probe=probed or probe(held),
            run_uid=self.uid,
            digest=whole_digest(entries),
        )
        if spoil == "object":
            self.store.delete(encoding.objects[0].key)
        return self._noted(version, commit_policy(self.store, key, manifest))

    def _noted(self, version: int, published: PublishedPolicy) -> PolicyEntry:
        self._published[version] = published
        return PolicyEntry(
            lineage=0,
            version=version,
            manifest_key=published.manifest_key,
            manifest_sha256=published.manifest_sha256,
            digest=published.manifest.digest,
        )


def _copies(tensors: Mapping[str, TensorBytes]) -> dict[str, TensorBytes]:
    return {n: TensorBytes(dtype=t.dtype, shape=t.shape, data=memoryview(bytes(t.data))) for n, t in tensors.items()}
