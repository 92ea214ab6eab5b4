"""Interpreters that environments bring with them: which may be used, what they lack, how a worker goes over to one."""
