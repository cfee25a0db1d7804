"""A network with a delay, in front of a server on this machine."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator

_PIECE_LENGTH = 1 << 18


async def _forward(
    source: asyncio.StreamReader, target: asyncio.StreamWriter, delay: float
) -> None:
    """Pass bytes on, each after the delay, however many come meanwhile."""
    loop = asyncio.get_running_loop()
    pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(256)

    async def receive() -> None:
        while data := await source.read(_PIECE_LENGTH):
            await pieces.put((loop.time() + delay, data))
        await pieces.put((0.0, b""))

    receiving = asyncio.create_task(receive())
    try:
        while (piece := await pieces.get())[1]:
            await asyncio.sleep(max(0.0, piece[0] - loop.time()))
            target.write(piece[1])
            await target.drain()
    finally:
        receiving.cancel()
        target.close()


@contextlib.contextmanager
def slow_network(port: int, round_trip: float) -> Iterator[int]:
    """Yield a port that leads to `port` of this machine, with so many seconds there and back."""
    loop = asyncio.new_event_loop()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await asyncio.gather(
                _forward(reader, inner_writer, round_trip / 2),
                _forward(inner_reader, writer, round_trip / 2),
            )

    server = loop.run_until_complete(asyncio.start_server(serve, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        asyncio.run_coroutine_threadsafe(_end(server), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _end(server: asyncio.Server) -> None:
    """Close a server and all of its connections."""
    server.close()
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
