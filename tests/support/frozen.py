"""What is frozen: files that never change again, held by one digest of them all."""

import hashlib
from pathlib import Path


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all files in a folder, at any depth."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def digest_of_all(folder: Path) -> str:
    """Return the SHA-256 of the names and the SHA-256s of all files in a folder."""
    lines = (
        f"{name} {hashlib.sha256(data).hexdigest()}\n"
        for name, data in sorted(contents(folder).items())
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()
