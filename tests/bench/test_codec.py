"""A pack with parts stored by zstd is measured as users read it, and the report says so.

And what `python -m benchmarks.codec` says of the models in fixtures/.
"""

from pathlib import Path

import pytest

from benchmarks import codec
from tests.support.models import first_shard


@pytest.mark.parametrize(("alignment", "shorter"), [(64, "48 of 48"), (4096, "0 of 48")])
def test_biases_alone_get_shorter_where_padding_leaves_room(
    alignment: int, shorter: str, tmp_path: Path
) -> None:
    rows = list(codec.model_rows(tmp_path, first_shard("gpt-oss"), alignment))
    assert [(row.name, row.moepack) for row in rows] == [
        ("F32: shorter parts", shorter),
        ("MXFP4: shorter parts", "0 of 48"),
    ]
