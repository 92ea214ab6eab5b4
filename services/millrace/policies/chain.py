"""Which objects lead from a copy of one version to another: the cheapest chain of full and delta encodings.

Deltas lead from a version to one, four or sixteen later, and full encodings begin anew. From the version that is wanted
the search goes down the longest deltas that do not pass what is held, so it reads O(log n) manifests; it weighs that
chain against one from the anchor by bytes.
"""

from collections import OrderedDict
from collections.abc import Set
from dataclasses import dataclass, field

from millrace.errors import CorruptObjectError, MillraceError, NotFoundError
from millrace.policies.fetch import read_manifest
from millrace.policies.manifest import CODEC_DELTA, CODEC_FULL, Encoding, PolicyManifest
from millrace.storage.base import ObjectStore
from millrace.storage.commit_points import revision_key

MAX_LINKS = 300  # more than the largest anchor interval has versions
MAX_HELD_ENTRIES = 200_000  # pieces and tensors of the manifests that are held: some 40 MB
_MAX_PROBLEMS = 3  # named in an error


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One encoding to read: it gives the version of `manifest`, from its base or from nothing."""

    manifest: PolicyManifest
    encoding: Encoding

    @property
    def name(self) -> tuple[str, int | None]:
        """Name the link for good: the version's manifest and the base."""
        return self.manifest.key, self.encoding.base


Chain = tuple[Link, ...]


class Manifests:
    """The manifests that were read last, by key; only a damaged version's changes, by a successor.

    Successors are looked for while `is_wary`, with one more request for each manifest: at the start and where damage
    was met, until `relax`.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.is_wary = True
        self._held: OrderedDict[str, PolicyManifest] = OrderedDict()
        self._num_entries = 0

    def forget(self) -> None:
        """What was damaged may have been published anew: everything is read again."""
        self._held.clear()
        self._num_entries = 0
        self.is_wary = True

    def relax(self) -> None:
        """What was read so far is whole."""
        self.is_wary = False

    def read(self, key: str, sha256: bytes | None = None) -> PolicyManifest:
        """Read a manifest as `read_manifest` does; one whose hash is told is read anew."""
        manifest = None if sha256 else self._held.get(key)
        if manifest is None:
            manifest = read_manifest(self._store, key, sha256, is_newest=self.is_wary)
            if key in self._held:
                self._num_entries -= _num_entries(self._held[key])
            self._held[key] = manifest
            self._num_entries += _num_entries(manifest)
        self._held.move_to_end(key)
        while self._num_entries > MAX_HELD_ENTRIES and len(self._held) > 1:
            self._num_entries -= _num_entries(self._held.popitem(last=False)[1])
        return manifest


def find_chain(
    manifests: Manifests,
    target: PolicyManifest,
    *,
    held: PolicyManifest | None,
    avoid: Set[tuple[str, int | None]] = frozenset(),
) -> Chain:
    """The links to read, in order, to get from `held` (or from nothing) to `target`; () if that is held.

    `avoid` names links that were found to be damaged. CorruptObjectError saying what is in the way, if there is none.
    """
    if held is not None and _identity(held) == _identity(target):
        return ()
    search = _Search(manifests=manifests, avoid=avoid)
    direct = None
    if held is not None and held.lineage == target.lineage and held.version < target.version:
        direct = search.down(target, goal=held)
        if direct is not None and _cost(direct) <= target.full_bytes:
            return direct
    anchored = search.down(target, goal=None)
    found = [chain for chain in (direct, anchored) if chain is not None]
    if not found:
        raise search.error(target)
    return min(found, key=_cost)


def _num_entries(manifest: PolicyManifest) -> int:
    """What a manifest's memory grows with; a rank adds a piece per tensor and encoding."""
    return len(manifest.tensors) + sum(len(encoding.pieces) for encoding in manifest.encodings)


def _identity(manifest: PolicyManifest) -> tuple[str, str]:
    """Which weights a manifest is of; it may have been published anew."""
    return revision_key(manifest.key, 0), manifest.digest


def _cost(chain: Chain) -> int:
    return sum(link.encoding.size_bytes for link in chain)


