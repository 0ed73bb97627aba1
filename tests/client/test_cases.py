"""Every case through every door. What a door cannot do is named, and must not work by accident."""

from __future__ import annotations

import pytest

from tests.client.cases import CASES, GAPS, Case
from tests.client.doors import DOORS, Door


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.name.replace(" ", "-"))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Case, door: Door) -> None:
    if (case.name, door.name) not in GAPS:
        case.run(door)
        return
    with pytest.raises(Exception):  # noqa: B017
        case.run(door)


def test_the_gaps_are_of_cases_and_doors_that_there_are() -> None:
    known = {(case.name, door.name) for case in CASES for door in DOORS}
    assert set(GAPS) <= known
