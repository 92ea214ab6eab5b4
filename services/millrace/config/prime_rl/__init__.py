"""Keys of prime-rl's three schemas (split files of 2025, one file of early 2026, `orchestrator.train` of late 2026).

`keys` says what each key means here; `translation` applies that to one layer of a config before it is laid over the
others, so that files, flags and variables are understood alike.
"""

from millrace.config.prime_rl.translation import translate

__all__ = ["translate"]
