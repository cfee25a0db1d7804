"""A server that is a child: when it answers, and that it has ended."""

import sys
import tempfile

import pytest

from moepack.common.errors import MachineError
from moepack.running.serving.listening import ListeningProcess


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
