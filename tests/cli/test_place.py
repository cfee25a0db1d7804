"""The command `place`: what it prints, takes and refuses."""

from pathlib import Path

from tests.support.machines import write_machine
from tests.support.warm_command import Run


def test_it_prints_memories_and_a_command(cli: Run, gpt_oss: Path) -> None:
    done = cli("place", str(gpt_oss), "--vram", "24GiB", "--ram", "64GiB", "--context", "8192")
    assert done.returncode == 0
    assert "114.7B in experts, 1.5B dense" in done.stdout
    assert "5.1B are active in a token, but all take memory" in done.stdout
    assert (
        f"  llama-server -m {gpt_oss} -ngl 999 --n-cpu-moe 26 -c 8192 -b 4096 -ub 4096\n"
        in done.stdout
    )
    assert "  experts: 15.8 GiB in VRAM, 41.1 GiB in memory" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if "GiB" in line]
    assert ["memory", "64.0", "GiB"] in [row[:3] for row in rows]


def test_speeds_are_those_of_the_machine(cli: Run, gpt_oss: Path, tmp_path: Path) -> None:
    figures = {"memory": 64, "bandwidth": 80, "vram": 24, "vram_bandwidth": 936}
    box = write_machine(tmp_path / "machine.toml", **figures)
    text = cli("place", str(gpt_oss), "--machine", str(box)).stdout
    assert "  decode: " in text
    assert "  prompt: 1,000 tokens: " in text
