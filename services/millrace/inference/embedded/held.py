"""The weights of the model that the embedded engine holds: checked, written and proved, whole policies and adapters.

Everything but `check` runs where nothing computes with the model. What is held is read back whole for each version; of
an adapter's base that was done when it was loaded.
"""

import torch

from millrace.errors import UnavailableError
from millrace.inference.embedded import weights
from millrace.inference.embedded.lora import Adapters
from millrace.inference.embedded.scoring import score_prompt
from millrace.inference.engine import HeldDigest, PromptScores
from millrace.inference.probing import probe_problem
from millrace.policies.proof import held_digest, mismatch
from millrace.policies.staged import StagedPolicy


class HeldWeights:
    """A model and the adapter on it, if there is one."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._adapters = Adapters(model)
        self._is_unproved = False

    def check(self, staged: StagedPolicy) -> None:
        """Raise InvalidStateError if the policy does not fit the model; changes nothing."""
        # Names, shapes and dtypes never change while a model is held: this may run beside a forward pass.
        if staged.manifest.adapter is not None:
            self._adapters.check(staged)
        else:
            weights.check_tensors(self._model, staged.tensors)

    def apply(self, staged: StagedPolicy) -> None:
        """Write a checked policy; an adapter goes beside the base weights, a whole policy takes it away."""
        self._is_unproved = True
        if staged.manifest.adapter is not None:
            self._adapters.load(staged)
        elif staged.changes is None or self._adapters.is_loaded:
            self._adapters.unload()
            weights.copy_tensors(self._model, staged.tensors)
        else:
            weights.write_changes(self._model, staged.changes, names=staged.tensors)

    def score(self, token_ids: tuple[int, ...]) -> PromptScores:
        """The scores of a prompt; UnavailableError between `apply` and `prove`, when nothing may be answered."""
        if self._is_unproved:
            raise UnavailableError("a policy is being put in", reason="POLICY_UNPROVED", remedy="retry")
        return score_prompt(self._model, token_ids)

    def prove(self, staged: StagedPolicy) -> HeldDigest:
        """Read back, and compute the probe if the manifest has one; InternalError says what differs."""
        is_adapter, probe = staged.manifest.adapter is not None, staged.manifest.probe
        held = self._adapters.held() if is_adapter else weights.held_tensors(self._model, staged.tensors)
        found, problem = held_digest(held), None
        if found != staged.manifest.digest:
            problem = f"the engine holds digest {found}, not {staged.manifest.digest}"
        elif probe is not None:
            logprobs = score_prompt(self._model, probe.token_ids).logprobs.tolist()
            dtype = str(weights.float_dtype(staged.tensors)).removeprefix("torch.")
            problem = probe_problem(probe.logprobs, logprobs, dtypes=[dtype])
        if problem is not None:
            raise mismatch(problem)
        self._is_unproved = False
        return HeldDigest(digest=found, proof="readback" if probe is None else "readback+probe")
