"""The command under its short name."""

import pytest

from tests.support.warm_command import Run


@pytest.fixture
def cli(moepack_command: Run) -> Run:
    """Run the `moepack` command in a process of its own."""
    return moepack_command
