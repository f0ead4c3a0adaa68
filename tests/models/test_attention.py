"""The two attention kernels agree with each other and keep what must not be seen out of sight."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lmforge.models import attention
from lmforge.models.attention import attend, document_mask, uses_matmul


def qkv(queries: int, keys: int, heads: int = 4, kv_heads: int = 2, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, queries, 8), (2, kv_heads, keys, 8), (2, kv_heads, keys, 8)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def plain(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Attention by its formula, one query head at a time, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    heads = []
    for head in range(q.shape[1]):
        shared = head * k.shape[1] // q.shape[1]
        scores = q[:, head] @ k[:, shared].mT / math.sqrt(q.shape[-1])
        heads.append(torch.softmax(scores.masked_fill(~visible, -math.inf), -1) @ v[:, shared])
    return torch.stack(heads, 1)


@pytest.fixture(params=["fused", "matmul"])
def kernel(request, monkeypatch) -> str:
    monkeypatch.setattr(attention, "uses_matmul", lambda *facts: request.param == "matmul")
    return request.param


def documents() -> Tensor:
    return torch.tensor([[1, 1, 1, 2, 2, 3, 3, 3], [0, 0, 0, 0, 0, 0, 0, 1]])


def error(out: Tensor, expected: Tensor) -> float:
    return float((out.double() - expected).abs().max())


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_kernel_equals_the_formula_under_a_document_mask(kernel, dtype, allowed) -> None:
    q, k, v = qkv(8, 8, dtype=dtype)
    ids = documents()
    visible = (ids[:, :, None] == ids[:, None, :]) & torch.ones(8, 8, dtype=torch.bool).tril()
    out = attend(q, k, v, document_mask(ids), causal=True)
    assert out.dtype == dtype
    assert error(out, plain(q, k, v, visible)) < allowed
    assert error(out, plain(q, k, v, visible.flip(0))) > 0.1  # the other row's mask
    assert error(out, plain(q, k, v, torch.ones_like(visible).tril())) > 0.1  # causal alone


@pytest.mark.parametrize(("queries", "keys"), [(8, 8), (3, 8), (1, 8), (1, 1)])
def test_without_a_mask_the_last_query_sees_every_key(kernel, queries, keys) -> None:
    q, k, v = qkv(queries, keys)
    visible = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    assert error(attend(q, k, v, None, causal=queries > 1), plain(q, k, v, visible)) < 1e-6
    if 1 < queries < keys:  # how torch's is_causal aligns them
        assert error(attend(q, k, v, None, causal=True), plain(q, k, v, visible.tril())) > 0.1


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
def test_grouped_queries_share_the_right_head(kernel, heads, kv_heads) -> None:
    q, k, v = qkv(8, 8, heads, kv_heads)
    visible = torch.ones(8, 8, dtype=torch.bool).tril()
    assert error(attend(q, k, v, None, causal=True), plain(q, k, v, visible)) < 1e-6
    if kv_heads == 2:
        assert error(attend(q, k.flip(1), v.flip(1), None, causal=True), plain(q, k, v, visible)) > 0.1


def test_matmul_gradients_are_those_of_torchs_own_kernel(monkeypatch) -> None:
    grads = []
    for matmul in (True, False):
        monkeypatch.setattr(attention, "uses_matmul", lambda *facts, choice=matmul: choice)
        inputs = [x.requires_grad_() for x in qkv(8, 8)]
        attend(*inputs, document_mask(documents()), causal=True).square().sum().backward()
        grads.append([x.grad for x in inputs])
    for ours, theirs in zip(*grads, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_matmul_equals_torchs_scaled_dot_product_attention() -> None:
    q, k, v = qkv(8, 8, kv_heads=4)
    mask = document_mask(documents())
    ours = attention._matmul_attention(q, k, v, mask)
    assert torch.allclose(ours, F.scaled_dot_product_attention(q, k, v, attn_mask=mask), atol=1e-6)
    assert not torch.allclose(ours, F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0), atol=1e-2)


def test_the_kernel_is_chosen_by_a_fixed_table() -> None:
    assert uses_matmul("cpu", torch.bfloat16, 256)
    assert not uses_matmul("cpu", torch.bfloat16, 1024)
    assert not uses_matmul("cpu", torch.float32, 256)
    assert not uses_matmul("cuda", torch.bfloat16, 256)


def test_document_mask_shows_earlier_positions_of_the_own_document_alone() -> None:
    mask = document_mask(torch.tensor([[7, 7, 9, 9]]))
    assert mask.shape == (1, 1, 4, 4)
    assert (mask[0, 0] == 0).int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert mask[mask != 0].unique().tolist() == [-math.inf]
