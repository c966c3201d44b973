"""argv: dtype, transposed, folder. Writes y and all gradients as .npz for mindspore_torch.py."""

import sys

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint

import mindspore_case
from hyper_parallel.custom_ops.experimental import hyper_mega_moe

dtype, transposed, folder = getattr(ms, sys.argv[1]), int(sys.argv[2]), sys.argv[3]
a = mindspore_case.arrays(transposed)
leaves = [Tensor(a[name]).astype(dtype if name != "weights" else ms.float32)
          for name in ("x", "weights", "up", "down", "shared_up", "shared_down")]
ids, dy = Tensor(a["ids"]), Tensor(a["dy"])


def layer(x, weights, up, down, shared_up, shared_down):
    if transposed:
        up, down, shared_up, shared_down = (mint.transpose(w, 1, 2) for w in (up, down, shared_up, shared_down))
        assert not up.is_contiguous()
    return hyper_mega_moe(x, ids, weights, up, down, shared_up_proj_weight=shared_up,
                          shared_down_proj_weight=shared_down)


def loss(*leaves):
    return (layer(*leaves).astype(ms.float32) * dy).sum()


y = layer(*leaves)
value, grads = ms.value_and_grad(loss, tuple(range(6)))(*leaves)
again = ms.grad(loss, tuple(range(6)))(*leaves)
for i, (g, h) in enumerate(zip(grads, again)):
    assert g.dtype == leaves[i].dtype and g.shape == leaves[i].shape
    assert np.array_equal(g.astype(ms.float32).asnumpy(), h.astype(ms.float32).asnumpy()), i
few = ms.grad(loss, (1, 3))(*leaves)  # what is not asked for is not computed
for g, h in zip(few, (grads[1], grads[3])):
    assert np.array_equal(g.astype(ms.float32).asnumpy(), h.astype(ms.float32).asnumpy())
np.savez(f"{folder}/got.npz", *[t.astype(ms.float32).asnumpy() for t in (y, *grads)])

# views: every second column of a wider tensor, and a slice that starts anywhere
x, weights, up, down = leaves[:4]
if transposed:
    up, down = mint.transpose(up, 1, 2), mint.transpose(down, 1, 2)
plain = hyper_mega_moe(x, ids, weights, up, down).astype(ms.float32).asnumpy()
wide = mint.cat([x.astype(ms.float32).reshape(-1, 1), x.astype(ms.float32).reshape(-1, 1)], 1).reshape(26,
                                                                                                       96).astype(dtype)
assert np.array_equal(hyper_mega_moe(wide[:, ::2], ids, weights, up, down).astype(ms.float32).asnumpy(), plain)
assert np.array_equal(hyper_mega_moe(x[1:], ids[1:], weights[1:], up, down).astype(ms.float32).asnumpy(), plain[1:])
print("fine")
