"""A small modern decoder: one file covers the GPT-2, Llama and Qwen3 shapes by options.

The default options are exactly those of Qwen3 (RMSNorm, QK-norm, rotary positions, grouped queries, SwiGLU), so a
trained network can be exported to that architecture. Nothing here knows of Lightning, Hydra, precision or ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmforge.models.attention import attend, document_mask

Head = Callable[[Tensor], Tensor]
Score = Callable[[Tensor, Head], Tensor]


@dataclass
class Cache:
    """Keys and values of the positions already seen, one `[batch, kv_heads, capacity, head_dim]` pair a layer."""

    capacity: int
    length: int = 0
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    rope: tuple[Tensor, Tensor] | None = None  # cosine and sine of every position

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append new keys and values of one layer and return views on all so far."""
        if layer not in self.layers:
            shape = (k.shape[0], k.shape[1], self.capacity, k.shape[3])
            self.layers[layer] = (k.new_empty(shape), v.new_empty(shape))
        keys, values = self.layers[layer]
        end = self.length + k.shape[2]
        keys[:, :, self.length : end], values[:, :, self.length : end] = k, v
        return keys[:, :, :end], values[:, :, :end]


def rotary(positions: Tensor, head_dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine `[batch, 1, time, head_dim]` of rotary positions (Su et al. 2021), halves rotated as in Llama."""
    frequency = base ** (-torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim)
    angle = positions[:, None, :, None].float() * frequency
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, layer: int, d_model: int, n_head: int, n_kv_head: int, head_dim: int, qk_norm: bool, bias: bool):
        super().__init__()
        self.layer, self.head_dim = layer, head_dim
        self.attend = attend
        self.q = nn.Linear(d_model, n_head * head_dim, bias=bias)
        self.k = nn.Linear(d_model, n_kv_head * head_dim, bias=bias)
        self.v = nn.Linear(d_model, n_kv_head * head_dim, bias=bias)
        self.out = nn.Linear(n_head * head_dim, d_model, bias=bias)
        self.q_norm = nn.RMSNorm(head_dim, eps=1e-6) if qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(head_dim, eps=1e-6) if qk_norm else nn.Identity()

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor] | None, mask: Tensor | None, cache: Cache | None
    ) -> Tensor:
        batch, time, _ = x.shape
        q, k, v = (linear(x).view(batch, time, -1, self.head_dim) for linear in (self.q, self.k, self.v))
        q, k, v = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2), v.transpose(1, 2)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)
        y = self.attend(q, k, v, mask, causal=time > 1)
        return self.out(y.transpose(1, 2).reshape(batch, time, -1))


class FeedForward(nn.Module):
    def __init__(self, d_model: int, d_ff: int, activation: str, bias: bool):
        super().__init__()
        self.activation = activation
        self.gate = nn.Linear(d_model, d_ff, bias=bias) if activation == "swiglu" else None
        self.up = nn.Linear(d_model, d_ff, bias=bias)
        self.down = nn.Linear(d_ff, d_model, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is not None:
            return self.down(F.silu(self.gate(x)) * self.up(x))
        hidden = self.up(x)
        hidden = F.relu(hidden).square() if self.activation == "relu2" else F.gelu(hidden, approximate="tanh")
        return self.down(hidden)


class Block(nn.Module):
    """Attention and feed-forward, each with a residual; norms come before each branch (`pre`) or after the sum."""

    # For tensor parallelism: what each layer is to those that share it, and the branches that need whole sequences.
    tensor_plan: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("attention.q", "attention.k", "attention.v", "ff.gate", "ff.up"), "columns"),
        **dict.fromkeys(("attention.out", "ff.down"), "rows"),
        **dict.fromkeys(("attention.q_norm", "attention.k_norm"), "heads"),
        **dict.fromkeys(("attention_norm", "ff_norm"), "sequence"),
    }
    gathers: ClassVar[tuple[str, ...]] = ("attention", "ff")

    def __init__(
        self, attention: Attention, ff: FeedForward, norms: tuple[nn.Module, nn.Module], pre: bool, drop: float
    ):
        super().__init__()
        self.attention, self.ff, self.pre, self.drop = attention, ff, pre, drop
        self.attention_norm, self.ff_norm = norms

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor] | None, mask: Tensor | None, cache: Cache | None = None
    ) -> Tensor:
        if self.pre:
            x = x + self._drop(self.attention(self.attention_norm(x), rope, mask, cache))
            return x + self._drop(self.ff(self.ff_norm(x)))
        x = self.attention_norm(x + self._drop(self.attention(x, rope, mask, cache)))
        return self.ff_norm(x + self._drop(self.ff(x)))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.drop, self.training) if self.drop else x


class GPT(nn.Module):
    """Decoder-only transformer: token ids `[batch, time]` -> logits `[batch, time, vocab_size]`.

    Blocks sit in a `ModuleDict` under their global number, so parameter names survive a split over pipeline stages.
    Parameters are filled by `initial_value`, name by name, never at construction: build under `torch.device("meta")`.
    """

    block_class: type[Block] = Block
    tensor_plan: ClassVar[dict[str, str]] = {
        "embed": "vocabulary",
        "position": "positions",
        "norm": "sequence",
        "head": "columns",
    }

    def __init__(
        self,
        vocab_size: int,
        context: int,
        n_layer: int,
        n_head: int,
        n_kv_head: int,
        d_model: int,
        d_ff: int,
        head_dim: int | None = None,
        norm: str = "rms",
        norm_place: str = "pre",
        qk_norm: bool = True,
        positions: str = "rope",
        rope_base: float = 10000.0,
        activation: str = "swiglu",
        bias: bool = False,
        tied: bool = True,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.vocab_size, self.context, self.n_layer, self.n_head = vocab_size, context, n_layer, n_head
        self.head_dim = head_dim or d_model // n_head
        self.rope_base = rope_base if positions == "rope" else None
        self.dropout = dropout
        self.mask = document_mask

        def make_norm() -> nn.Module:
            return nn.RMSNorm(d_model, eps=1e-6) if norm == "rms" else nn.LayerNorm(d_model, bias=bias)

        self.embed = nn.Embedding(vocab_size, d_model)
        self.position = nn.Embedding(context, d_model) if positions == "learned" else None
        self.blocks = nn.ModuleDict()
        for layer in range(n_layer):
            attention = Attention(layer, d_model, n_head, n_kv_head, self.head_dim, qk_norm, bias)
            ff = FeedForward(d_model, d_ff, activation, bias)
            self.blocks[str(layer)] = self.block_class(
                attention, ff, (make_norm(), make_norm()), norm_place == "pre", dropout
            )
        self.norm = make_norm()
        self.head = None if tied else nn.Linear(d_model, vocab_size, bias=False)
        self.matmul_parameters = self._matmul_parameters()  # a pipeline will take blocks away

    def forward(
        self,
        input_ids: Tensor,
        doc_ids: Tensor | None = None,
        positions: Tensor | None = None,
        cache: Cache | None = None,
        score: Score | None = None,
        layers: range | None = None,
    ) -> Tensor:
        """Logits for every position, or what `score` makes of the last hidden state `[batch, time, d_model]` and the
        head, so that not all logits need exist at once. `doc_ids` keeps documents of a packed row apart, `positions`
        restart with them.

        With a `cache` the ids continue what the cache holds (one document, the same length for the whole batch). With
        `layers` only these blocks run: later ones take hidden states for ids, all but the last give hidden states.
        """
        layers = range(self.n_layer) if layers is None else layers
        if positions is None:
            start = cache.length if cache is not None else 0
            positions = torch.arange(start, start + input_ids.shape[1], device=input_ids.device)[None]
        x = input_ids if layers.start else self._embed(input_ids, positions)
        rope = self._rope(positions, x.dtype, cache)
        mask = self.mask(doc_ids).to(x.dtype) if doc_ids is not None else None
        for layer in layers:
            x = self.blocks[str(layer)](x, rope, mask, cache)
        if layers.stop < self.n_layer:
            return x
        if cache is not None:
            cache.length += positions.shape[1]
        x = self.norm(x)
        return self.logits(x) if score is None else score(x, self.logits)

    def _embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.position is not None:
            x = x + self.position(positions)
        return F.dropout(x, self.dropout, self.training)

    def _rope(self, positions: Tensor, dtype: torch.dtype, cache: Cache | None) -> tuple[Tensor, Tensor] | None:
        """Of these positions; with a cache all of its positions' are made once."""
        if self.rope_base is None:
            return None
        if cache is None:
            return rotary(positions, self.head_dim, self.rope_base, dtype)
        if cache.rope is None:
            every = torch.arange(cache.capacity, device=positions.device)[None]
            cache.rope = rotary(every, self.head_dim, self.rope_base, dtype)
        cos, sin = cache.rope
        end = cache.length + positions.shape[1]
        return cos[:, :, cache.length : end], sin[:, :, cache.length : end]

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(x, self.embed.weight.to(x.dtype)) if self.head is None else self.head(x)

    def keep(self, layers: set[int]) -> None:
        """Drop what a process that runs only these blocks has no use for; a tied embedding is also the head."""
        for layer in set(range(self.n_layer)) - layers:
            del self.blocks[str(layer)]
        first, last = 0 in layers, self.n_layer - 1 in layers
        tied = self.head is None
        if not first:
            self.position = None
        if not first and not (last and tied):
            del self.embed
        if not last:
            del self.norm
            self.head = None

    def initial_value(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """The starting value of the whole parameter `name`: a function of the name and the generator alone.

        Normal(0, 0.02); projections back into the residual stream start at zero, so every block starts as the identity.
        """
        if name.endswith(("bias", "attention.out.weight", "ff.down.weight")):
            return torch.zeros(shape)
        if "norm" in name:
            return torch.ones(shape)
        return torch.empty(shape).normal_(0.0, 0.02, generator=generator)

    def _matmul_parameters(self) -> int:
        """Parameters that take part in a matmul for every token (the embedding look-up does none unless tied)."""
        matrices = sum(p.numel() for name, p in self.named_parameters() if p.dim() == 2 and "embed" not in name)
        table = self.embed.weight.numel() if self.head is None else 0
        position = self.position.weight.numel() if self.position is not None else 0
        return matrices + table - position

    def flops_per_token(self, time: int) -> float:
        """Training FLOPs per token, forward and backward: 6 per matmul parameter plus causal attention.

        Attention counts two matmuls over on average `time / 2` keys: 3 x 2 x 2 x time/2 x heads x head_dim a layer.
        """
        attention = 6 * self.n_layer * self.n_head * self.head_dim * time
        return 6 * self.matmul_parameters + attention
