"""The operators that SGLang's gated delta net (Qwen3.5, Qwen3-Next) calls on a CPU, in plain torch. Slow; for tests.

Sizes: T tokens of all sequences, B sequences of one token each, D channels, W width of the convolution, HK and HV heads
of keys and values, K and V their sizes. Signatures are those that SGLang 0.5.23 calls.
"""

import importlib.machinery
import itertools
import sys

import torch
import torch.nn.functional as F


def causal_conv1d_fn_cpu(
    x,
    weight,
    bias=None,
    activation="silu",
    conv_states=None,
    has_initial_state=None,
    cache_indices=None,
    query_start_loc=None,
    seq_lens_cpu=None,
    **_,
):
    """Prefill: x [D, T], one causal convolution a sequence; conv_states [slots, D, W-1] is read and written."""
    channels, width = weight.shape
    out = torch.empty_like(x)
    bounds = query_start_loc.tolist()
    for i, (begin, end) in enumerate(itertools.pairwise(bounds)):
        if end <= begin:
            continue
        slot = int(cache_indices[i])
        known = bool(has_initial_state[i])
        before = conv_states[slot].to(x.dtype) if known else x.new_zeros(channels, width - 1)
        segment = torch.cat([before, x[:, begin:end]], -1)
        offset = None if bias is None else bias.float()
        y = F.conv1d(segment[None].float(), weight[:, None].float(), offset, groups=channels)[0]
        out[:, begin:end] = _activate(y, activation).to(x.dtype)
        conv_states[slot] = segment[:, -(width - 1) :].to(conv_states.dtype)
    return out


def causal_conv1d_update_cpu(x, conv_state, weight, bias=None, activation=None, conv_state_indices=None, **_):
    """Decode: x [B, D]; a negative slot is padding."""
    slots = conv_state_indices.long()
    real = slots >= 0
    segment = torch.cat([conv_state[slots.clamp_min(0)].to(x.dtype), x[..., None]], -1)
    y = (segment.float() * weight.float()).sum(-1)
    if bias is not None:
        y = y + bias.float()
    conv_state[slots[real]] = segment[real, :, 1:].to(conv_state.dtype)
    return _activate(y, activation).to(x.dtype)


def fused_gdn_gating_cpu(A_log, a, b, dt_bias, *_, **__):
    """Log decay and write strength, both [1, T, HV]."""
    decay = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return decay[None], torch.sigmoid(b.float())[None]


def chunk_gated_delta_rule_cpu(
    q,
    k,
    v,
    g,
    beta,
    initial_state=None,
    initial_state_indices=None,
    cu_seqlens=None,
    head_first=False,
    use_qk_l2norm_in_kernel=True,
    **_,
):
    """Prefill: q, k [1, T, HK, K], v [1, T, HV, V]; initial_state [slots, HV, V, K] is read and written."""
    repeats = v.shape[2] // q.shape[2]
    q, k = (_unit(q), _unit(k)) if use_qk_l2norm_in_kernel else (q.float(), k.float())
    q = (q * q.shape[-1] ** -0.5)[0].repeat_interleave(repeats, 1)
    k = k[0].repeat_interleave(repeats, 1)
    values, decay, strength = v[0].float(), g[0].float(), beta[0].float()
    out = torch.empty_like(v)
    bounds = cu_seqlens.tolist()
    for i, (begin, end) in enumerate(itertools.pairwise(bounds)):
        slot = int(initial_state_indices[i])
        state = initial_state[slot].float()
        for t in range(begin, end):
            state, y = _delta_step(state, q[t], k[t], values[t], decay[t], strength[t])
            out[0, t] = y.to(v.dtype)
        initial_state[slot] = state.to(initial_state.dtype)
    return out, None, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log,
    dt_bias,
    q,
    k,
    v,
    a,
    b,
    initial_state_source,
    initial_state_indices,
    cu_seqlens=None,
    use_qk_l2norm_in_kernel=True,
    **_,
):
    """Decode: one token of each sequence along T."""
    repeats = v.shape[2] // q.shape[2]
    q, k = (_unit(q), _unit(k)) if use_qk_l2norm_in_kernel else (q.float(), k.float())
    q = (q * q.shape[-1] ** -0.5)[0].repeat_interleave(repeats, 1)
    k = k[0].repeat_interleave(repeats, 1)
    decay, strength = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    slots = initial_state_indices.long()
    real = slots >= 0
    before = initial_state_source[slots.clamp_min(0)].float()
    state, y = _delta_step(before, q, k, v[0].float(), decay[0].view(len(slots), -1), strength[0].view(len(slots), -1))
    initial_state_source[slots[real]] = state[real].to(initial_state_source.dtype)
    return y.to(v.dtype)[None]


def fused_qkvzba_split_reshape_cat_contiguous_cpu(qkvz, ba, key_heads, value_heads, key_dim, value_dim):
    """Splits the two input projections into qkv [T, ...], z [T, HV, V], b and a [T, HV]."""
    qkv, z = qkvz.split([2 * key_heads * key_dim + value_heads * value_dim, value_heads * value_dim], -1)
    b, a = ba.split([value_heads, value_heads], -1)
    return qkv.contiguous(), z.reshape(len(qkvz), value_heads, value_dim).contiguous(), b.contiguous(), a.contiguous()


def fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, head_dim):
    return _rms_norm(q.reshape(-1, head_dim), q_weight, eps), _rms_norm(k.reshape(-1, head_dim), k_weight, eps)


def fused_qk_gemma_rmsnorm_with_gate_cpu(q_gate, k, q_weight, k_weight, eps, head_dim, num_heads):
    q, gate = q_gate.view(q_gate.shape[0], num_heads, 2 * head_dim).chunk(2, -1)
    q, k = fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, head_dim)
    return q, k, gate.reshape(-1, head_dim).contiguous()


def fused_sigmoid_mul_cpu(x, gate):
    x.mul_(torch.sigmoid(gate.float()).reshape(x.shape).to(x.dtype))
    return x


def fused_rmsnorm_gated_cpu(x, weight, z, eps):
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
    return (y * F.silu(z.float())).to(x.dtype)


def _unit(x, eps=1e-6):
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


def _activate(x, activation):
    return F.silu(x) if activation in ("silu", "swish", True) else x


def _delta_step(state, q, k, v, decay, strength):
    """One token: state [.., HV, V, K], q, k [.., HV, K], v [.., HV, V], decay, strength [.., HV]."""
    state = state * decay.exp()[..., None, None]
    write = (v - (state * k[..., None, :]).sum(-1)) * strength[..., None]
    state = state + write[..., :, None] * k[..., None, :]
    return state, (state * q[..., None, :]).sum(-1)


def _rms_norm(x, weight, eps):
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * (1.0 + weight.float())).to(x.dtype)


OPERATORS = {name: value for name, value in list(globals().items()) if name.endswith("_cpu")}
for _name, _operator in OPERATORS.items():
    setattr(torch.ops.sgl_kernel, _name, _operator)


class _UseCpu:
    """SGLang takes its gated norm's CPU operator only where the CPU has AMX; these modules are told that it has."""

    modules = (
        "sglang.kernels.ops.attention.fla.layernorm_gated",
        "sglang.kernels.ops.attention.fla.fused_norm_gate",
    )

    def find_spec(self, fullname, path=None, target=None):
        if fullname not in self.modules:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            module._use_cpu = True

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _UseCpu())
