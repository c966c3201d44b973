"""hyper_mega_moe on PyTorch tensors."""

import gc
import os
import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import hyper_parallel
from hyper_parallel import _core, _memory, _torch
from hyper_parallel._shapes import Extras
from hyper_parallel.custom_ops.experimental import HyperMegaMoEDFunction, hyper_mega_moe

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Layer:
    """Leaves of one layer, and the same in plain PyTorch operations."""

    def __init__(self, tokens=21, hidden=48, inner=40, experts=6, topk=3, dtype=torch.float32, transposed=False,
                 weights_dtype=torch.float32, ids_dtype=torch.int64, shared=0, seed=0):
        g = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=g)

        def weight(count, rows, columns):
            if transposed:
                return (normal(count, columns, rows) * 0.2).to(dtype).requires_grad_()
            return (normal(count, rows, columns) * 0.2).to(dtype).requires_grad_()

        self.transposed = transposed
        self.x = normal(tokens, hidden).to(dtype).requires_grad_()
        self.ids = torch.randint(0, experts, (tokens, topk), generator=g).to(ids_dtype)
        if tokens > 3:
            self.ids[3] = -1
        self.weights = torch.rand(tokens, topk, generator=g).to(weights_dtype).requires_grad_()
        self.parameters = [weight(experts, hidden, 2 * inner), weight(experts, inner, hidden)]
        if shared:
            self.parameters += [weight(shared, hidden, 2 * (inner + 3)), weight(shared, inner + 3, hidden)]
        self.dy = normal(tokens, hidden).to(dtype)

    def leaves(self):
        return [self.x, self.weights, *self.parameters]

    def views(self):
        return [p.transpose(1, 2) if self.transposed else p for p in self.parameters]

    def ours(self):
        up, down, *shared = self.views()
        names = ("shared_up_proj_weight", "shared_down_proj_weight")
        return hyper_mega_moe(self.x, self.ids, self.weights, up, down, **dict(zip(names, shared)))

    def theirs(self, dtype=None):
        """The unfused chain, in the layer's dtype or another one."""
        x, weights, up, down, *shared = [t if dtype is None else t.to(dtype)
                                         for t in (self.x, self.weights, *self.views())]

        def expert(rows, up, down):
            gate, up = (rows @ up).chunk(2, -1)
            return (torch.nn.functional.silu(gate) * up) @ down

        y = torch.zeros_like(x)
        for e in range(up.shape[0]):
            token, slot = (self.ids == e).nonzero(as_tuple=True)
            rows = expert(x[token], up[e], down[e]) * weights[token, slot, None].to(x.dtype)
            y = y.index_add(0, token, rows)
        for s in range(shared[0].shape[0] if shared else 0):
            y = y + expert(x, shared[0][s], shared[1][s])
        return y

    def gradients(self, y, dy=None):
        for leaf in self.leaves():
            leaf.grad = None
        y.backward(self.dy.to(y.dtype) if dy is None else dy)
        return [leaf.grad for leaf in self.leaves()]


def error(got, wanted):
    return (got.double() - wanted.double()).abs().mean().item()


@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_parity(dtype, transposed, shared, record_property):
    """Against float64 our error is at most 1.1 times the unfused chain's."""
    layer = Layer(tokens=160, hidden=96, inner=64, dtype=dtype, transposed=transposed, shared=shared)
    double = layer.theirs(torch.float64)
    truth = [double, *layer.gradients(double)]
    chain = layer.theirs()
    chain = [chain, *layer.gradients(chain)]
    y = layer.ours()
    mine = [y, *layer.gradients(y)]
    for name, a, b, c in zip(("y", "dx", "d_weights", "d_up", "d_down", "d_shared_up", "d_shared_down"), mine, chain,
                             truth):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert error(a, c) <= 1.1 * error(b, c) + 1e-12, name
        near = torch.isclose(a.double(), c.double(), rtol=1e-3, atol=1e-3).double().mean().item()
        record_property(f"share of {name} within 1e-3", near)
        share = error(a, c) / max(error(b, c), 1e-30)
        print(f"{dtype} {name}: {near:.4f} within rtol = atol = 1e-3; error {share:.3f} of the chain's")


def test_gradcheck():
    """Numeric differences in float32."""
    layer = Layer(tokens=5, hidden=6, inner=4, experts=3, topk=2, shared=1)
    names = ("shared_up_proj_weight", "shared_down_proj_weight")

    def function(x, weights, *parameters):
        up, down, *shared = parameters
        return hyper_mega_moe(x, layer.ids, weights, up, down, **dict(zip(names, shared)))

    assert torch.autograd.gradcheck(function, layer.leaves(), eps=1e-2, atol=2e-2, rtol=2e-2, nondet_tol=0.0,
                                    fast_mode=False)


