"""The least budget of each lookup is what a list of experts by their last use says."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moepack.simulation.stack import COLD, LruStack

Step = tuple[int, list[int]]
STEPS = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.integers(0, 6), min_size=1, max_size=7, unique=True)),
    min_size=1,
    max_size=60,
)
WEIGHTS = (3, 5, 8)


def plain(steps: Sequence[Step], is_grouped: bool) -> list[int]:
    """Look through the whole list each time."""
    lists: dict[int, list[tuple[int, int, int]]] = {}
    last_step: dict[int, int] = {}
    needs = []
    for number, (layer, experts) in enumerate(steps):
        group = layer if is_grouped else 0
        used = lists.setdefault(group, [])
        for expert in experts:
            place = next((n for n, u in enumerate(used) if u[:2] == (layer, expert)), None)
            if place is None:
                needs.append(COLD)
            elif used[place][2] == last_step[group]:
                needs.append(0)
            else:
                needs.append(sum(WEIGHTS[u[0]] for u in used[place:]))
        chosen = {(layer, expert) for expert in experts}
        used[:] = [use for use in used if use[:2] not in chosen]
        used += [(layer, expert, number) for expert in experts]
        last_step[group] = number
    return needs


@settings(max_examples=100)
@given(steps=STEPS, is_grouped=st.booleans(), cut=st.integers(0, 60))
def test_needs_are_those_of_a_list_by_last_use(
    steps: list[Step], is_grouped: bool, cut: int
) -> None:
    stack = LruStack()
    needs: list[int] = []
    for part in (range(min(cut, len(steps))), range(cut, len(steps))):
        rows = [
            (layer if is_grouped else 0, layer * 10 + expert, WEIGHTS[layer], number)
            for number in part
            for layer, expert in ((steps[number][0], one) for one in steps[number][1])
        ]
        if rows:
            needs += stack.needs(*np.array(rows, np.int64).T).tolist()
    assert needs == plain(steps, is_grouped)
