"""hyper_mega_moe on MindSpore tensors: PyTorch's bits. MindSpore runs in processes of its own."""

import pytest

pytest.importorskip("mindspore")

import launch


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("transposed", [0, 1])
def test_same_bits_as_torch(dtype, transposed, tmp_path):
    launch.python("mindspore_one.py", dtype, transposed, tmp_path)
    launch.python("mindspore_torch.py", dtype, transposed, tmp_path)


def test_bad_input():
    launch.python("mindspore_bad.py")


def test_two_processes():
    launch.msrun("mindspore_ranks.py", 2)