@pytest.mark.parametrize("weights_dtype", DTYPES)
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_kinds_of_routing(weights_dtype, ids_dtype):
    wide, narrow = (Layer(weights_dtype=w, ids_dtype=i) for w, i in ((torch.float32, torch.int64),
                                                                     (weights_dtype, ids_dtype)))
    wide.weights = narrow.weights.detach().float().requires_grad_()
    a, b = wide.ours(), narrow.ours()
    assert torch.equal(a, b)
    grads = wide.gradients(a)
    for i, (p, q) in enumerate(zip(grads, narrow.gradients(b))):
        assert torch.equal(p.to(q.dtype), q), i
    assert narrow.weights.grad.dtype == weights_dtype and not narrow.weights.grad[3].any()


def test_zero_copy_and_copies():
    """Weights are where they are; activations may have any strides."""
    layer = Layer(transposed=True)
    expected = layer.ours().detach()
    up, down = layer.views()
    wide = torch.zeros(21, 96)
    wide[:, ::2] = layer.x.detach()
    strided = hyper_mega_moe(wide[:, ::2], layer.ids.t().contiguous().t(), layer.weights.t().contiguous().t(), up, down)
    assert torch.equal(strided, expected)
    for tensors in ((up[:, :, ::2], down), (up.contiguous(), down), (up, down.contiguous())):
        with pytest.raises(ValueError, match="(strides|shape|layout) of (up|down)_proj_weight"):
            hyper_mega_moe(layer.x, layer.ids, layer.weights, *tensors)


def test_unaligned():
    """Tensors that start anywhere in memory."""
    layer = Layer()
    expected = layer.ours()

    def shifted(t):
        room = torch.empty(t.numel() + 1, dtype=t.dtype)
        return room[1:].view(t.shape).copy_(t)

    up, down = layer.views()
    assert torch.equal(hyper_mega_moe(*map(shifted, (layer.x.detach(), layer.ids, layer.weights.detach(), up.detach(),
                                                     down.detach()))), expected)


@pytest.mark.parametrize("tokens", [0, 1, 2, 130])
def test_token_counts(tokens):
    layer = Layer(tokens=tokens)
    y = layer.ours()
    assert y.shape == (tokens, 48)
    grads = layer.gradients(y)
    if not tokens:
        assert not grads[2].any() and not grads[3].any()
    else:
        assert torch.allclose(y, layer.theirs(), atol=1e-5)


def test_more_tokens_than_planned():
    layer = Layer(tokens=40)
    first = layer.ours()
    big = Layer(tokens=_core.LOCAL_TOKENS + 5, seed=1)
    y = big.ours()
    assert torch.allclose(y, big.theirs(), atol=1e-4)
    for a, b in zip(layer.gradients(first), layer.gradients(layer.ours())):  # the first plan's saved state
        assert torch.equal(a, b)


def test_several_forwards_then_backwards_in_any_order():
    layers = [Layer(seed=s) for s in range(4)]
    expected = [layer.gradients(layer.ours()) for layer in layers]
    outputs = [layer.ours() for layer in layers]
    for i in (2, 0, 3, 1):
        for a, b in zip(layers[i].gradients(outputs[i]), expected[i]):
            assert torch.equal(a, b)


def test_accumulation():
    """.grad of two backwards is their sum."""
    layer = Layer(dtype=torch.bfloat16)
    once = [g.clone() for g in layer.gradients(layer.ours())]
    for leaf in layer.leaves():
        leaf.grad = None
    for _ in range(2):
        layer.ours().backward(layer.dy)
    for leaf, g in zip(layer.leaves(), once):
        assert torch.equal(leaf.grad, g + g)


def test_needs_input_grad():
    everything = Layer()
    expected = everything.gradients(everything.ours())
    for wanted in range(1, 16):
        layer = Layer()
        for i, leaf in enumerate(layer.leaves()):
            leaf.requires_grad_(bool(wanted >> i & 1))
        layer.ours().backward(layer.dy)
        for i, leaf in enumerate(layer.leaves()):
            if wanted >> i & 1:
                assert torch.equal(leaf.grad, expected[i])
            else:
                assert leaf.grad is None


def test_retain_graph():
    layer = Layer()
    y = layer.ours()
    first = torch.autograd.grad(y, layer.leaves(), layer.dy, retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(y, layer.leaves(), layer.dy)):
        assert torch.equal(a, b)


