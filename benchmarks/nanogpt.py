"""The plain baseline: a GPT in the manner of nanoGPT and its loop. float32, eager, AdamW over a loop of tensors."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.contest import Turn

Batch = tuple[Tensor, Tensor]
IGNORED = -100  # a label that no loss counts
RATE, WARMUP = 1e-3, 50  # steps


class Layer(nn.Module):
    def __init__(self, heads: int, width: int):
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_ff = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        shape = (x.shape[0], x.shape[1], self.heads, -1)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(self.before_attention(x)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.before_ff(x))))


class PlainGPT(nn.Module):
    """Learned positions, LayerNorm, GELU, tied head."""

    def __init__(self, vocabulary: int, context: int, layers: int, heads: int, width: int):
        super().__init__()
        self.embed, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.layers = nn.ModuleList(Layer(heads, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        for name, parameter in self.named_parameters():
            scale = 0.02 / (2 * layers) ** 0.5 if name.endswith(("out.weight", "down.weight")) else 0.02
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=scale)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.embed.weight)

    @torch.no_grad()
    def start_like(self, network: nn.Module) -> None:
        """Take the weights of this project's network in the same shape."""
        theirs = dict(network.named_parameters())
        self.embed.weight.copy_(theirs["embed.weight"])
        self.position.weight.copy_(theirs["position.weight"])
        for number, layer in enumerate(self.layers):
            block = f"blocks.{number}"
            layer.qkv.weight.copy_(torch.cat([theirs[f"{block}.attention.{part}.weight"] for part in "qkv"]))
            layer.out.weight.copy_(theirs[f"{block}.attention.out.weight"])
            layer.up.weight.copy_(theirs[f"{block}.ff.up.weight"])
            layer.down.weight.copy_(theirs[f"{block}.ff.down.weight"])


def get_batch(tokens: np.ndarray, batch: int, context: int) -> Batch:
    """Random pieces of one long stream, stacked one by one."""
    places = torch.randint(len(tokens) - context, (batch,))
    x = torch.stack([torch.from_numpy(tokens[i : i + context].astype(np.int64)) for i in places])
    y = torch.stack([torch.from_numpy(tokens[i + 1 : i + 1 + context].astype(np.int64)) for i in places])
    return x, y


def make_adamw(network: nn.Module, lr: float, decay: float = 0.1) -> torch.optim.Optimizer:
    """Matrices decay, vectors do not; on a CPU torch then loops over the tensors."""
    groups = [
        {"params": [p for p in network.parameters() if p.dim() >= 2], "weight_decay": decay},
        {"params": [p for p in network.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.99))


def plain_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def loop(
    turn: Turn, next_batch: Callable[[int], Batch], forward: Callable[[Tensor], Tensor], network: nn.Module, every: int
) -> None:
    """The plain loop on any network, `every` updates a turn."""
    optimizer = make_adamw(network, RATE)
    turn()
    step = 0
    while True:
        losses = []
        for _ in range(every):
            ids, labels = next_batch(step)
            step += 1
            for group in optimizer.param_groups:
                group["lr"] = RATE * min(1.0, step / WARMUP)
            loss = plain_loss(forward(ids), labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
        turn(loss=sum(losses) / len(losses))


def contender(turn: Turn, words: list[str], shape: dict[str, int], every: int) -> None:
    """The baseline from the weights and over the batches that the product starts from and sees."""
    torch.set_num_threads(1)
    network = PlainGPT(**shape)
    batches, theirs = product_batches(words)
    network.start_like(theirs)
    loop(turn, lambda step: batches[step % len(batches)], network, network, every)


def product_batches(words: list[str], count: int = 400) -> tuple[list[Batch], Any]:
    """The first batches of a run of the product, and its network as it starts."""
    from benchmarks.product import parts

    _, task, stream = parts(["precision=32-true", *words])
    micro = [batch for _ in range(count) for batch in next(stream)["micro_batches"]]
    return [(batch["input_ids"], batch["labels"]) for batch in micro], task.network
