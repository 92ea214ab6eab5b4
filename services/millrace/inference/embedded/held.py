"""The weights of the model that the embedded engine holds: checked, written and proved, whole policies and adapters.

Everything but `check`, `prepare` and `close` runs where nothing computes with the model. What is proved when stands in
`readback.py`; an adapter is read back whole every time, the base under it when it is loaded.
"""

from collections.abc import Callable

import torch

from millrace.errors import InternalError
from millrace.inference.embedded import weights
from millrace.inference.embedded.lora import Adapters
from millrace.inference.engine import HeldDigest
from millrace.inference.probing import probe_problem
from millrace.inference.readback import Readback
from millrace.policies.staged import StagedPolicy


class HeldWeights:
    """A model and the adapter on it, if there is one. `report` is told of damage, in a thread of its own."""

    def __init__(self, model: torch.nn.Module, *, report: Callable[[str], None]) -> None:
        self._model = model
        self._adapters = Adapters(model)
        self._readback = Readback(weights.held_bits(model), report=report)

    def check(self, staged: StagedPolicy) -> None:
        """Raise InvalidStateError if the policy does not fit the model; changes nothing."""
        # Names, shapes and dtypes never change while a model is held: this may run beside a forward pass.
        if staged.manifest.adapter is not None:
            self._adapters.check(staged)
        else:
            weights.check_tensors(self._model, staged.tensors)

    def prepare(self, staged: StagedPolicy) -> None:
        """Does what makes `apply` and `prove` of a checked policy short; reads only, beside a forward pass."""
        if staged.manifest.adapter is None and not self._adapters.is_loaded:
            self._readback.prepare(staged)

    def apply(self, staged: StagedPolicy) -> None:
        """Write a checked policy; an adapter goes beside the base weights, a whole policy takes it away."""
        if staged.manifest.adapter is not None:
            self._readback.write_unproved(lambda: self._adapters.load(staged))
        elif staged.changes is None or self._adapters.is_loaded:
            self._readback.write_unproved(lambda: self._write_whole(staged))
        else:
            changes = staged.changes
            self._readback.write_changes(staged, lambda: weights.write_changes(self._model, changes))

    def prove(self, staged: StagedPolicy) -> HeldDigest:
        """Read back, and compute the probe if the manifest has one; InternalError says what differs."""
        is_adapter, probe = staged.manifest.adapter is not None, staged.manifest.probe
        found = self._adapters.read_digest() if is_adapter else self._readback.prove(staged)
        problem = None
        if found != staged.manifest.digest:
            problem = f"the engine holds digest {found}, not {staged.manifest.digest}"
        elif probe is not None:
            logprobs = weights.prompt_logprobs(self._model, probe.token_ids)
            dtype = str(weights.float_dtype(staged.tensors)).removeprefix("torch.")
            problem = probe_problem(probe.logprobs, logprobs, dtypes=[dtype])
        if problem is not None:
            raise InternalError(problem, reason="POLICY_READBACK_MISMATCH", remedy="the policy is loaded anew")
        return HeldDigest(digest=found, proof="readback" if probe is None else "readback+probe")

    def close(self) -> None:
        """End what reads beside the serving."""
        self._readback.close()

    def _write_whole(self, staged: StagedPolicy) -> None:
        self._adapters.unload()
        weights.copy_tensors(self._model, staged.tensors)
