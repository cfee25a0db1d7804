"""What a server counts, as Prometheus reads it."""

import re

from moepack.running.engine import MemoryUse
from moepack.serving.metrics import Metrics

NUMBER = r"[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?"


def test_each_line_is_one_that_prometheus_knows_and_no_digit_is_lost() -> None:
    metrics = Metrics()
    metrics._counts["prompt_seconds"] = 12345678.25
    text = metrics.text(MemoryUse(1 << 40, 2, 3, 0, 1), waiting_count=7)
    assert text.endswith("\n")
    samples: dict[str, float] = {}
    described: set[tuple[str, str]] = set()
    for line in text.splitlines():
        if about := re.fullmatch(r"# (HELP|TYPE) (moepack_[a-z_]+) (.+)", line):
            assert about[1] == "HELP" or about[3] in ("counter", "gauge")
            described.add((about[1], about[2]))
        else:
            sample = re.fullmatch(rf"(moepack_[a-z_]+) ({NUMBER})", line)
            assert sample, line
            assert sample[1] not in samples
            samples[sample[1]] = float(sample[2])
            assert {("HELP", sample[1]), ("TYPE", sample[1])} <= described
    assert samples["moepack_prompt_seconds_total"] == 12345678.25
    assert samples["moepack_memory_dense_bytes"] == 1 << 40
    assert samples["moepack_waiting"] == 7
