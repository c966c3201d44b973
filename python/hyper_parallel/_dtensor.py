"""DTensor: tokens sharded over the mesh, experts over its expert-parallel dimension."""

from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from . import _torch
from ._shapes import wrong


def _placed(name, tensor, mesh):
    if not isinstance(tensor, DTensor):
        raise wrong(name, "a plain tensor", "a DTensor is expected, as x is one or the weights are")
    if tensor.device_mesh != mesh:
        raise wrong(f"the mesh of {name}", tensor.device_mesh, f"x's mesh {mesh} is expected")
    return tensor.placements


def _expert_dimension(mesh, up):
    """The mesh dimension over which experts are sharded."""
    placements = _placed("up_proj_weight", up, mesh)
    sharded = [d for d, p in enumerate(placements) if p == Shard(0)]
    if len(sharded) != 1 or any(p not in (Shard(0), Replicate()) for p in placements):
        raise wrong("up_proj_weight.placements", placements,
                    "Shard(0) on the expert-parallel mesh dimension and Replicate() on the others are expected")
    return sharded[0]


def _check_tokens(x, topk_ids, topk_weights, mesh, ep):
    for name, tensor in (("x", x), ("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        placements = _placed(name, tensor, mesh)
        if placements[ep] != Shard(0) or any(p not in (Shard(0), Replicate()) for p in placements):
            raise wrong(f"{name}.placements", placements, f"Shard(0) on mesh dimension {ep}, over which experts are"
                        " sharded, and Shard(0) or Replicate() on the others are expected")
        if placements != x.placements:
            raise wrong(f"{name}.placements", placements, f"those of x, {x.placements}, are expected")
        if tensor.shape[0] != x.shape[0]:
            raise wrong(f"the shape of {name}", list(tensor.shape), f"as many tokens as x, {x.shape[0]}, are expected")


def _local_weight(name, weight, x, expected):
    """The local part. Its gradient is a part of a sum where tokens differ and the weight does not."""
    placements = _placed(name, weight, x.device_mesh)
    if placements != expected:
        raise wrong(f"{name}.placements", placements, f"{expected} are expected")
    grads = [Partial() if w == Replicate() and t == Shard(0) else w for w, t in zip(placements, x.placements)]
    return weight.to_local(grad_placements=grads)


def layer(x, topk_ids, topk_weights, up, down, extras):
    """y as a DTensor of x's mesh and placements."""
    if not isinstance(x, DTensor):
        raise wrong("x", "a plain tensor", "a DTensor is expected, as another argument is one")
    mesh = x.device_mesh
    ep = _expert_dimension(mesh, up)
    if up.shape[0] % mesh.size(ep):
        raise wrong("the number of experts of up_proj_weight", up.shape[0],
                    f"a multiple of the {mesh.size(ep)} ranks of mesh dimension {ep} is needed")
    if up.shape[0] != down.shape[0]:
        raise wrong("the number of experts of down_proj_weight", down.shape[0],
                    f"that of up_proj_weight, {up.shape[0]}, is expected")
    _check_tokens(x, topk_ids, topk_weights, mesh, ep)
    everywhere = (Replicate(),) * mesh.ndim
    local = {}
    for field, name in (("shared_up", "shared_up_proj_weight"), ("shared_down", "shared_down_proj_weight")):
        weight = getattr(extras, field)
        if weight is not None:
            local[field] = _local_weight(name, weight, x, everywhere)
    y = _torch.local(x.to_local(), topk_ids.to_local(), topk_weights.to_local(),
                     _local_weight("up_proj_weight", up, x, up.placements),
                     _local_weight("down_proj_weight", down, x,
                                   up.placements), extras._replace(**local) if local else extras,
                     _torch.group_of(mesh.get_group(ep)))
    return DTensor.from_local(y, mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())
