"""Continuing a sequence token by token with a key-value cache."""

import codecs
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lmforge.config.errors import UsageError
from lmforge.data.tokenizer import Tokenizer
from lmforge.models.gpt import Cache


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; a temperature of 0 takes the most probable one."""

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw one id from logits `[vocabulary]`, on the CPU and in float32 so that every device draws alike."""
    logits = logits.detach().float().cpu()
    if sampling.temperature == 0:
        return int(logits.argmax())
    probabilities = torch.softmax(logits / sampling.temperature, dim=-1)
    ordered, ids = probabilities.sort(descending=True, stable=True)
    if sampling.top_k is not None:
        ordered[sampling.top_k :] = 0.0
    if sampling.top_p is not None:
        before = ordered.cumsum(0) - ordered
        ordered[before >= sampling.top_p * ordered.sum()] = 0.0
    return int(ids[torch.multinomial(ordered, 1, generator=generator)])


@torch.no_grad()
def generate_ids(
    network: nn.Module,
    prompt: list[int],
    most: int,
    sampling: Sampling,
    seed: int,
    end: int | None,
    vocabulary: int,
    forward: Callable[..., Tensor] | None = None,
) -> Iterator[int]:
    """Yield up to `most` new ids, fewer at the context's border or before the end mark, which is not yielded.

    `network` must be in evaluation mode; `forward` calls it where it is spread over ranks. Ids of `vocabulary` and
    above (padding rows) are never drawn. Under sharding every rank must iterate; rank 0 draws for all, whose last
    digits may differ.
    """
    context = network.context
    assert isinstance(context, int)
    if not 0 < len(prompt) <= context:
        raise UsageError(f"the prompt has {len(prompt)} tokens, the model's context holds 1 to {context}")
    device = next(network.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    cache = Cache(capacity=context)
    ids = torch.tensor([prompt], device=device)
    forward = network if forward is None else forward
    for _ in range(min(most, context - len(prompt))):
        logits = forward(ids, cache=cache)[0, -1, :vocabulary]
        token = _shared(lambda: choose(logits, sampling, generator), device)  # noqa: B023 - called at once
        if token == end:
            return
        yield token
        ids = ids[:, :1].fill_(token)


def _shared(draw: Callable[[], int], device: torch.device) -> int:
    """What rank 0 draws, on every rank: ranks that went on with different tokens would end at different times."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return draw()
    token = torch.tensor([draw() if dist.get_rank() == 0 else 0], device=device)
    dist.broadcast(token, src=0)
    return int(token)


def stream_text(tokenizer: Tokenizer, ids: Iterator[int], stop: str | None = None) -> Iterator[str]:
    """Decode ids as they come; a character spread over several tokens is held back until it is whole.

    Ends before the first occurrence of `stop`, of which no part is given out.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    table = tokenizer.token_bytes
    held = ""
    for token in ids:
        held += decoder.decode(table[token])
        if stop and stop in held:
            yield held[: held.index(stop)]
            return
        keep = _possible_stop(held, stop)
        yield held[: len(held) - keep]
        held = held[len(held) - keep :]
    yield held + decoder.decode(b"", final=True)


def _possible_stop(text: str, stop: str | None) -> int:
    """Length of the longest end of `text` that could be the beginning of `stop`."""
    longest = min(len(text), len(stop or ""))
    return next((n for n in range(longest, 0, -1) if stop and text.endswith(stop[:n])), 0)


def encode_prompt(tokenizer: Tokenizer, prompt: str, context: int, keep_end: bool) -> list[int]:
    """Start mark and prompt as ids. A prompt that leaves no room for one new token is refused, or keeps its end."""
    start = tokenizer.eos if tokenizer.bos is None else tokenizer.bos
    ids = ([] if start is None else [start]) + tokenizer.encode(prompt)
    if len(ids) < context:
        return ids
    if keep_end:
        return ids[-(context - 1) :]
    raise UsageError(
        f"prompt: {len(ids)} tokens with its start mark, but the context is {context} and one new token needs room; "
        "shorten it, or keep_end=true to keep its end"
    )
