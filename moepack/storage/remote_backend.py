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
        buffers = [request.buffer, *request.more]
        try:
            length, self._stamps[path] = store_of(path).read_into(
                path.key, request.offset, buffers, self._stamps.get(path)
            )
        except OSError as error:
            return Completion(number, 0, error)
        return completed(number, length)
