"""The process from which workers are forked, see `forkserver`: a fork server that dies with the env-server."""

from millrace.processes import fork_server
from millrace.processes.parent_death import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    fork_server.main()
