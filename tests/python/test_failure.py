"""A rank that dies, raises or just ends: the other's next call says so, and its process ends, too."""

import pytest

import launch


@pytest.mark.parametrize("way, text", [("killed", "rank 1 died"), ("raises", "rank 1 ended: KeyError"),
                                       ("ends", "rank 1 left the group")])
def test_a_rank_that_ends(way, text):
    code, output = launch.pair("failing_ranks.py", way)
    assert code == 3, output
    assert "call 100: " in output and text in output, output
