"""The copy of a run's log in Redis: the one guarded script, its checks, and what becomes of damage."""
