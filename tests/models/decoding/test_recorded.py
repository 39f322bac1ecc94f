"""Every drafter and rule gives the outputs that were recorded (see `recorded`)."""

import json

from tests.models.decoding import recorded


def test_outputs_are_the_recorded_ones() -> None:
    expected, found = json.loads(recorded.FILE.read_text(encoding="utf-8")), recorded.record()
    assert expected.keys() == found.keys()
    assert {name for name in expected if expected[name] != found[name]} == set()