def test_double_backward_is_refused():
    layer = Layer()
    dx, = torch.autograd.grad(layer.ours(), layer.x, layer.dy.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def saved_in_use():
    """Saved states that nobody gave back."""
    gc.collect()
    plans = _core.local_group()._plans.values()
    return sum(len(p._handles) - len(p._free) for p in plans)


def test_nothing_is_saved_when_nothing_is_needed():
    before = saved_in_use()
    layer = Layer()
    with torch.no_grad():
        y = layer.ours()
    assert not y.requires_grad
    assert hyper_mega_moe(layer.x.detach(), layer.ids, layer.weights.detach(),
                          *(v.detach() for v in layer.views())).requires_grad is False
    assert saved_in_use() == before
    y = layer.ours()
    assert saved_in_use() == before + 1
    del y  # no backward
    assert saved_in_use() == before
    layer.gradients(layer.ours())
    assert saved_in_use() == before


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    """The same gradients, and no saved state between forward and backward."""
    layer = Layer()
    expected = layer.gradients(layer.ours())
    before = saved_in_use()
    y = checkpoint(lambda x: layer.ours(), layer.x, use_reentrant=reentrant)
    assert saved_in_use() == before
    for a, b in zip(layer.gradients(y), expected):
        assert torch.equal(a, b)
    del y
    assert saved_in_use() == before


def test_offloaded_activations():
    """Saved tensors may be moved away and come back somewhere else."""
    layer = Layer()
    expected = layer.gradients(layer.ours())
    before = saved_in_use()
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        y = layer.ours()
    assert saved_in_use() == before
    for a, b in zip(layer.gradients(y), expected):
        assert torch.equal(a, b)


@pytest.mark.parametrize("transposed", [False, True])
def test_compile(transposed):
    layer = Layer(transposed=transposed, shared=1)
    expected = layer.ours()
    grads = layer.gradients(expected)
    before = saved_in_use()

    @torch.compile(fullgraph=True)
    def function(x):
        return layer.ours() * 2.0 + x * 0.0

    y = function(layer.x)
    assert torch.equal(y, expected * 2.0)
    for i, (a, b) in enumerate(zip(layer.gradients(y, layer.dy * 0.5), grads)):
        assert torch.equal(a, b), i
    del y
    assert saved_in_use() == before
    with torch.no_grad():
        assert torch.equal(function(layer.x), expected * 2.0)


def test_opcheck():
    layer = Layer(tokens=4)
    arguments = (layer.x, layer.ids, layer.weights, *layer.views(), None, None, None, None, False, 1.0, 0.0, 0.0)
    torch.library.opcheck(torch.ops.hyper_parallel.mega_moe, (*arguments, False),
                          test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(torch.ops.hyper_parallel.mega_moe, (*arguments, True), test_utils=("test_faketensor",))


def test_biases_and_gates():
    """Hugging Face's extras: biases, interleaved columns, the clamped activation."""
    layer = Layer(experts=4, inner=24)
    up, down = layer.views()
    up_bias, down_bias = (torch.randn(4, n) * 0.3 for n in (48, 48))
    for bias in (up_bias, down_bias):
        bias.requires_grad_()
    extras = Extras(up_bias=up_bias, down_bias=down_bias, interleaved=True, activation=(1.702, 7.0, 1.0))
    y = _torch.entry(layer.x, layer.ids, layer.weights, up, down, extras)
    wanted = torch.zeros_like(y)
    for e in range(4):
        token, slot = (layer.ids == e).nonzero(as_tuple=True)
        h = layer.x[token] @ up[e] + up_bias[e]
        gate, lift = h[:, ::2].clamp(max=7.0), h[:, 1::2].clamp(-7.0, 7.0)
        out = ((lift + 1) * gate * torch.sigmoid(1.702 * gate)) @ down[e] + down_bias[e]
        wanted = wanted.index_add(0, token, out * layer.weights[token, slot, None])
    assert torch.allclose(y, wanted, atol=1e-5)
    leaves = [*layer.leaves(), up_bias, down_bias]
    for a, b in zip(torch.autograd.grad(y, leaves, layer.dy), torch.autograd.grad(wanted, leaves, layer.dy)):
        assert torch.allclose(a, b, atol=1e-4)


def test_threads():
    """Calls from several threads take turns."""
    layers = [Layer(seed=s) for s in range(4)]
    expected = [[layer.ours().detach(), *layer.gradients(layer.ours())] for layer in layers]
    wrong = []

    def work(i):
        for _ in range(30):
            y = layers[i].ours()
            for a, b in zip([y.detach(), *layers[i].gradients(y)], expected[i]):
                if not torch.equal(a, b):
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_fork():
    """A forked child makes a group of its own; what the parent saved is the parent's."""
    layer = Layer()
    y = layer.ours()
    expected = y.detach().clone()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with torch.no_grad():
                same = torch.equal(layer.ours(), expected)
            try:
                y.backward(layer.dy)
            except RuntimeError as refused:
                code = 0 if same and "forked" in str(refused) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    layer.gradients(y)


def test_large_gradients_use_the_same_memory():
    layer = Layer(experts=4, hidden=512, inner=512)
    layer.gradients(layer.ours())
    where = [p.grad.data_ptr() for p in layer.parameters]
    kept = layer.parameters[0].grad
    assert kept.data_ptr() % 64 == 0
    value = kept.clone()
    grads = layer.gradients(layer.ours())  # `kept` is in use: it must not be written
    assert torch.equal(kept, value) and grads[2].data_ptr() != kept.data_ptr()
    del kept, grads
    for leaf in layer.leaves():
        leaf.grad = None
    gc.collect()
    layer.gradients(layer.ours())
    assert layer.parameters[1].grad.data_ptr() in where or layer.parameters[0].grad.data_ptr() in where
    assert sum(len(v) for v in _memory._idle.values()) > 0
    hyper_parallel.trim()
    assert not _memory._idle


def refuse(text, kind, **changes):
    layer = Layer()
    up, down = layer.views()
    arguments = dict(x=layer.x, topk_ids=layer.ids, topk_weights=layer.weights, up_proj_weight=up,
                     down_proj_weight=down)
    arguments.update({name: change(arguments.get(name)) for name, change in changes.items()})
    with pytest.raises(kind) as raised:
        hyper_mega_moe(**arguments)
    assert text in str(raised.value), str(raised.value)
    assert torch.isfinite(layer.ours()).all()  # still usable


@pytest.mark.parametrize("text, kind, changes", [
    ("x is a list", TypeError, dict(x=lambda t: t.tolist())),
    ("the dtype of x is torch.float64: torch.float32 or torch.bfloat16 or torch.float16", ValueError,
     dict(x=lambda t: t.double())),
    ("the shape of x is [21, 48, 1]: [T,H]", ValueError, dict(x=lambda t: t[..., None])),
    ("the device of x is meta: tensors must be on the CPU", ValueError, dict(x=lambda t: t.to("meta"))),
    ("the layout of x is torch.sparse_coo", ValueError, dict(x=lambda t: t.detach().to_sparse())),
    ("the dtype of topk_ids is torch.int16", ValueError, dict(topk_ids=lambda t: t.short())),
    ("the shape of topk_ids is [20, 3]: [T,K] = [21,K]", ValueError, dict(topk_ids=lambda t: t[1:])),
    ("the shape of topk_weights is [21, 2]: [T,K] = [21,3]", ValueError, dict(topk_weights=lambda t: t[:, 1:])),
    ("the dtype of topk_weights is torch.float64", ValueError, dict(topk_weights=lambda t: t.double())),
    ("the dtype of up_proj_weight is torch.bfloat16: torch.float32 is expected", ValueError,
     dict(up_proj_weight=lambda t: t.bfloat16())),
    ("the shape of up_proj_weight is [6, 47, 80]", ValueError, dict(up_proj_weight=lambda t: t[:, 1:])),
    ("the last size of up_proj_weight is 79", ValueError, dict(up_proj_weight=lambda t: t[:, :, 1:])),
    ("the strides of up_proj_weight", ValueError, dict(up_proj_weight=lambda t: torch.zeros(6, 48, 160)[:, :, ::2])),
    ("the layout of down_proj_weight is transposed", ValueError,
     dict(down_proj_weight=lambda t: t.transpose(1, 2).contiguous().transpose(1, 2))),
    ("the shape of down_proj_weight is [5, 40, 48]: [L,I,H] = [6,40,48]", ValueError,
     dict(down_proj_weight=lambda t: t[1:])),
    ("shared_down_proj_weight is None: it is needed with shared_up_proj_weight", ValueError,
     dict(shared_up_proj_weight=lambda t: torch.zeros(1, 48, 6))),
    ("shared_up_proj_weight is None", ValueError, dict(shared_down_proj_weight=lambda t: torch.zeros(1, 3, 48))),
    ("the shape of shared_up_proj_weight", ValueError, dict(shared_up_proj_weight=lambda t: torch.zeros(1, 48, 5),
                                                            shared_down_proj_weight=lambda t: torch.zeros(1, 2, 48))),
    ("topk_ids of rank 0, token 4, slot 1 is 6: allowed are 0..5", hyper_parallel.Error,
     dict(topk_ids=lambda t: t.index_put((torch.tensor(4), torch.tensor(1)), torch.tensor(6)))),
    ("missing 1 required positional argument: 'down_proj_weight'", TypeError, None),
])
def test_bad_input(text, kind, changes):
    if changes is None:
        with pytest.raises(kind, match=text):
            hyper_mega_moe(1, 2, 3, 4)
        return
    refuse(text, kind, **changes)
