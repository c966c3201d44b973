"""The same function on MindSpore tensors: value and gradients in PyNative mode.

    python examples/python/04_mindspore.py
"""

import mindspore as ms
import numpy as np
from mindspore import Tensor

from hyper_parallel.custom_ops.experimental import hyper_mega_moe

T, H, I, E, K = 64, 256, 128, 8, 2

ms.set_context(mode=ms.PYNATIVE_MODE, device_target="CPU")
rng = np.random.default_rng(0)
x = Tensor(rng.standard_normal((T, H)).astype(np.float32))
ids = Tensor(rng.integers(0, E, (T, K)).astype(np.int32))
weights = Tensor(rng.random((T, K)).astype(np.float32))
up = Tensor((rng.standard_normal((E, H, 2 * I)) * 0.05).astype(np.float32))
down = Tensor((rng.standard_normal((E, I, H)) * 0.05).astype(np.float32))


def loss(x, weights, up, down):
    return hyper_mega_moe(x, ids, weights, up, down).square().sum()


value, (dx, d_weights, d_up, d_down) = ms.value_and_grad(loss, (0, 1, 2, 3))(x, weights, up, down)
print(f"loss {float(value.asnumpy()):.6f}; gradients {dx.shape} {d_weights.shape} {d_up.shape} {d_down.shape}")
step = 1e-3
moved = Tensor(up.asnumpy() - step * d_up.asnumpy())
expected = float(value.asnumpy()) - step * float((d_up.asnumpy() ** 2).sum())
print(f"after a small step along d_up_proj: {float(loss(x, weights, moved, down).asnumpy()):.4f}, "
      f"expected to first order {expected:.4f}")
assert float(loss(x, weights, moved, down).asnumpy()) < float(value.asnumpy())
