"""Object store: one synchronous protocol, a local directory and any S3-compatible server behind it."""

from millrace.storage.base import ObjectInfo, ObjectStore
from millrace.storage.opening import open_store

__all__ = ["ObjectInfo", "ObjectStore", "open_store"]
