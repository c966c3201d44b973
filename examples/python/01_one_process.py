"""One layer in one process: forward, gradients, the same with PyTorch's own operations beside it.

    python examples/python/01_one_process.py
"""

import torch

from hyper_parallel.custom_ops.experimental import hyper_mega_moe

T, H, I, E, K = 64, 256, 128, 8, 2


def chain(x, ids, weights, up, down):
    """The unfused layer."""
    y = torch.zeros_like(x)
    for e in range(E):
        token, slot = (ids == e).nonzero(as_tuple=True)
        gate, lift = (x[token] @ up[e]).chunk(2, -1)
        y = y.index_add(0, token, (torch.nn.functional.silu(gate) * lift) @ down[e] * weights[token, slot, None])
    return y


torch.manual_seed(0)
x = torch.randn(T, H, requires_grad=True)
router = torch.randn(H, E, requires_grad=True)
up = (torch.randn(E, H, 2 * I) * 0.05).requires_grad_()
down = (torch.randn(E, I, H) * 0.05).requires_grad_()
gradients = []
for layer in (hyper_mega_moe, chain):
    for leaf in (x, router, up, down):
        leaf.grad = None
    weights, ids = (x @ router).softmax(-1).topk(K)
    y = layer(x, ids, weights, up, down)
    y.square().mean().backward()
    gradients.append([y.detach(), *(leaf.grad for leaf in (x, router, up, down))])
for name, ours, theirs in zip(("y", "dx", "d_router", "d_up_proj", "d_down_proj"), *gradients):
    worst = (ours - theirs).abs().max().item() / theirs.abs().max().item()
    print(f"{name:12} largest difference {worst:.1e} of the largest value")
    assert worst < 1e-4

with torch.no_grad():
    weights, ids = (x @ router).softmax(-1).topk(K)
    whole = hyper_mega_moe(x, ids, weights, up, down)
    alone = torch.cat([hyper_mega_moe(x[t:t + 1], ids[t:t + 1], weights[t:t + 1], up, down) for t in range(T)])
print("a token alone or among others:", "the same bits" if torch.equal(whole, alone) else "OTHER BITS")
assert torch.equal(whole, alone)
