"""Numbers and times as people read them."""

from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"


def count(value: float) -> str:
    """A count in three digits: 950, 14.2k, 3.1M."""
    for limit, divisor, unit in ((1e3, 1.0, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M")):
        if abs(value) < limit:
            return f"{value / divisor:.0f}" if not unit else f"{value / divisor:.1f}{unit}"
    return f"{value / 1e9:.1f}G"


def size(num_bytes: float) -> str:
    """A size in bytes: 512 B, 1.4 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def duration(seconds: float) -> str:
    """A duration: 43s, 2m 05s, 1h 12m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def sparkline(values: Sequence[float], *, width: int = 24) -> str:
    """The last `width` values as bars between their own minimum and maximum; empty for no values."""
    shown = list(values)[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    span = (high - low) or 1.0
    return "".join(_BARS[round((value - low) / span * (len(_BARS) - 1))] for value in shown)


def table(rows: Sequence[Sequence[str]], *, header: Sequence[str]) -> str:
    """Left-aligned columns with a header line, without trailing blanks."""
    everything = [list(header), *map(list, rows)]
    widths = [max(len(row[column]) for row in everything) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in everything
    )
