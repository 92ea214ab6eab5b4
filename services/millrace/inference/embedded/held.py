"""The weights of the model that the embedded engine holds: checked, written and proved, whole policies and adapters.

Everything but `check` runs while nothing computes with the model. The weights are read back whole for each version;
those of an adapter's base were when it was loaded.
"""

import torch

from millrace.errors import InvalidStateError, UnavailableError
from millrace.inference.embedded import loader
from millrace.inference.embedded.adapters import Adapter, Adapters, Key
from millrace.inference.engine import HeldDigest, PolicyIdentity, PromptScores, probe_problem
from millrace.policies.manifest import StagedPolicy
from millrace.policies.proof import held_digest, mismatch


class HeldWeights:
    """Checks, writes and proves the weights of a model, and of the adapters on it.

    A model has either the adapter of the policy that it serves to requests that name none, or any number of adapters
    that requests name.
    """

    def __init__(self, model: torch.nn.Module, *, max_loras: int) -> None:
        """Take a model whose weights are whole; `apply` makes them unproved until `prove`.

        At most `max_loras` of the adapters that requests name generate at once.
        """
        self.adapters = Adapters(model, max_at_once=max_loras)
        """The adapters on the model."""
        self._model = model
        self._is_unproved = False
        self._digest = ""
        """Of the base, once it is proved."""

    @property
    def shared(self) -> tuple[PolicyIdentity, ...]:
        """Return the adapters that requests name."""
        return tuple(key for key in self.adapters.keys if key is not None)

    def check(self, staged: StagedPolicy) -> None:
        """Raise InvalidStateError if the staged policy or adapter does not fit the model; changes nothing."""
        # Names, shapes and dtypes never change while a model is held: this may run beside a forward pass.
        if staged.manifest.adapter is not None:
            self.adapters.check(staged)
        else:
            loader.check_tensors(self._model, staged.tensors)

    def check_shared(self, staged: StagedPolicy) -> None:
        """Raise InvalidStateError if the staged adapter cannot be one of many on this model; changes nothing."""
        self.adapters.check(staged, is_shared=True)
        entry = staged.manifest.adapter
        assert entry is not None, "it was checked"
        if self._digest and entry.base_digest != self._digest:  # "": a directory's model; the probe shows another one
            raise InvalidStateError(
                f"the adapter is on a base of digest {entry.base_digest}; this engine has {self._digest}",
                reason="ADAPTER_BASE_DIFFERS",
                remedy="serve it on a replica that has its base",
            )
        if None in self.adapters.keys:
            raise InvalidStateError(
                "the engine serves one adapter to all requests",
                reason="ADAPTER_NOT_SHARED",
                remedy="load the base alone before adapters that requests name",
            )

    def apply(self, staged: StagedPolicy) -> None:
        """Write a checked policy into the model; `prove` must follow.

        An adapter is put beside the base weights, for requests that name none. Of a whole policy only the changed
        elements are written, or all tensors if the changes are unknown or an adapter was loaded. All adapters that were
        there before are removed.
        """
        self._is_unproved = True
        had_own = None in self.adapters.keys
        for key in self.adapters.keys:
            self.adapters.remove(key)
        if staged.manifest.adapter is not None:
            self.adapters.put(None, Adapter.of(staged))
            return
        self._digest = ""
        if staged.changes is None or had_own:
            loader.copy_tensors(self._model, staged.tensors)
        else:
            loader.write_changes(self._model, staged.changes, names=staged.tensors)

    def score(self, token_ids: tuple[int, ...], adapter: Key = None) -> PromptScores:
        """Return log-prob and rank of each token of a prompt but the first, under the model's weights.

        `adapter` is the adapter that is added to them. Raises UnavailableError between `apply` and `prove`, when
        nothing may be answered, and for an adapter that the model does not have.
        """
        if self._is_unproved:
            raise UnavailableError("a policy is being put in", reason="POLICY_UNPROVED", remedy="retry")
        self.require(adapter)
        self.adapters.select([adapter])
        return loader.score_prompt(self._model, token_ids)

    def prove(self, staged: StagedPolicy) -> HeldDigest:
        """Compare the weights in memory with the staged policy's manifest and return their digest, with how it was
        proved.

        Compared are the digest, and the log-probs of the manifest's probe if it has one. Raises InternalError that
        names the difference.
        """
        held = self._proved(staged, None)
        if staged.manifest.adapter is None:
            self._digest = held.digest
        self._is_unproved = False
        return held

    def add(self, identity: PolicyIdentity, adapter: Adapter, staged: StagedPolicy) -> HeldDigest:
        """Put an adapter, the copy of the checked `staged`, beside the others, prove it, and return its digest.

        Raises InternalError, as `prove` does, and UnavailableError while the base is unproved; the model is then
        without the adapter.
        """
        self.check_shared(staged)  # once more: another policy may be in since
        if self._is_unproved:
            raise UnavailableError("a policy is being put in", reason="POLICY_UNPROVED", remedy="retry")
        self.adapters.put(identity, adapter)
        try:
            return self._proved(staged, identity)
        except BaseException:  # takes it out, then raises
            self.adapters.remove(identity)
            raise

    def require(self, adapter: Key) -> None:
        """Raise UnavailableError unless the model has that adapter; None, which requests without one have, passes."""
        if adapter is not None and adapter not in self.adapters.keys:
            raise UnavailableError(
                f"the engine does not have the adapter {adapter}", reason="ADAPTER_NOT_LOADED", remedy="retry"
            )

    def _proved(self, staged: StagedPolicy, key: Key) -> HeldDigest:
        """Return the digest of the staged policy, read back from the model, or raise InternalError; `key` is its
        adapter's, if it is one.
        """
        is_adapter, probe = staged.manifest.adapter is not None, staged.manifest.probe
        held = self.adapters.held(key) if is_adapter else loader.held_tensors(self._model, staged.tensors)
        found, problem = held_digest(held), None
        if found != staged.manifest.digest:
            problem = f"the engine holds digest {found}, not {staged.manifest.digest}"
        elif probe is not None:
            self.adapters.select([key])
            logprobs = loader.score_prompt(self._model, probe.token_ids).logprobs.tolist()
            dtype = str(loader.float_dtype(staged.tensors)).removeprefix("torch.")
            problem = probe_problem(probe.logprobs, logprobs, dtypes=[dtype])
        if problem is not None:
            raise mismatch(problem)
        return HeldDigest(digest=found, proof="readback" if probe is None else "readback+probe")
