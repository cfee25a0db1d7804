"""A page with every section, beside its inputs."""

from pathlib import Path

import pytest

from moepack.report.html.report import ReportPage
from tests.support.report_pages import make, write_inputs


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a pack, a machine and measurements."""
    folder = tmp_path_factory.mktemp("report")
    write_inputs(folder)
    return folder


@pytest.fixture(scope="package")
def page(folder: Path) -> ReportPage:
    """Make a page with every section, beside its inputs."""
    return make(folder, folder / "report.html")
