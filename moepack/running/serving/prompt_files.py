"""States of texts on disk: each is a file that llama.cpp's server wrote, with a trailer of ours.

The file begins with the text's tokens and its state (`llama_state_seq_save_file`, server-common.cpp
and server-context.cpp of b11549). The trailer, which llama.cpp does not read, has the key of the
model and its settings, the length, and a digest of everything before it. Files are never changed
and have names of their own, so that several servers share the folder.
"""

import contextlib
import os
import secrets
import struct
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from moepack.common import digest
from moepack.storage.folders import user_folder

_SUFFIX, _PARTIAL = ".state", ".partial"
_MAGIC = b"moepack1"
_TRAILER = struct.Struct("<8s32sQ")
_DIGEST = struct.Struct("<Q")
_HEAD = struct.Struct("<4sIIiII")
"""llama.cpp's magic number and version, a number of words, and in these a mark, another version,
and the number of tokens, which follow."""
_MARK = -1
_TOKEN_LENGTH = 4
_PIECE_LENGTH = 1 << 20
_MOST_SECONDS = 30 * 24 * 3600
"""After its last use a state is removed."""
_SECONDS_OF_WRITING = 600
"""After its last change an unfinished file is one that nobody writes any more."""


class PromptFile(NamedTuple):
    """A state at `path`, by its tokens of 4 bytes."""

    path: Path
    tokens: bytes


def common_count(one: bytes, other: bytes) -> int:
    """Return the number of tokens with which both begin."""
    low, high = 0, min(len(one), len(other)) // _TOKEN_LENGTH
    while low < high:
        middle = (low + high + 1) // 2
        part = slice(low * _TOKEN_LENGTH, middle * _TOKEN_LENGTH)
        low, high = (middle, high) if one[part] == other[part] else (low, middle - 1)
    return low


def pack_tokens(tokens: list[int]) -> bytes:
    """Return tokens as they are in files."""
    return array("i", tokens).tobytes()


def token_count(tokens: bytes) -> int:
    """Return the number of tokens."""
    return len(tokens) // _TOKEN_LENGTH


def prompts_folder() -> Path | None:
    """Return the private folder of all models' states in the user's cache; None without one."""
    cache = user_folder("XDG_CACHE_HOME", ".cache")
    return None if cache is None else _private(cache / "prompts")


def model_folder(model: str) -> Path | None:
    """Return the private folder for the states of a model by its id; None without one."""
    folder = prompts_folder()
    return None if folder is None else _private(folder / model)


def _private(folder: Path) -> Path | None:
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        is_private = status.st_uid == os.geteuid() and status.st_mode & 0o077 == 0
        return folder if is_private and not folder.is_symlink() else None
    except OSError:
        return None


def stored_prompts() -> dict[Path, int]:
    """Return the bytes of the states of all models, by their folders."""
    lengths: Counter[Path] = Counter()
    for path, status in _files(prompts_folder()):
        lengths[path.parent] += status.st_size
    return lengths


def remove_prompts(folder: Path) -> None:
    """Remove the states in a model's folder."""
    for path, _ in list(_files(prompts_folder())):
        if path.parent == folder:
            with contextlib.suppress(OSError):
                path.unlink()


