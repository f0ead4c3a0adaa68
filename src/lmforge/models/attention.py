"""Causal attention with document masks, and the one place where its kernel is chosen."""

import torch
import torch.nn.functional as F
from torch import Tensor


def document_mask(doc_ids: Tensor) -> Tensor:
    """`[batch, time]` document numbers -> additive mask `[batch, 1, time, time]`: 0 where a query may look, else -inf.

    A position sees itself and earlier positions of its own document, never another document.
    """
    time = doc_ids.shape[1]
    same = doc_ids[:, :, None] == doc_ids[:, None, :]
    causal = torch.ones(time, time, dtype=torch.bool, device=doc_ids.device).tril()
    return torch.zeros_like(same, dtype=torch.float32).masked_fill_(~(same & causal), float("-inf"))[:, None]


def uses_matmul(device: str, dtype: torch.dtype, time: int) -> bool:
    """Whether two batched matmuls beat the fused kernel; static, so that a rerun takes the same path.

    The fused CPU kernel has no fast bf16 backward: forward and backward took 2 to 4 times as long as the matmuls
    for 128 to 512 positions (AVX512-BF16 and AMX machines alike); in fp32 the fused kernel wins from 64 positions on.
    """
    return device == "cpu" and dtype == torch.bfloat16 and time <= 512


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Softmax attention on `[batch, heads, time, head_dim]`; `k`, `v` may have fewer heads (grouped queries).

    `mask` is additive and broadcasts to `[batch, heads, queries, keys]`; with none, `causal` masks the future, where
    the last query stands beside the last key.
    """
    queries, keys = q.shape[2], k.shape[2]
    matmul = uses_matmul(q.device.type, q.dtype, keys)
    if mask is None and causal and (matmul or queries < keys):  # `is_causal` would align the first ones
        mask = _causal_mask(queries, keys, q.device)
    if mask is not None:
        mask = mask.to(q.dtype)
    groups = q.shape[1] // k.shape[1]
    # only the flash kernel takes fewer key heads as they are, and it takes no mask
    as_they_are = q.device.type == "cuda" and mask is None and q.dtype in (torch.float16, torch.bfloat16)
    if groups > 1 and not as_they_are:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    if matmul:
        return _matmul_attention(q, k, v, mask)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal and mask is None, enable_gqa=q.shape[1] != k.shape[1]
    )


def _causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    hidden = torch.ones(queries, keys, dtype=torch.bool, device=device).triu(1 + keys - queries)
    return torch.zeros(queries, keys, device=device).masked_fill_(hidden, float("-inf"))


def _matmul_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    bias = q.new_zeros(()) if mask is None else mask
    bias = bias.expand(*q.shape[:3], k.shape[2]).reshape(-1, q.shape[2], k.shape[2])
    scores = torch.baddbmm(bias, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=q.shape[-1] ** -0.5)
    return (torch.softmax(scores, dim=-1).to(v.dtype) @ v.flatten(0, 1)).view_as(q)
