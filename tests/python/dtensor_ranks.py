"""Run by torchrun, by test_dtensor.py: every rank checks its part against one process that has everything."""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from hyper_parallel import expert_parallel_group
from hyper_parallel.custom_ops.experimental import hyper_mega_moe

T, H, I, E, K = 26, 48, 40, 8, 3


def tensors(dtype, transposed, tokens=T):
    torch.manual_seed(7)
    up = torch.randn(E, H, 2 * I) * 0.2
    down = torch.randn(E, I, H) * 0.2
    if transposed:
        up, down = (w.transpose(1, 2).contiguous().transpose(1, 2) for w in (up, down))
    ids = torch.randint(0, E, (tokens, K))
    ids[3, 1] = -1
    return [torch.randn(tokens, H).to(dtype), ids, torch.rand(tokens, K), up.to(dtype), down.to(dtype),
            torch.randn(tokens, H).to(dtype)]


def whole(x, ids, weights, up, down, dy):
    """y and gradients, by one process."""
    leaves = [t.clone().detach().requires_grad_() if t.is_floating_point() else t for t in (x, ids, weights, up, down)]
    leaves[3], leaves[4] = (w.detach().as_strided(w.shape, w.stride()).requires_grad_() for w in (up, down))
    y = hyper_mega_moe(*leaves)
    y.backward(dy)
    return y.detach(), [leaves[i].grad for i in (0, 2, 3, 4)]


def equal(name, a, b):
    assert torch.equal(a, b), f"rank {dist.get_rank()}: {name} differs by {(a.float() - b.float()).abs().max()}"


def check_mesh(mesh, ep, dtype, transposed):
    x, ids, weights, up, down, dy = tensors(dtype, transposed)
    tokens = [Shard(0)] * mesh.ndim
    experts = [Shard(0) if d == ep else Replicate() for d in range(mesh.ndim)]
    dx, dids, dweights, ddy = (distribute_tensor(t, mesh, tokens) for t in (x, ids, weights, dy))
    leaves = [dx.requires_grad_(), dweights.requires_grad_()]
    dup, ddown = (distribute_tensor(w, mesh, experts) for w in (up, down))
    for w in (dup, ddown):
        w.requires_grad_()
    y = hyper_mega_moe(dx, dids, dweights, dup, ddown)
    assert y.placements == dx.placements and y.device_mesh == mesh and y.shape == x.shape
    y.backward(ddy)
    expected, grads = whole(x, ids, weights, up, down, dy)
    equal("y", y.full_tensor(), expected)
    for name, leaf, grad in zip(("dx", "d_topk_weights"), leaves, grads):
        assert leaf.grad.placements == leaf.placements
        equal(name, leaf.grad.full_tensor(), grad)
    for name, leaf, grad in zip(("d_up", "d_down"), (dup, ddown), grads[2:]):
        parts = [Partial() if d != ep else Shard(0) for d in range(mesh.ndim)]
        assert list(leaf.grad.placements) == parts, leaf.grad.placements
        got = leaf.grad.full_tensor()
        if mesh.ndim == 1:
            equal(name, got, grad)
        else:  # two halves of the tokens, summed by torch
            scale = grad.float().abs().max()
            assert (got.float() - grad.float()).abs().max() <= scale * (1e-6 if dtype == torch.float32 else 2e-2), name


def refused(text, function, *arguments):
    try:
        function(*arguments)
    except ValueError as error:
        assert text in str(error), f"{text!r} is not in: {error}"
        return
    raise AssertionError(f"nothing was raised; expected: {text}")


