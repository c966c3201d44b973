"""What MindSpore's tensors may not be."""

import mindspore as ms
import numpy as np
from mindspore import Tensor

import hyper_parallel
import mindspore_case
from hyper_parallel.custom_ops.experimental import hyper_mega_moe

a = mindspore_case.arrays(False)
good = [Tensor(a[name]) for name in ("x", "ids", "weights", "up", "down")]


def refused(kind, text, at, tensor):
    arguments = list(good)
    arguments[at] = tensor
    try:
        hyper_mega_moe(*arguments)
    except kind as error:
        assert text in str(error), error
        return
    raise AssertionError(f"nothing was raised; expected: {text}")


refused(TypeError, "topk_weights is a ndarray: a mindspore.Tensor", 2, a["weights"])
refused(ValueError, "the dtype of x is Float64", 0, good[0].astype(ms.float64))
refused(ValueError, "the dtype of topk_ids is Float32", 1, good[2])
refused(ValueError, "the shape of topk_ids is [25, 3]", 1, good[1][1:])
refused(ValueError, "the shape of down_proj_weight is [8, 39, 48]", 4, good[4][:, 1:])
refused(ValueError, "the strides of up_proj_weight", 3, Tensor(np.zeros((8, 48, 160), np.float32))[:, :, ::2])
refused(hyper_parallel.Error, "topk_ids of rank 0, token 0, slot 0", 1, Tensor(np.full((26, 3), 8, np.int32)))
hyper_mega_moe(*good)  # still usable


@ms.jit
def compiled(x):
    return hyper_mega_moe(x, *good[1:])


try:
    compiled(good[0])
    raise AssertionError("nothing was raised under jit")
except RuntimeError as error:
    assert "hyper_mega_moe' is not supported in 'construct' or function with @jit" in str(error), error
ms.set_context(mode=ms.GRAPH_MODE)
refused(RuntimeError, "needs PyNative mode", 0, good[0])
print("fine")
