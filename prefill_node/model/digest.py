"""The model digest: part of every chain root, so KV of other weights can never be taken for ours."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

_CACHE = "larder-digest.json"


def model_digest(folder: Path) -> bytes:
    """32 bytes: SHA-256 over the names and contents of config.json and the weight files, in name order.

    Remembered in the folder beside the sizes and modification times it was made from, where the folder is writable.

    Cost: the whole weights are read once; after that a stat for each file.
    """
    files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    seen = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    cache = folder / _CACHE
    with contextlib.suppress(OSError, ValueError, KeyError):
        known = json.loads(cache.read_text())
        if known["files"] == seen:
            return bytes.fromhex(known["digest"])
    total = hashlib.sha256(b"larder model v1")
    for file in files:
        with file.open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256").digest()
        name = file.name.encode()
        total.update(len(name).to_bytes(4, "little") + name + content)
    digest = total.digest()
    with contextlib.suppress(OSError):
        scratch = folder / f"{_CACHE}.{os.getpid()}"
        scratch.write_text(json.dumps({"files": seen, "digest": digest.hex()}))
        scratch.replace(cache)
    return digest
