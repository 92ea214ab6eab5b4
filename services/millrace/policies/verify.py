"""Whether a version can be put together from what lies in the store, by whoever has nothing yet."""

from millrace.errors import CorruptObjectError, NotFoundError
from millrace.policies.chain import Manifests, find_chain
from millrace.policies.fetch import pull_files, read_manifest, read_objects, require_sizes
from millrace.storage.base import ObjectStore


def damage_of(store: ObjectStore, key: str, *, digest: str, sha256: bytes = b"") -> str | None:
    """What keeps the version whose manifest is `key` from being read; None if every byte is as it was written.

    `digest` and `sha256` (of the manifest's bytes) are those that were announced; empty ones are not compared.
    Reads every object of the cheapest chain that leads to the version (blocking), and holds little of it.
    """
    try:
        manifest = read_manifest(store, key, sha256)
        if digest and manifest.digest != digest:
            return f"policy manifest {store.uri(manifest.key)} has digest {manifest.digest}, announced was {digest}"
        pull_files(store, manifest)
        for link in find_chain(Manifests(store), manifest, held=None):
            require_sizes(store, link.encoding.objects)
            read_objects(store, link.encoding.objects, lambda entry, offset, data: None)
    except (CorruptObjectError, NotFoundError) as error:
        return error.message
    return None
