"""Processes: start one in a session of its own, fork one, have it die with its parent, describe its end, end its group.

What prevents that a process outlives its parent, in this order: the parent ends it (`supervisor`, `sessions`); a killed
parent is noticed by its reaper (`reaper`); both killed, by the child itself (`lifeline`) or by the kernel
(`sessions.die_with_parent`).
"""
