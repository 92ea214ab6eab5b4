"""Why a run does not move: who waits for whom."""
