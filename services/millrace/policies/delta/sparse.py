"""Sparse frames: gaps between changed positions, signs of steps of one unit in the last place, absolute exceptions.

Sections, in this order: the byte planes of the gaps, the signs (one bit for each change that is no exception, the first
in the highest bit; set: up), the gaps between the exceptions' numbers among the changes, the byte planes of the
exceptions' new bits.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from millrace.policies.change import TensorChange
from millrace.policies.delta.codings import Bits, corrupt, decode_gaps, encode_gaps, from_planes, to_planes, ulp_map
from millrace.policies.delta.frame import PieceHeader, Section, compress_section
from millrace.policies.digest import change_digest

_EXCEPTION_GAP_WIDTH = 1


@dataclass(slots=True)
class SparseEncoder:
    """Adds up the changes of one piece; `digest` is that of the base at first, and that of the result at last."""

    gap_width: int
    start: int
    digest: int
    num_changed: int = 0
    num_exceptions: int = 0
    _last: int = -1
    _gaps: list[Bits] = field(default_factory=list)
    _signs: list[NDArray[np.bool_]] = field(default_factory=list)
    _exceptions: list[NDArray[np.int64]] = field(default_factory=list)
    _values: list[Bits] = field(default_factory=list)

    def add(self, positions: NDArray[np.int64], old: Bits, new: Bits) -> None:
        """Add the next changed elements (at least one); `positions` count from the piece's start."""
        self._gaps.append(encode_gaps(positions, previous=self._last, width=self.gap_width))
        step = ulp_map(new)
        step -= ulp_map(old)
        up = step == 1
        single = up | (step == np.iinfo(step.dtype).max)
        self._signs.append(up[single])
        others = np.flatnonzero(~single)
        self._values.append(new[others])
        self._exceptions.append(others + self.num_changed)
        self.digest = change_digest(self.digest, TensorChange(bits=new, positions=positions + self.start), old)
        self.num_changed += positions.size
        self.num_exceptions += others.size
        self._last = int(positions[-1])

    def sections(self) -> list[Section]:
        """The streams; call it once, after at least one change."""
        exceptions = np.concatenate(self._exceptions)
        planes = [
            *to_planes(np.concatenate(self._gaps)),
            np.packbits(np.concatenate(self._signs)),
            *to_planes(encode_gaps(exceptions, previous=-1, width=_EXCEPTION_GAP_WIDTH)),
            *to_planes(np.concatenate(self._values)),
        ]
        return [compress_section(plane) for plane in planes]


def decode_sparse(header: PieceHeader, sections: list[Section], current: Bits) -> tuple[NDArray[np.int64], Bits, Bits]:
    """The changed positions, counted from the piece's start, and the bits there, before and after."""
    if header.gap_width == 0 or len(sections) != header.gap_width + 1 + _EXCEPTION_GAP_WIDTH + header.width:
        raise corrupt(f"a sparse frame of gap width {header.gap_width} has {len(sections)} sections")
    gaps, rest = sections[: header.gap_width], sections[header.gap_width :]
    positions = _expand_gaps(gaps, num_positions=header.num_changed, limit=header.count, what="gaps")
    exceptions = _expand_gaps(
        rest[1:2], num_positions=header.num_exceptions, limit=header.num_changed, what="exceptions"
    )
    num_signs = header.num_changed - header.num_exceptions
    packed = rest[0].expand(raw_bytes=-(-num_signs // 8), what="signs")
    up = np.unpackbits(packed, count=num_signs).view(np.bool_)
    values = from_planes([plane.expand(raw_bytes=header.num_exceptions, what="values") for plane in rest[2:]])

    single = np.ones(header.num_changed, np.bool_)
    single[exceptions] = False
    steps = np.zeros(header.num_changed, current.dtype)
    steps[single] = up
    steps *= 2
    steps -= 1  # modulo 2**bits; what stands at the exceptions is overwritten
    old = current[positions]
    steps += ulp_map(old)
    new = ulp_map(steps)
    new[exceptions] = values
    return positions, old, new


def _expand_gaps(sections: list[Section], *, num_positions: int, limit: int, what: str) -> NDArray[np.int64]:
    """Positions from the byte planes of their gaps, whose number is bounded before anything is expanded."""
    units = sections[0].raw_bytes
    most = num_positions + limit // ((1 << (8 * len(sections))) - 1)
    if units > most:
        raise corrupt(f"its {what} have {units} units, more than {most}")
    planes = [section.expand(raw_bytes=units, what=what) for section in sections]
    return decode_gaps(from_planes(planes), num_positions=num_positions, limit=limit, what=what)
