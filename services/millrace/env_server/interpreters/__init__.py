"""Interpreters that environments bring with them: which are allowed, what they lack, how a worker switches to one."""
