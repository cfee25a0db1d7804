"""A server that is a child: when it answers, and that it has ended."""

import sys
import tempfile

import pytest

from moepack.common.errors import MachineError
from moepack.running.serving.model_server import ListeningProcess
from tests.support.children import wait_until


def server(code: str) -> ListeningProcess:
    """Start a program in place of a server."""
    return ListeningProcess([sys.executable, "-c", code], {}, tempfile.TemporaryFile())


def test_other_words_may_precede_the_address() -> None:
    code = "print('{}\\nlistening on http://127.0.0.1:1', flush=True); input()"
    with server(code) as process:
        assert process.url == "http://127.0.0.1:1"


def test_one_that_ends_without_an_address_has_failed() -> None:
    failure = pytest.raises(MachineError, match="ended with code 7")
    with server("print('no'); raise SystemExit(7)") as process, failure:
        _ = process.url


@pytest.mark.parametrize("line", ["listening on http://[::1]:1", "nothing"])
def test_no_log_is_too_long(line: str) -> None:
    code = f"print({line!r}, flush=True); print(end='x' * (1 << 21)); raise SystemExit(3)"
    with server(code) as process:
        if line == "nothing":
            with pytest.raises(MachineError, match="ended with code 3"):
                _ = process.url
        else:
            assert process.url == "http://[::1]:1"
            wait_until(lambda: process.returncode == 3)