def _files(folder: Path | None) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the files of all models, unfinished ones too."""
    if folder is None:
        return
    for suffix in (_SUFFIX, _PARTIAL):
        for path in folder.glob(f"*/*{suffix}"):
            with contextlib.suppress(OSError):  # removed meanwhile
                yield path, path.lstat()


class PromptFiles:
    """The states in a model's `folder` whose key is `key`, of 32 bytes.

    With those of other models they take `limit` bytes at most, and the longest unused go first.
    """

    def __init__(self, folder: Path, key: bytes, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self._key, self._prefix = key, key.hex()[:8]
        self._files: dict[str, PromptFile] = {}
        self.prune()

    def best(self, tokens: bytes) -> tuple[PromptFile | None, int]:
        """Return the state with the longest common beginning, the shortest of these; its tokens."""
        self._scan()
        best: PromptFile | None = None
        count = 0
        for file in sorted(self._files.values(), key=lambda file: len(file.tokens)):
            if (common := common_count(file.tokens, tokens)) > count:
                best, count = file, common
        return best, count

    def latest(self) -> PromptFile | None:
        """Return the state that was used last."""
        self._scan()
        times: list[tuple[float, str]] = []
        for name, file in self._files.items():
            with contextlib.suppress(OSError):
                times.append((file.path.stat().st_mtime, name))
        return self._files[max(times)[1]] if times else None

    def _scan(self) -> None:
        """Read the heads of new files, and forget those that are gone."""
        names = {
            name
            for name in os.listdir(self.folder)
            if name.startswith(self._prefix) and name.endswith(_SUFFIX)
        }
        for name in self._files.keys() - names:
            del self._files[name]
        for name in names - self._files.keys():
            path = self.folder / name
            with contextlib.suppress(OSError):
                tokens = self._read_tokens(path)
                if tokens is None:
                    path.unlink()
                else:
                    self._files[name] = PromptFile(path, tokens)

    def _read_tokens(self, path: Path) -> bytes | None:
        """Return a file's tokens, without a look at its state; None if it is no state of ours."""
        with open(path, "rb") as file:
            length = os.fstat(file.fileno()).st_size - _TRAILER.size - _DIGEST.size
            head = file.read(_HEAD.size)
            if length < _HEAD.size:
                return None
            _, _, word_count, mark, _, count = _HEAD.unpack(head)
            is_sound = mark == _MARK and count < word_count <= length // _TOKEN_LENGTH
            if not is_sound:
                return None
            tokens = file.read(count * _TOKEN_LENGTH)
            file.seek(length)
            return tokens if file.read(_TRAILER.size) == self._trailer(length) else None

    def _trailer(self, length: int) -> bytes:
        return _TRAILER.pack(_MAGIC, self._key, length)

    def is_whole(self, file: PromptFile) -> bool:
        """Return whether a file is as it was written, and note its use; else it is removed."""
        try:
            with open(file.path, "rb") as opened:
                length = os.fstat(opened.fileno()).st_size - _DIGEST.size
                is_whole = _digest(opened, length) == _DIGEST.unpack(opened.read())[0]
            if is_whole:
                os.utime(file.path)
                return True
            self.remove(file)
        except (OSError, struct.error):
            self._files.pop(file.path.name, None)
        return False

    def remove(self, file: PromptFile) -> None:
        """Remove a state."""
        self._files.pop(file.path.name, None)
        with contextlib.suppress(OSError):
            file.path.unlink()

    def begin(self) -> Path:
        """Return a new file for llama.cpp to write to. Raises OSError."""
        path = self.folder / f"{self._prefix}-{secrets.token_hex(8)}{_PARTIAL}"
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        return path

    def finish(self, partial: Path, length: int) -> PromptFile | None:
        """Add a file of `length` bytes that llama.cpp has written; return it.

        The states that it continues are removed. None if it is not whole, or too long. Raises
        OSError.
        """
        with open(partial, "r+b") as file:
            whole = os.fstat(file.fileno()).st_size == length  # llama.cpp does not look at the end
            if not whole or length > self.limit:
                return None
            trailer = self._trailer(length)
            file.seek(length)
            file.write(trailer)
            file.seek(0)
            value = _digest(file, length + len(trailer))
            file.write(_DIGEST.pack(value))
        path = partial.with_suffix(_SUFFIX)
        tokens = self._read_tokens(partial)
        if tokens is None:
            return None
        partial.rename(path)
        self._scan()
        for other in [one for one in self._files.values() if one.path != path]:
            if tokens.startswith(other.tokens):
                self.remove(other)
        self.prune()
        return self._files.get(path.name)

    def prune(self) -> None:
        """Remove files that are too old, and the oldest of too many bytes."""
        now, rest = time.time(), []
        for path, status in _files(self.folder.parent):
            most = _MOST_SECONDS if path.suffix == _SUFFIX else _SECONDS_OF_WRITING
            rest.append((now - status.st_mtime > most, status.st_mtime, path, status.st_size))
        whole = sum(length for is_old, *_, length in rest if not is_old)
        for is_old, _, path, length in sorted(rest, key=lambda one: one[1]):
            if not is_old and (whole <= self.limit or path.suffix == _PARTIAL):
                continue
            with contextlib.suppress(OSError):
                path.unlink()
            whole -= 0 if is_old else length


def _digest(file: IO[bytes], length: int) -> int:
    """Return the digest of the next `length` bytes, or up to the end."""
    stream = digest.stream()
    while length > 0 and (piece := file.read(min(length, _PIECE_LENGTH))):
        stream.update(piece)
        length -= len(piece)
    return stream.intdigest()
