"""Context parallelism: the positions of every sequence are cut over ranks, which gather each other's keys and values.

Every rank takes one piece from the front half and its mirror image from the back half, so that under a causal mask all
have the same work (Llama 3, Grattafiori et al. 2024, section 3.3.2).
"""

from typing import Any

import torch
from torch import Tensor, nn

from lmforge.parallel.exchange import Team

Batch = dict[str, Tensor]


class ContextTeam(Team):
    """The ranks that share the positions of each sequence."""

    def positions(self, time: int, device: torch.device, rank: int | None = None) -> Tensor:
        """The positions of a sequence of `time` that a rank holds, int64 `[time / size]`; by default one's own."""
        pieces = torch.arange(time, device=device).chunk(2 * self.size)
        rank = self.rank if rank is None else rank
        return torch.cat((pieces[rank], pieces[2 * self.size - 1 - rank]))

    def share(self, batch: Batch) -> Batch:
        """This rank's positions of a micro-batch; `doc_ids` stay whole, since masks reach over all keys."""
        one = next(iter(batch.values()))
        index = self.positions(one.shape[1], one.device)
        return {name: values if name == "doc_ids" else values[:, index] for name, values in batch.items()}

    def mask(self, doc_ids: Tensor) -> Tensor:
        """`[batch, time]` numbers of the whole rows -> additive mask `[batch, 1, time / size, time]` of this rank's
        queries over all keys, in the order in which they are gathered."""
        time, device = doc_ids.shape[1], doc_ids.device
        queries = self.positions(time, device)
        keys = torch.cat([self.positions(time, device, rank) for rank in range(self.size)])
        same = doc_ids[:, queries, None] == doc_ids[:, None, keys]
        seen = same & (keys[None, :] <= queries[:, None])
        return torch.zeros_like(seen, dtype=torch.float32).masked_fill_(~seen, float("-inf"))[:, None]


def split_sequences(network: nn.Module, team: ContextTeam) -> None:
    """Make every attention of `network` reach over all ranks' keys where a mask of `ContextTeam` says so; generation,
    whose cache every rank holds whole, stays as it is."""
    network.mask = team.mask  # type: ignore[assignment]
    for module in network.modules():
        if hasattr(module, "attend"):
            module.attend = _reaching(module.attend, team)


def _reaching(attend: Any, team: ContextTeam) -> Any:
    def attend_all(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        if mask is None or mask.shape[-1] == k.shape[2]:
            return attend(q, k, v, mask, causal)
        keys, values = team.gather(torch.cat((k, v), dim=1), 2).chunk(2, dim=1)
        return attend(q, keys, values, mask, causal)

    return attend_all
