"""Prompts of a recording are lines of a file, or JSON lines."""

from pathlib import Path

import pytest

from moepack.common.errors import MoepackError, TraceError
from moepack.running.serving.recording import read_prompts


@pytest.mark.parametrize(
    ("data", "prompts"),
    [
        (b"one\ntwo three\n", ["one", "two three"]),
        (b"one\r\ntwo", ["one", "two"]),
        (b"\xef\xbb\xbfone\n", ["one"]),
        ("eins\u2028zwei\n".encode(), ["eins\u2028zwei"]),
        (b'"Yes" and "no"\n[1] is no JSON here\n', ['"Yes" and "no"', "[1] is no JSON here"]),
        (b'"one\\ntwo"\n"three"\n', ["one\ntwo", "three"]),
        (b'{"prompt": "one", "id": 3}\n"two"\n', ["one", "two"]),
        (b"\none\n\n  \r\n two\n\n\n", ["one", " two"]),
    ],
)
def test_prompts_are_lines_or_json_lines(data: bytes, prompts: list[str], tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_bytes(data)
    assert read_prompts(str(path)) == prompts


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"  \n\t\r\n", "no prompts"),
        (b"one\n\xff\n", "byte 4: not UTF-8 text"),
        (b'"one"\n"two\n', "line 2: not JSON"),
        (b'"one"\n2\n', "line 2: not a prompt"),
        (b'"one"\n\n""\n', "line 3: an empty prompt"),
        (b'{"prompt": "one"}\n{"text": "two"}\n', "line 2: not a prompt"),
        (b'{"prompt": "one"}\n' + b"[" * 100_000, "line 2: not JSON"),
    ],
)
def test_what_are_no_prompts_is_refused(data: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=problem):
        read_prompts(str(path))


def test_a_missing_file_of_prompts_is_no_traceback(tmp_path: Path) -> None:
    with pytest.raises(MoepackError):
        read_prompts(str(tmp_path / "absent"))
