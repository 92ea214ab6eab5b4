"""Tokenizer files of policies, downloaded once per manifest for environments that tokenize on the client side."""

import asyncio
import hashlib
import tempfile
from collections import OrderedDict
from contextlib import ExitStack
from pathlib import Path

from millrace.policies.host_copy import pull_files, read_manifest
from millrace.policies.manifest import PolicyManifest
from millrace.storage.base import ObjectStore
from millrace.storage.clean_up import TEMPORARY, remove
from millrace.storage.scratch import owned_directory

# A manifest's tokenizer is a few MiB and versions of one run share it by content; old ones go.
_MAX_DIRECTORIES = 8


class TokenizerFiles:
    """A cache of directories. Manifests with equal files share one, so a new policy version needs no new download."""

    def __init__(self, store: ObjectStore, *, parent: Path | None = None) -> None:
        """Make a directory for the files, which are downloaded from `store`.

        The directory is below `parent`, where every user can read known files in it; without `parent` it is among this
        user's scratch files.
        """
        self._store = store
        self._owned = ExitStack()
        self._root = self._owned.enter_context(owned_directory("tokenizers", parent=parent))
        if parent is not None:
            self._root.chmod(0o711)
        self._by_manifest: OrderedDict[str, Path] = OrderedDict()
        self._lock = asyncio.Lock()

    async def directory(self, manifest_key: str) -> str:
        """Return the directory with the tokenizer files of a policy's manifest, downloaded if necessary; "" for the key
        "".

        Raises the store's errors.
        """
        if not manifest_key:
            return ""
        async with self._lock:
            if manifest_key not in self._by_manifest:
                self._by_manifest[manifest_key] = await asyncio.to_thread(self._download, manifest_key)
                while len(self._by_manifest) > _MAX_DIRECTORIES:
                    self._by_manifest.popitem(last=False)
            self._by_manifest.move_to_end(manifest_key)
            return str(self._by_manifest[manifest_key])

    def _download(self, manifest_key: str) -> Path:
        """Return the directory with the manifest's files, downloaded unless equal files are there already (blocking).

        The directory is named by the files' digest, and appears whole by a rename.
        """
        manifest = read_manifest(self._store, manifest_key)
        whole = hashlib.sha256()
        for entry in sorted(manifest.files, key=lambda entry: entry.name):
            whole.update(f"{entry.name}:{entry.sha256}\n".encode())
        target = self._root / whole.hexdigest()[:16]
        if target.is_dir():
            return target
        partial = Path(tempfile.mkdtemp(dir=self._root))
        try:
            self._fill(partial, manifest)
            partial.rename(target)
        except OSError:
            if not target.is_dir():  # else another thread was faster, whose caller was cancelled and let the lock go
                raise
        finally:
            remove(partial, what=TEMPORARY)
        return target

    def _fill(self, directory: Path, manifest: PolicyManifest) -> None:
        """Download the manifest's files into the directory, readable by every user."""
        for name, data in pull_files(self._store, manifest).items():
            path = directory / name  # the manifest's reader has checked the name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            path.chmod(0o644)
            for parent in path.relative_to(directory).parents[:-1]:
                (directory / parent).chmod(0o755)
        directory.chmod(0o755)  # the directory above decides whether workers of another user get here

    def close(self) -> None:
        """Delete all downloaded files."""
        self._owned.close()
