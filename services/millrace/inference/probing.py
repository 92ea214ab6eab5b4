"""The probe of a policy: the trainer's log-probs on a fixed prompt against those of an engine.

The digest proves bits; the probe proves that the engine computes with them. It is the only proof for layouts that do
not give the published bits back. It compares means over the prompt, because single tokens of low probability differ
most: `mean |found - expected| <= mean (ABSOLUTE + RELATIVE * |expected|)`.

The tolerances follow the coarsest number format on the way. Measured against an HF forward pass (fp32 master weights in
the trainer): fp32 engine mean 4e-7, bf16-rounded weights mean 6e-3, bf16 arithmetic mean 1e-2 at log-probs around -4. A
logit of size L carries an error of a few L * 2**-8 in bf16, hence the relative part; the absolute part is five to a
hundred times the measured mean. A policy with one layer of another version differs by 1e-2 and more in fp32 at RL's
usual steps; in bf16 only the digest sees that little.
"""

from collections.abc import Sequence

import numpy as np

_TOLERANCES = {"float32": (1e-4, 1e-5), "float16": (1e-2, 2e-3), "bfloat16": (5e-2, 1.6e-2)}


def probe_problem(expected: Sequence[float], found: Sequence[float], *, dtypes: Sequence[str]) -> str | None:
    """What is wrong with log-probs [T] of an engine against the trainer's; None if nothing is.

    `dtypes` are the names of the number formats on the way (published, computed); the coarsest one decides.
    """
    absolute, relative = max(_TOLERANCES.get(dtype, _TOLERANCES["bfloat16"]) for dtype in dtypes)
    want, have = np.asarray(expected, np.float64), np.asarray(found, np.float64)
    if want.shape != have.shape:
        return f"the engine gave {have.size} log-probs on the probe's prompt, the manifest has {want.size}"
    if not np.isfinite(have).all():
        return "the engine's log-probs on the probe's prompt are not finite"
    gap, limit = float(np.abs(have - want).mean()), float((absolute + relative * np.abs(want)).mean())
    if gap <= limit:
        return None
    return f"the engine's log-probs on the probe's prompt differ from the trainer's by {gap:.2g} in the mean"
