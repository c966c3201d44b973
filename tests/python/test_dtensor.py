"""DTensors, and plain tensors over a process group, on 2 and 4 processes."""

import pytest

import launch


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks(ranks):
    launch.run("dtensor_ranks.py", ranks)
