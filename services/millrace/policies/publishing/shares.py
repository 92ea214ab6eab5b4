"""What the ranks of a trainer tell each other of one version: plain data, never weights."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from millrace.errors import InternalError
from millrace.policies.digest import add_digests, digest_hex
from millrace.policies.manifest import Encoding, TensorEntry
from millrace.policies.publishing.parts import TensorPart


def pack_digests(parts: Sequence[TensorPart], digests: Mapping[str, int]) -> list[Any]:
    """A rank's parts and their digests."""
    return [[part.name, part.dtype, part.shape, part.count, digest_hex(digests[part.name])] for part in parts]


def merge_digests(shares: Iterable[list[Any]]) -> tuple[TensorEntry, ...]:
    """The tensors of the version, in the order of the first rank that has each: digests are sums over the ranks'."""
    found: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    for share in shares:
        for name, dtype, shape, count, digest in share:
            _, _, held, so_far = found.get(name, (dtype, tuple(shape), 0, 0))
            found[name] = dtype, tuple(shape), held + count, add_digests([so_far, int(digest, 16)])
    entries: list[TensorEntry] = []
    for name, (dtype, shape, held, digest) in found.items():
        entry = TensorEntry(name=name, shape=shape, dtype=dtype, digest=digest_hex(digest))
        if held != entry.num_elements:
            raise InternalError(
                f"the ranks hold {held} elements of tensor {name}, which has {entry.num_elements}",
                reason="SHARD_LAYOUT_UNKNOWN",
                remedy="this is a defect of Millrace; train with one rank until it is mended",
            )
        entries.append(entry)
    return tuple(entries)


def pack_encodings(encodings: Sequence[Encoding]) -> dict[str, Any]:
    """A rank's share of every encoding."""
    names = sorted({piece.tensor for encoding in encodings for piece in encoding.pieces})
    places = {name: place for place, name in enumerate(names)}
    return {"names": names, "encodings": [encoding.to_json(places) for encoding in encodings]}


def merge_encodings(shares: Iterable[Mapping[str, Any]]) -> tuple[Encoding, ...]:
    """The encodings of the version: those of the ranks, which have the same ones in the same order, put together."""
    merged: list[Encoding] = []
    for share in shares:
        names = tuple(share["names"])
        for place, item in enumerate(share["encodings"]):
            encoding = Encoding.from_json(item, names)
            if place == len(merged):
                merged.append(encoding)
                continue
            so_far = merged[place]
            merged[place] = replace(
                so_far, objects=so_far.objects + encoding.objects, pieces=so_far.pieces + encoding.pieces
            )
    return tuple(merged)
