"""The stable name of a worker's place: a process that registers there is the successor of the one before."""

import socket


def worker_slot(place: str) -> str:
    """`host7/127.0.0.1:50052`: this host, and what one process at a time can have there, such as a port or directory.

    Servers give the address under which others reach them, so containers with one host name do not collide. An empty
    place gives no slot: then a successor is another worker, and its predecessor is missed only when its lease ends.
    """
    is_none = not place or place.endswith(":0")  # port 0 is whatever was free: nobody's place
    return "" if is_none else f"{socket.gethostname()}/{place}"
