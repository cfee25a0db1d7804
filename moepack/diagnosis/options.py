"""What variables tell llama.cpp, and the programs that compute with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from moepack.diagnosis.finding import Finding
from moepack.machine.bandwidth import cpu_count
from moepack.programs.command import find_reading_option


def check_variables(environment: Mapping[str, str]) -> Finding:
    """Look for variables that keep experts from being brought, or slow it down."""
    problems = list(_problems(environment))
    if problems:
        measured, hint = problems[0]
        return Finding("variables", measured, "problem", hint)
    limits = list(_limits(environment))
    if limits:
        measured, hint = limits[0]
        return Finding("variables", measured, "limit", hint)
    return Finding("variables", "none gets in the way", "fine")


def _problems(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    reading = find_reading_option([], environment)
    if reading is not None:
        yield reading, "unset it: the program would read or lock the whole model"
    if environment.get("GGML_CUDA_REGISTER_HOST"):
        yield "GGML_CUDA_REGISTER_HOST is set", "unset it: it pins pages that moepack replaces"


def _limits(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    if environment.get("OMP_WAIT_POLICY", "").lower() == "active":
        hint = "unset it: threads that spin take the processors from who reads experts"
        yield "OMP_WAIT_POLICY=active", hint
    threads = environment.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and 0 < int(threads) < cpu_count():
        yield f"OMP_NUM_THREADS={threads}", f"unset it: there are {cpu_count()} processors"
