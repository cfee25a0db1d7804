"""How often a test tries: enough each time, and many times more where there is time for it."""

import pytest
from _pytest.mark import ParameterSet


def amounts(enough: int, many: int) -> list[int | ParameterSet]:
    """Return the parameters of a test: `enough` for `make test`, `many` for `make fuzz`."""
    return [enough, pytest.param(many, marks=pytest.mark.slow)]
