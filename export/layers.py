"""Building blocks that the verifier and the drafter share: norms, RoPE, MLP, paged attention.

Written for the graph they become rather than for torch: few nodes, no transposes (heads are laid
out by gathering rows), attention from MatMul, Where and Softmax, which every backend at the
project's opset reads. Norms, RoPE, softmax and the residual stream are fp32 whatever the compute
dtype: hidden states of real models leave fp16's range.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from export.checkpoint import RopeConfig, Weights

MASKED = torch.finfo(torch.float32).min  # finite: a row that sees nothing must not become NaN


def parameter(weight: Tensor, dtype: torch.dtype) -> nn.Parameter:
    """A frozen parameter of `dtype`; one that already is stays itself, so it can be shared."""
    if isinstance(weight, nn.Parameter) and weight.dtype == dtype:
        return weight
    return nn.Parameter(weight.to(dtype).contiguous(), requires_grad=False)


class RmsNorm(nn.Module):
    """x / rms(x) * weight over the last axis, fp32 in and out."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = parameter(weight, torch.float32)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise fp32 `x` [..., d]."""
        # Pow, ReduceMean, Sqrt, Div: the form that ONNX Runtime fuses into one kernel.
        return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Embedding(nn.Module):
    """Rows of a table, as fp32."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter(weight, dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """Map int64 `ids` [...] to [..., d] fp32."""
        return F.embedding(ids, self.weight).float()


class Linear(nn.Module):
    """x W^T + b in the compute dtype, whatever the dtype of `x`."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter(weight, dtype)
        self.bias = None if bias is None else parameter(bias, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` [N, in] to [N, out]."""
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)


def fused_linear(weights: Weights, prefix: str, names: Sequence[str], dtype: torch.dtype) -> Linear:
    """The linear layers `prefix` + each of `names`, of one input, as one matrix of their rows."""
    biases = [weights[f"{prefix}{n}.bias"] for n in names if f"{prefix}{n}.bias" in weights]
    weight = torch.cat([weights[f"{prefix}{n}.weight"] for n in names])
    return Linear(weight, torch.cat(biases) if biases else None, dtype)


class Mlp(nn.Module):
    """down(silu(gate(x)) * up(x)).

    Gate and up are products of their own: ONNX Runtime copies the halves of a common one, which
    takes 8 % of a prefill and more than a second product.
    """

    def __init__(self, weights: Weights, prefix: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate = fused_linear(weights, prefix, ("gate_proj",), dtype)
        self.up = fused_linear(weights, prefix, ("up_proj",), dtype)
        self.down = fused_linear(weights, prefix, ("down_proj",), dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` [N, d] to [N, d]."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Rope(nn.Module):
    """cos and sin of positions, for `rotate`."""

    inv_freq: Tensor

    def __init__(self, config: RopeConfig) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.tensor(config.inv_freq), persistent=False)
        self.attention_factor = config.attention_factor

    def forward(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [N, 1, D] fp32 of positions [N] int64; sin carries the rotation's sign."""
        angles = (position_ids.float().unsqueeze(-1) * self.inv_freq).unsqueeze(1)
        cos = angles.cos() * self.attention_factor
        sin = angles.sin() * self.attention_factor
        return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to fp32 `heads` [N, heads, D], halves rotated (the Hugging Face layout)."""
    low, high = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([high, low], dim=-1) * sin


def rows_of(tensor: Tensor, rows: Tensor) -> Tensor:
    """Rows [..., D] of `tensor` [..., D] seen as a list of rows, at indices `rows` [...]."""
    return F.embedding(rows, tensor.reshape(-1, tensor.shape[-1]))


def head_rows(tokens: Tensor, heads_per_token: int, first_head: int, num_heads: int) -> Tensor:
    """Rows [R, num_heads, S] that hold heads `first_head`... of `tokens` [R, S].

    Token t's head h is row t * `heads_per_token` + h.
    """
    heads = torch.arange(first_head, first_head + num_heads)[:, None]
    return tokens[:, None, :] * heads_per_token + heads


def query_rows(tokens: Tensor, heads_per_token: int, num_heads: int, num_kv_heads: int) -> Tensor:
    """Rows [R, Hk, G*S] of the query heads of `tokens` [R, S], those of one KV head together."""
    rows = head_rows(tokens, heads_per_token, 0, num_heads)
    return rows.unflatten(1, (num_kv_heads, num_heads // num_kv_heads)).flatten(2)


def output_rows(cells: Tensor, length: Tensor | int, num_heads: int) -> Tensor:
    """Rows [N, H] of each token's heads in an attention output [R, Hk, G*S, D].

    `cells` [N] are the tokens' flat grid cells (request * S + column), `length` is S.
    """
    request = cells // length
    column = cells - request * length
    heads = request[:, None] * num_heads + torch.arange(num_heads)
    return heads * length + column[:, None]


def pool_rows(block_table: Tensor, block_tokens: int, num_kv_heads: int) -> Tensor:
    """Rows [R, Hk, M*b] of every pool token that `block_table` [R, M] names."""
    tokens = block_table[:, :, None] * block_tokens + torch.arange(block_tokens)
    return head_rows(tokens.flatten(1), num_kv_heads, 0, num_kv_heads)


def attend(
    query: Tensor, keys: tuple[Tensor, Tensor], values: tuple[Tensor, Tensor], visible: Tensor
) -> Tensor:
    """softmax(q k^T / sqrt(D)) v with fp32 scores, over the pool's tokens and the call's own.

    `query` [R, Hk, Q, D], `keys` and `values` [R, Hk, T, D] and [R, Hk, S, D], `visible`
    [R, 1, Q or 1, T + S] bool; returns [R, Hk, Q, D]. The two runs of keys are never joined:
    scores are, which are smaller. Masking replaces scores instead of adding to them, so that
    garbage in unused blocks cannot outweigh the mask.
    """
    query = query * query.shape[-1] ** -0.5
    scores = torch.cat([query @ k.transpose(-1, -2) for k in keys], dim=-1).float()
    probs = torch.where(visible, scores, MASKED).softmax(dim=-1).to(query.dtype)
    split = keys[0].shape[2]
    return probs[..., :split] @ values[0] + probs[..., split:] @ values[1]
