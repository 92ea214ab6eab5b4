"""Format numbers, times and untrusted text for people."""

import math
import statistics
import unicodedata
from collections.abc import Callable, Sequence

_BARS = "▁▂▃▄▅▆▇█"
_LONGEST = 600


def count(value: float) -> str:
    """Return a count in about three digits, such as 950, 14.2k, 3.1M."""
    for limit, divisor, unit in ((1e3, 1.0, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M")):
        if abs(value) < limit:
            return f"{value / divisor:.0f}" if not unit else f"{value / divisor:.1f}{unit}"
    return f"{value / 1e9:.1f}G"


def size(num_bytes: float) -> str:
    """Return a number of bytes as text, such as 512 B, 1.4 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def duration(seconds: float) -> str:
    """Return seconds as text, such as 43s, 2m 05s, 1h 12m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def sparkline(values: Sequence[float], *, width: int = 24) -> str:
    """Return the last `width` values as bars, scaled between their minimum and maximum; empty without values."""
    shown = list(values)[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    span = (high - low) or 1.0
    return "".join(_BARS[round((value - low) / span * (len(_BARS) - 1))] for value in shown)


def curve(values: Sequence[float], *, width: int, low: float, high: float) -> str:
    """Return all values as at most `width` bars between `low` and `high`.

    If there are more values, each bar is the mean of several; `!` is a bar that is not finite.
    """
    # `//` spreads the rest evenly: shares differ by one value at most.
    shares = [values[at * len(values) // width : (at + 1) * len(values) // width] for at in range(width)]
    means = [statistics.fmean(share) for share in (shares if len(values) > width else ([each] for each in values))]
    span = (high - low) or 1.0
    return "".join(
        _BARS[round((mean - low) / span * (len(_BARS) - 1))] if math.isfinite(mean) else "!" for mean in means
    )


def table(
    rows: Sequence[Sequence[str]], *, header: Sequence[str], paint: Callable[[str, str, str], str] | None = None
) -> str:
    """Return rows as left-aligned columns with a header, without trailing blanks.

    `paint` colours a cell: it gets the column's name, the cell, and the padded cell.
    """
    everything = [list(header), *map(list, rows)]
    widths = [max(len(row[column]) for row in everything) for column in range(len(header))]
    lines = []
    for number, row in enumerate(everything):
        wide = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        wide[-1] = wide[-1].rstrip()
        if paint is not None and number:
            wide = [paint(*each) for each in zip(header, row, wide, strict=True)]
        lines.append("  ".join(wide).rstrip())
    return "\n".join(lines)


def shortened(text: str) -> str:
    """Return the text on one line. Of a long text only the beginning and the end are kept, at most 600 characters."""
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST * 2 // 3]} … {line[-_LONGEST // 3 + 3 :]}"


def printable(text: str) -> str:
    """Return the text with each control or unprintable character replaced by a visible sign; line breaks are kept."""
    return "".join(char if char == "\n" or not _is_control(char) else _sign(char) for char in text)


def _is_control(char: str) -> bool:
    """Return whether a character would control a terminal, or is not printable."""
    return unicodedata.category(char)[0] == "C" or char in "\u2028\u2029"


def _sign(char: str) -> str:
    """Return a visible sign for a control character: its picture, or its code."""
    code = ord(char)
    if code < 0x20:
        return chr(0x2400 + code)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
