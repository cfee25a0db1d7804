"""Control groups of this process, made up in a folder."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from moepack.host import control_groups


def lay_groups(
    folder: Path, groups: str, files: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Put this process into `groups`, the lines of /proc/self/cgroup, of which `files` tell."""
    monkeypatch.setattr(control_groups, "ROOT", folder)
    monkeypatch.setattr(control_groups, "OWN_GROUPS", folder / "own")
    (folder / "own").write_text(groups + "\n")
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
