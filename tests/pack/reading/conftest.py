"""Packs that suit no drive, or have experts of several kinds."""

from pathlib import Path

import pytest

from tests.support.models import first_shard, pack_model
from tests.support.packs import FINE_LAYOUT, families_model


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pack a model with three families in layer 0."""
    folder = tmp_path_factory.mktemp("families")
    pack_model([families_model(folder)], folder / "pack")
    return folder / "pack"


@pytest.fixture(scope="session")
def fine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pack a model with blobs and parts aligned to 64 bytes."""
    folder = tmp_path_factory.mktemp("fine")
    (folder / "fine.toml").write_text(FINE_LAYOUT)
    pack_model([first_shard("gpt-oss")], folder / "pack", str(folder / "fine.toml"))
    return folder / "pack"
