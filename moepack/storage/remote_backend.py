"""The backend `remote`: ranges of objects in stores, many at a time, each one request."""

from moepack.common.remote_path import RemotePath
from moepack.storage.backend import Completion, ReadRequest, completed
from moepack.storage.remote.store import RemoteStamp
from moepack.storage.remote.stores import store_of
from moepack.storage.threaded import ThreadedBackend


class RemoteBackend(ThreadedBackend):
    """Reads objects in stores; an object that is replaced meanwhile is an error."""

    def __init__(self) -> None:
        super().__init__(direct=True)
        self.name = "remote"
        self._stamps: dict[RemotePath, RemoteStamp] = {}

    def do(self, number: int, request: ReadRequest) -> Completion:
        """Do one request now, in this thread."""
        path = request.path
        assert isinstance(path, RemotePath)
        try:
            data, self._stamps[path] = store_of(path).fetch(
                path.key, request.offset, request.length, self._stamps.get(path)
            )
        except OSError as error:
            return Completion(number, 0, error)
        offset = 0
        for buffer in (request.buffer, *request.more):
            piece = data[offset : offset + len(buffer)]
            buffer[: len(piece)] = piece
            offset += len(piece)
        return completed(number, offset)
