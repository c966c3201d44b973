"""Hugging Face transformers (5.24 and later): every expert layer of a model in one fused call.

    from hyper_parallel.integrations.transformers import enable
    enable(model)                                             # a model that is there
    AutoModelForCausalLM.from_pretrained(..., experts_implementation="hyper_mega_moe")      # or when loading
    DistributedConfig(..., ep_size=R, ep_implementation="hyper_mega_moe")                   # expert parallel, too

The two names exist once this module has been imported.
"""

import itertools
import warnings
from typing import NamedTuple, Tuple

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from .. import _torch
from .._shapes import Extras

NAME = "hyper_mega_moe"
_told = set()


def _tell_once(text):
    if text not in _told:
        _told.add(text)
        warnings.warn(text, stacklevel=3)


# ---------------------------------------------------------------- which gate is it?


class _Gate(NamedTuple):
    interleaved: bool
    activation: Tuple[float, float, float]  # alpha, limit, offset; see include/hmoe.h


def _gate_reference(gate, up, alpha, limit, offset):
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + offset)


def _numbers(experts, *names):
    """What the module or its configuration calls so."""
    for holder in (experts, getattr(experts, "config", None)):
        for name in names:
            value = getattr(holder, name, None)
            if isinstance(value, (int, float)) and value:
                yield float(value)


def _recognise(experts):
    """The _Gate whose values the module's own _apply_gate gives, or None. Families overwrite that method: what it
    computes tells, not its name."""
    generator = torch.Generator().manual_seed(1)
    gate, up = (torch.randn(64, 16, generator=generator, device="cpu") * 6 for _ in range(2))
    alphas = {1.0, 1.702, *_numbers(experts, "alpha", "swiglu_alpha")}
    limits = {0.0, *_numbers(experts, "limit", "swiglu_limit")}
    for interleaved in (False, True):
        both = torch.stack((gate, up), -1).flatten(1) if interleaved else torch.cat((gate, up), -1)
        with torch.no_grad():
            try:
                got = experts._apply_gate(both)
            except Exception:  # another family's idea of its input
                continue
        for activation in itertools.product(sorted(alphas), sorted(limits), (0.0, 1.0)):
            expected = _gate_reference(gate, up, *activation)
            if got.shape == expected.shape and torch.allclose(got, expected, rtol=1e-5, atol=1e-5):
                return _Gate(interleaved, activation)
    return None


def _why_not(experts):
    """None, or why the kernel cannot run this module."""
    if not getattr(experts, "has_gate", True):
        return "its experts have no gate"
    if getattr(experts, "has_post_expert_norm", False):
        return "it normalises each expert's output"
    if _gate_of(experts) is None:
        return "the kernel does not know its activation"
    if experts.gate_up_proj.dtype not in _torch._FLOATS:
        return f"its weights are {experts.gate_up_proj.dtype}"
    return None


def _gate_of(experts):
    found = experts.__dict__.get("_hyper_mega_moe_gate", False)
    if found is False:
        found = experts.__dict__["_hyper_mega_moe_gate"] = _recognise(experts)
    return found


def _usable(experts):
    reason = _why_not(experts)
    if reason:
        _tell_once(f"{NAME}: {type(experts).__name__} keeps its own path: {reason}")
    return reason is None


# ---------------------------------------------------------------- one layer


def _weights(experts):
    """up, down in the public shapes, and Extras; views of the parameters."""
    up, down = experts.gate_up_proj, experts.down_proj
    if not experts.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    biases = (experts.gate_up_proj_bias, experts.down_proj_bias) if experts.has_bias else (None, None)
    return up, down, Extras(*biases, None, None, *_gate_of(experts))


def _known_ids(top_k_index, experts):
    """transformers marks slots of other ranks' experts with numbers from `experts` on."""
    return top_k_index.masked_fill(top_k_index >= experts, -1)


def experts_forward(self, hidden_states, top_k_index, top_k_weights):
    """What transformers calls instead of the module's forward."""
    if not _usable(self) or hidden_states.dtype != self.gate_up_proj.dtype or hidden_states.device.type != "cpu":
        return ALL_EXPERTS_FUNCTIONS["grouped_mm"](self, hidden_states, top_k_index, top_k_weights)
    up, down, extras = _weights(self)
    return _torch.entry(hidden_states, _known_ids(top_k_index, up.shape[0]), top_k_weights, up, down, extras)


def _undispatched(model):
    """Modules that hold experts and never ask transformers who runs them."""
    return [module for module in model.modules() if not hasattr(module, "_apply_gate")
            and "experts" in type(module).__name__.lower() and next(module.parameters(), None) is not None]


def enable(model):
    """Switches every expert layer of a transformers model to hyper_mega_moe; returns the model.

    Layers that the kernel cannot run keep their path, with one warning a family. ValueError: no expert layer at all.
    """
    layers = [module for module in model.modules() if hasattr(module, "_apply_gate")]
    others = _undispatched(model)
    if not layers and not others:
        raise ValueError(f"model is a {type(model).__name__} without expert layers: a Mixture-of-Experts model is"
                         " expected")
    for module in others:
        _tell_once(f"{NAME}: {type(module).__name__} keeps its own path: transformers does not dispatch it")
    usable = [_usable(module) for module in layers]
    if any(usable):
        model.set_experts_implementation(NAME)
    return model


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)

# ---------------------------------------------------------------- expert parallel

if torch.distributed.is_available():
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from transformers.distributed.expert_parallel import AllToAllEP, EPImplementation, EPImplementationInterface

    class HyperMegaMoEEP(EPImplementation):
        """Dispatch, experts and combine of a rank's tokens in the one fused call over the expert group."""

        def __init__(self, experts, ep_mesh, tp_mesh):
            super().__init__(experts, ep_mesh, tp_mesh)
            self.experts = experts
            self.total = experts.num_experts * ep_mesh.size()
            self.other = None if _usable(experts) else AllToAllEP(experts, ep_mesh, tp_mesh)

        def _own_part(self, tensor):
            """Ranks of a tensor-parallel group hold the same tokens: each takes some."""
            return DTensor.from_local(tensor, self.tp_mesh, [Replicate()], run_check=False).redistribute(
                self.tp_mesh, [Shard(0)]).to_local()

        def __call__(self, hidden_states, top_k_index, top_k_weights):
            if self.other is not None:
                return self.other(hidden_states, top_k_index, top_k_weights)
            tensors = hidden_states, _known_ids(top_k_index, self.total), top_k_weights
            if self.tp_mesh.size() > 1:
                tensors = map(self._own_part, tensors)
            up, down, extras = _weights(self.experts)
            y = _torch.local(*tensors, up, down, extras, _torch.group_of(self.ep_mesh.get_group()))
            if self.tp_mesh.size() > 1:
                y = DTensor.from_local(y, self.tp_mesh, [Shard(0)], run_check=False, shape=hidden_states.shape,
                                       stride=hidden_states.stride()).full_tensor()
            return y

    EPImplementationInterface.register(NAME, HyperMegaMoEEP)
