from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class PolicyEntry(_message.Message):
    __slots__ = ("lineage", "version", "manifest_key", "manifest_sha256", "digest")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_KEY_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_SHA256_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    lineage: int
    version: int
    manifest_key: str
    manifest_sha256: bytes
    digest: str
    def __init__(self, lineage: _Optional[int] = ..., version: _Optional[int] = ..., manifest_key: _Optional[str] = ..., manifest_sha256: _Optional[bytes] = ..., digest: _Optional[str] = ...) -> None: ...