@dataclass(slots=True, kw_only=True)
class _Search:
    manifests: Manifests
    avoid: Set[tuple[str, int | None]]
    problems: list[str] = field(default_factory=list)
    first_error: MillraceError | None = None

    def down(self, target: PolicyManifest, *, goal: PolicyManifest | None) -> Chain | None:
        """A chain from `goal`, or from a full encoding, to `target`."""
        path: list[Link] = []
        dead: set[int] = set()
        links = [iter(self._links(target, goal))]
        while links:
            link = next(links[-1], None)
            if link is None:  # every way from here was tried
                links.pop()
                if path:
                    dead.add(path.pop().encoding.base or 0)
                continue
            base = link.encoding.base
            if base is None:
                return (link, *reversed(path))
            if goal is not None and base == goal.version:
                if link.encoding.base_digest == goal.digest:
                    return (link, *reversed(path))
                self._note(f"{_name(link)} is against digest {link.encoding.base_digest}, held is {goal.digest}")
            elif base not in dead and len(path) < MAX_LINKS:
                below = self._base_of(link)
                if below is None:
                    dead.add(base)
                    continue
                path.append(link)
                links.append(iter(self._links(below, goal)))
        return None

    def _links(self, manifest: PolicyManifest, goal: PolicyManifest | None) -> list[Link]:
        """What may be read for a version, the best first; what is damaged or of an unknown codec is noted."""
        least = manifest.anchor if goal is None else goal.version
        deltas = [encoding for encoding in manifest.deltas if (encoding.base or 0) >= least]
        if goal is None:  # behind a damaged anchor there may be an older one
            deltas += [encoding for encoding in reversed(manifest.deltas) if encoding not in deltas]
            deltas = [encoding for encoding in manifest.encodings if encoding.codec == CODEC_FULL] + deltas
        for encoding in manifest.encodings:
            if encoding.codec not in (CODEC_FULL, CODEC_DELTA):
                self._note(
                    f"an encoding of {_version(manifest)} has the codec {encoding.codec!r}, which is unknown here"
                )
        links = [Link(manifest=manifest, encoding=encoding) for encoding in deltas]
        for link in links:
            if link.name in self.avoid:
                self._note(f"{_name(link)} is damaged")
        return [link for link in links if link.name not in self.avoid]

    def _base_of(self, link: Link) -> PolicyManifest | None:
        """The manifest that a delta is against; None, and a note, if it is missing, damaged or of other weights."""
        base = link.encoding.base or 0
        try:
            manifest = self.manifests.read(link.manifest.sibling_key(base))
        except (NotFoundError, CorruptObjectError) as error:
            self.first_error = self.first_error or error
            self._note(f"{_name(link)} needs version {base}: {error.message}")
            return None
        if manifest.digest != link.encoding.base_digest:
            self._note(
                f"{_name(link)} is against digest {link.encoding.base_digest}, version {base} has {manifest.digest}"
            )
            return None
        return manifest

    def error(self, target: PolicyManifest) -> MillraceError:
        """Why there is no chain."""
        unknown = {encoding.codec for encoding in target.encodings} - {CODEC_FULL, CODEC_DELTA}
        if unknown and not (target.full or target.deltas):
            return CorruptObjectError(
                f"policy {_version(target)} has only encodings of unknown codecs: {', '.join(sorted(unknown))} "
                f"(known: {CODEC_FULL}, {CODEC_DELTA})",
                reason="POLICY_CODEC_UNKNOWN",
                remedy="upgrade this service to the release that the trainer runs",
            )
        why = "; ".join(dict.fromkeys(self.problems[:_MAX_PROBLEMS])) or "it has no encoding"
        return CorruptObjectError(
            f"policy {_version(target)} cannot be put together: {why}",
            reason="POLICY_CHAIN_BROKEN",
            remedy="restore the missing objects from a replica of the bucket, or wait for the next anchor "
            "(trainer.policy.anchor_interval), which needs no earlier version",
        )

    def _note(self, problem: str) -> None:
        self.problems.append(problem)


def _version(manifest: PolicyManifest) -> str:
    return f"{manifest.lineage}-{manifest.version}"


def _name(link: Link) -> str:
    base = link.encoding.base
    what = "the full encoding" if base is None else f"the delta against version {base}"
    return f"{what} of {_version(link.manifest)}"
