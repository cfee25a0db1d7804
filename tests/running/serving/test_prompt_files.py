"""Files of states: chosen by tokens, believed by their digests, removed by age and bytes."""

import asyncio
import contextlib
import os
import struct
import threading
import time
from pathlib import Path

import pytest

from moepack.running.serving.prompt_files import (
    PromptFile,
    PromptFiles,
    common_count,
    pack_tokens,
    remove_prompts,
    stored_prompts,
)
from moepack.running.serving.prompt_states import _in_thread

KEY = bytes(range(32))
STATE = b"keys and values " * 40


def as_written(tokens: list[int], state: bytes = STATE) -> bytes:
    """Return a file as llama.cpp writes it."""
    words = [-1, 1, len(tokens), *tokens, 0]
    head = struct.pack("<4sII", b"qsgg", 4, len(words))
    return head + struct.pack(f"<{len(words)}i", *words) + state


def add(files: PromptFiles, tokens: list[int], state: bytes = STATE) -> PromptFile | None:
    """Save a state, as the server does."""
    partial = files.begin()
    partial.write_bytes(data := as_written(tokens, state))
    return files.finish(partial, len(data))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a model's folder in a cache of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "moepack/prompts/model"
    folder.mkdir(parents=True, mode=0o700)
    folder.parent.chmod(0o700)
    return folder


@pytest.fixture
def files(folder: Path) -> PromptFiles:
    """Return the states of a model."""
    return PromptFiles(folder, KEY, 1 << 20)


def find(files: PromptFiles, *tokens: int) -> tuple[list[int], int]:
    """Return the tokens of the best state, and how many of them are common."""
    file, count = files.best(pack_tokens(list(tokens)))
    return ([] if file is None else list(memoryview(file.tokens).cast("i"))), count


def test_the_longest_common_beginning_is_found_and_of_these_the_shortest(
    files: PromptFiles,
) -> None:
    for tokens in ([1, 2, 3, 4], [1, 2, 9, 9, 9], [1, 2, 9, 8], [7]):
        assert add(files, tokens) is not None
    assert find(files, 1, 2, 3) == ([1, 2, 3, 4], 3)
    assert find(files, 1, 2, 9, 7, 7) == ([1, 2, 9, 8], 3)
    assert find(files, 5) == ([], 0)


@pytest.mark.parametrize("count", [0, 1, 2, 63, 64])
def test_common_tokens_are_counted_whole(count: int) -> None:
    one = [257 * number for number in range(64)]
    other = one[:count] + [number ^ 1 << 16 for number in one[count:]]
    assert common_count(pack_tokens(one), pack_tokens(other)) == count


def test_a_text_that_goes_on_takes_the_place_of_its_beginning(files: PromptFiles) -> None:
    add(files, [1, 2])
    add(files, [1, 3])
    add(files, [1, 2, 3])
    assert len(list(files.folder.iterdir())) == 2
    assert find(files, 1, 2, 5)[0] == [1, 2, 3]


def test_each_flipped_byte_and_each_cut_is_noticed(files: PromptFiles) -> None:
    file = add(files, [1, 2, 3])
    assert file is not None
    data = file.path.read_bytes()

    def is_believed(changed: bytes) -> bool:
        file.path.write_bytes(changed)
        fresh = PromptFiles(files.folder, KEY, 1 << 20)
        best, _ = fresh.best(file.tokens)
        return best is not None and fresh.is_whole(best)

    assert is_believed(data)
    for offset in range(len(data)):
        changed = bytearray(data)
        changed[offset] ^= 1 << offset % 8
        assert not is_believed(bytes(changed)), offset
        if offset not in range(24, 28):  # with another first token it is not even looked at
            assert not file.path.exists(), offset
    for length in range(len(data)):
        assert not is_believed(data[:length]), length
    assert not is_believed(data + b"\0")
    assert is_believed(data)


def test_another_key_finds_nothing(files: PromptFiles, folder: Path) -> None:
    file = add(files, [1, 2, 3])
    assert file is not None
    other = PromptFiles(folder, KEY[::-1], 1 << 20)
    assert other.best(file.tokens) == (None, 0)
    assert file.path.exists()
    similar = PromptFiles(folder, KEY[:-1] + b"x", 1 << 20)
    assert similar.best(file.tokens) == (None, 0)


def test_what_llama_cpp_did_not_write_whole_is_not_added(files: PromptFiles) -> None:
    partial = files.begin()
    partial.write_bytes(data := as_written([1, 2, 3]))
    assert files.finish(partial, len(data) + 1) is None
    partial.write_bytes(b"no state")
    assert files.finish(partial, 8) is None
    assert find(files, 1, 2) == ([], 0)


def test_the_longest_unused_go_when_there_are_too_many_bytes_or_days(folder: Path) -> None:
    files = PromptFiles(folder, KEY, 3 * 900)
    now = time.time()
    for number in range(3):
        file = add(files, [number])
        assert file is not None
        os.utime(file.path, (0, now - 60 + number))
    first, _ = files.best(pack_tokens([0]))
    assert first is not None
    assert files.is_whole(first)  # used, and so the youngest
    add(files, [3])
    assert [find(files, number)[1] for number in range(4)] == [1, 0, 1, 1]
    assert add(files, [4], STATE * 100) is None
    os.utime(first.path, (0, now - 31 * 24 * 3600))
    lost, young = folder / "x.partial", folder / "y.partial"
    lost.touch()
    young.touch()
    os.utime(lost, (0, now - 3600))
    PromptFiles(folder, KEY, 1 << 20)
    assert not first.path.exists()
    assert (lost.exists(), young.exists()) == (False, True)


def test_states_are_listed_and_removed_by_model(files: PromptFiles, folder: Path) -> None:
    other = folder.parent / "other"
    other.mkdir(mode=0o700)
    add(files, [1, 2])
    add(files, [2, 3])
    file = add(PromptFiles(other, KEY, 1 << 20), [1])
    assert file is not None
    lengths = stored_prompts()
    assert lengths[other] == file.path.stat().st_size < lengths[folder]
    remove_prompts(other)
    assert stored_prompts() == {folder: lengths[folder]}


def test_a_folder_that_others_may_open_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not stored_prompts()
    add(PromptFiles(folder, KEY, 1 << 20), [1])
    assert len(stored_prompts()) == 1
    folder.parent.chmod(0o755)
    assert not stored_prompts()


def test_work_on_files_ends_before_whoever_is_cancelled_goes_on() -> None:
    """Else the next request would use the files while a thread does."""
    started, may_end = threading.Event(), threading.Event()
    ended: list[bool] = []

    def work() -> None:
        started.set()
        may_end.wait(5)
        ended.append(True)

    async def cancel() -> bool:
        task = asyncio.create_task(_in_thread(work))
        await asyncio.to_thread(started.wait)
        task.cancel()
        asyncio.get_running_loop().call_later(0.05, may_end.set)
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return task.cancelled() and ended == [True]

    assert asyncio.run(cancel())