def check_errors(mesh):
    x, ids, weights, up, down, _ = tensors(torch.float32, False)
    tokens = [Shard(0)]
    dx, dids, dweights = (distribute_tensor(t, mesh, tokens) for t in (x, ids, weights))
    dup, ddown = (distribute_tensor(w, mesh, [Shard(0)]) for w in (up, down))
    refused("x is a plain tensor", hyper_mega_moe, x, dids, dweights, dup, ddown)
    refused("topk_ids is a plain tensor", hyper_mega_moe, dx, ids, dweights, dup, ddown)
    refused("up_proj_weight is a plain tensor", hyper_mega_moe, dx, dids, dweights, up, ddown)
    refused("up_proj_weight.placements", hyper_mega_moe, dx, dids, dweights, distribute_tensor(up, mesh, [Shard(1)]),
            ddown)
    refused("down_proj_weight.placements", hyper_mega_moe, dx, dids, dweights, dup,
            distribute_tensor(down, mesh, [Replicate()]))
    refused("x.placements", hyper_mega_moe, distribute_tensor(x, mesh, [Replicate()]), dids, dweights, dup, ddown)
    refused("topk_weights.placements", hyper_mega_moe, dx, dids, distribute_tensor(weights, mesh, [Replicate()]), dup,
            ddown)
    refused("the number of experts of up_proj_weight is 7", hyper_mega_moe, dx, dids, dweights,
            distribute_tensor(up[:7], mesh, [Shard(0)]), distribute_tensor(down[:7], mesh, [Shard(0)]))
    other = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("other",))
    refused("the mesh of topk_ids", hyper_mega_moe, dx, distribute_tensor(ids, other, [Shard(0)]), dweights, dup, ddown)
    hyper_mega_moe(dx, dids, dweights, dup, ddown)  # still usable


def check_plain(ranks, rank):
    """expert_parallel_group on plain tensors: uneven tokens, none at all, more than before, and errors of one rank."""
    everyone = dist.group.WORLD
    for tokens in (T, 200):
        x, ids, weights, up, down, dy = tensors(torch.bfloat16, True, tokens)
        cuts = [0] + [tokens * (r + 1) // ranks // (1 if r else 2) for r in range(ranks - 1)] + [tokens]
        cuts[1:-1] = sorted(cuts[1:-1])
        if ranks > 2:
            cuts[2] = cuts[1]  # rank 1 has no tokens
        mine = slice(cuts[rank], cuts[rank + 1])
        local = slice(rank * E // ranks, (rank + 1) * E // ranks)
        leaves = [x[mine].clone().requires_grad_(), ids[mine], weights[mine].clone().requires_grad_(),
                  up[local].detach().requires_grad_(), down[local].detach().requires_grad_()]
        with expert_parallel_group(everyone):
            y = hyper_mega_moe(*leaves)
        y.backward(dy[mine])  # after the `with`
        expected, grads = whole(x, ids, weights, up, down, dy)
        equal("y", y, expected[mine])
        for name, leaf, grad, part in zip(("dx", "d_topk_weights", "d_up", "d_down"),
                                          (leaves[0], leaves[2], leaves[3], leaves[4]), grads,
                                          (mine, mine, local, local)):
            equal(name, leaf.grad, grad[part])
    bad = [t.detach() for t in leaves]
    if rank == ranks - 1:
        bad[2] = bad[2].double()
    with expert_parallel_group(everyone):
        try:
            hyper_mega_moe(*bad)
            raise AssertionError("nothing was raised")
        except (ValueError, RuntimeError) as error:
            assert f"the dtype of topk_weights is torch.float64" in str(error), error
        y2 = hyper_mega_moe(*[t.detach() for t in leaves])
        equal("y after an error of one rank", y2, expected[mine])
        bad = [t.detach() for t in leaves]
        bad[1] = bad[1].clone()
        if rank == 0:
            bad[1][2, 0] = E
        try:
            hyper_mega_moe(*bad)
            raise AssertionError("nothing was raised")
        except RuntimeError as error:
            assert str(E) in str(error) and "token 2" in str(error), error
        equal("y after a wrong id", hyper_mega_moe(*[t.detach() for t in leaves]), expected[mine])


def main():
    dist.init_process_group("gloo")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
    for dtype in (torch.float32, torch.bfloat16):
        for transposed in (False, True):
            check_mesh(mesh, 0, dtype, transposed)
    if ranks == 4:
        for dtype in (torch.float32, torch.bfloat16):
            check_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep")), 1, dtype, True)
            check_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "dp")), 0, dtype, False)
    print("meshes fine", flush=True)
    check_errors(mesh)
    check_plain(ranks, rank)
    dist.destroy_process_group()
    sys.stdout.write(f"rank {rank} of {ranks}: fine\n")


main()
