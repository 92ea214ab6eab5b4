"""Object store: one synchronous protocol, for a local directory and for any S3-compatible server."""

from millrace.storage.base import ObjectInfo, ObjectStore
from millrace.storage.opening import open_store

__all__ = ["ObjectInfo", "ObjectStore", "open_store"]
