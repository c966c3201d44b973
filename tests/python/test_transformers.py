"""Hugging Face models: ours against their own, logits, gradients, tokens and loss curves."""

import warnings

import pytest
import torch

pytest.importorskip("transformers", minversion="5.24")

import launch
import tiny_models
from hyper_parallel.integrations import transformers as ours

FAMILIES = list(tiny_models.FAMILIES)


def batch(rows=2, length=24):
    return torch.randint(3, 128, (rows, length), generator=torch.Generator().manual_seed(5))


def close(a, b, tolerance):
    return (a - b).abs().max().item() <= tolerance * max(1e-6, b.abs().max().item())


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients(family):
    theirs, mine = tiny_models.make(family, "eager"), tiny_models.make(family, "hyper_mega_moe")
    ids = batch()
    outputs = [model(ids, labels=ids) for model in (theirs, mine)]
    for output in outputs:
        output.loss.backward()
    assert close(outputs[1].logits, outputs[0].logits, 1e-4)
    compared = 0
    for (name, a), (_, b) in zip(theirs.named_parameters(), mine.named_parameters()):
        if a.grad is None:
            assert b.grad is None or not b.grad.any(), name
            continue
        assert close(b.grad, a.grad, 1e-3), name
        compared += "experts" in name
    assert compared >= 2


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens(family):
    ids = batch(2, 8)
    kinds = [tiny_models.make(family, kind).eval() for kind in ("eager", "hyper_mega_moe")]
    tokens = [model.generate(ids, max_new_tokens=24, do_sample=False) for model in kinds]
    assert torch.equal(*tokens)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_enable_and_bf16(family):
    """enable() is the same as choosing at load time; in bf16 we are as near to float32 as their own."""
    chosen, enabled = tiny_models.make(family, "hyper_mega_moe"), tiny_models.make(family, "grouped_mm")
    assert ours.enable(enabled) is enabled
    ids = batch()
    with torch.no_grad():
        reference = chosen(ids).logits
        assert torch.equal(reference, enabled(ids).logits)
        errors = [(tiny_models.make(family, kind, torch.bfloat16)(ids).logits.float() - reference).abs().median()
                  for kind in ("grouped_mm", "hyper_mega_moe")]
    assert errors[1] <= 1.2 * errors[0]


def test_alone_or_in_a_batch():
    """A layer's output of a token has the same bits whatever else is in the call."""
    model = tiny_models.make("qwen3_moe", "hyper_mega_moe", torch.bfloat16)
    experts = model.model.layers[0].mlp.experts
    torch.manual_seed(3)
    x = torch.randn(19, 64).bfloat16()
    ids, weights = torch.randint(0, 8, (19, 3)), torch.rand(19, 3).bfloat16()
    with torch.no_grad():
        whole = experts(x, ids, weights)
        for t in range(19):
            assert torch.equal(experts(x[t:t + 1], ids[t:t + 1], weights[t:t + 1])[0], whole[t])


def test_ids_of_other_ranks():
    """Slots with ids from num_experts on give nothing, forward and backward."""
    model = tiny_models.make("mixtral", "hyper_mega_moe")
    experts = model.model.layers[0].mlp.experts
    torch.manual_seed(3)
    x, weights = torch.randn(7, 64), torch.rand(7, 2)
    ids = torch.randint(0, 8, (7, 2))
    ids[2], ids[3, 1] = 8, 11
    got = []
    for masked in (False, True):
        leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
        y = experts(leaves[0], ids, leaves[1]) if masked else experts(
            leaves[0], ids.clamp(max=7), leaves[1] * (ids < 8))
        model.zero_grad()
        y.sum().backward()
        got.append([y.detach(), leaves[0].grad, leaves[1].grad * (ids < 8), experts.gate_up_proj.grad.clone()])
        if masked:
            assert not y[2].any() and not leaves[1].grad[2].any() and not leaves[1].grad[3, 1]
    for a, b in zip(*got):
        assert close(a, b, 1e-5)


def test_fine_tuning():
    """The same loss curve."""
    curves = []
    for kind in ("eager", "hyper_mega_moe"):
        model = tiny_models.make("olmoe", kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        curve = []
        for step in range(6):
            loss = model(batch(), labels=batch()).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
        curves.append(curve)
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)
    assert curves[1][-1] < curves[1][0] - 0.2


def test_gates():
    """Each form is recognised by what it computes; others are left alone, and said once."""
    from torch.nn import functional as F

    class Module(torch.nn.Module):
        def __init__(self, gate, **attributes):
            super().__init__()
            self._apply_gate = gate
            self.has_gate, self.has_post_expert_norm = True, False
            self.gate_up_proj = torch.zeros(1)
            self.__dict__.update(attributes)

    def halves(t):
        return t.chunk(2, -1)

    def clamped(t):
        gate, up = halves(t)
        return F.silu(gate.clamp(max=10.0)) * up.clamp(-10.0, 10.0)

    def oss(t):
        gate, up = halves(t)
        return (up.clamp(-7, 7) + 1) * gate.clamp(max=7) * torch.sigmoid(1.702 * gate.clamp(max=7))

    def gelu(t):
        gate, up = halves(t)
        return F.gelu(gate) * up

    assert ours._recognise(Module(lambda t: F.silu(halves(t)[0]) * halves(t)[1])) == (False, (1.0, 0.0, 0.0))
    assert ours._recognise(Module(clamped, swiglu_limit=10.0)) == (False, (1.0, 10.0, 0.0))
    assert ours._recognise(Module(oss, limit=7.0)) == (False, (1.702, 7.0, 1.0))
    assert ours._recognise(Module(lambda t: F.silu(t[..., ::2]) * t[..., 1::2])) == (True, (1.0, 0.0, 0.0))
    unknown = Module(gelu)
    ours._told.clear()
    with pytest.warns(UserWarning, match="Module keeps its own path: the kernel does not know its activation"):
        assert not ours._usable(unknown)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not ours._usable(unknown)


def test_what_cannot_be_switched():
    from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
    dense = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match="GPT2LMHeadModel without expert layers"):
        ours.enable(dense)
    config = AutoConfig.for_model("llama4_text", vocab_size=64, hidden_size=32, intermediate_size=32,
                                  intermediate_size_mlp=32, num_hidden_layers=2, num_attention_heads=2,
                                  num_key_value_heads=2, num_local_experts=4, interleave_moe_layer_step=1, head_dim=16,
                                  pad_token_id=0)
    model = AutoModelForCausalLM.from_config(config)
    ours._told.clear()
    with pytest.warns(UserWarning, match="Llama4TextExperts keeps its own path: transformers does not dispatch it"):
        ours.enable(model)


def test_a_gelu_family_runs_its_own_path():
    mine = tiny_models.make("mixtral", "hyper_mega_moe", hidden_act="gelu")
    theirs = tiny_models.make("mixtral", "grouped_mm", hidden_act="gelu")
    ours._told.clear()
    with torch.no_grad(), pytest.warns(UserWarning, match="MixtralExperts"):
        assert torch.equal(mine(batch()).logits, theirs(batch()).logits)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_expert_parallel(family, ranks, tmp_path):
    tiny_models.make(family, "eager").save_pretrained(tmp_path)
    launch.run("transformers_ranks.py", ranks, tmp_path)
