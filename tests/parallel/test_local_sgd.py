"""The outer step on two real ranks against plain loops that know nothing of processes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lmforge.parallel.local_sgd import Rounds
from ranks import run_ranks

Weights = list[Tensor]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def gradients(net: nn.Module, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    net.zero_grad()
    net(torch.randn(5, 6, dtype=torch.float64, generator=generator)).square().mean().backward()


def sgd(net: nn.Module) -> Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.3)


def adamw(net: nn.Module) -> Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.03)


def in_rounds(make: Callable[[nn.Module], Optimizer], steps: int, every: int, lr: float, momentum: float) -> Any:
    """What a rank ends with, and how often and with what it spoke to the others."""
    dist.init_process_group("gloo")
    net = network()
    optimizer, rounds = make(net), Rounds(net, every, lr, momentum)
    for step in range(1, steps + 1):
        rounds.begin()
        gradients(net, dist.get_rank(), step)
        optimizer.step()
        if step % every == 0:
            rounds.meet()
    momenta = [momentum.numpy() for momentum in rounds.memory.shared.values()]
    return [p.detach().numpy() for p in net.parameters()], momenta, rounds.traffic


def averaging_gradients(steps: int) -> Weights:
    """What DDP does, in one process."""
    net, other = network(), network()
    optimizer = sgd(net)
    for step in range(1, steps + 1):
        other.load_state_dict(net.state_dict())
        gradients(net, 0, step)
        gradients(other, 1, step)
        for p, q in zip(net.parameters(), other.parameters(), strict=True):
            p.grad = (p.grad + q.grad) / 2  # type: ignore[operator]
        optimizer.step()
    return list(net.parameters())


def by_hand(steps: int, every: int, lr: float, momentum: float) -> Weights:
    """Two networks that train apart and torch's own Nesterov momentum on a third, in one process."""
    nets = [network(), network()]
    inner, outer = [adamw(net) for net in nets], network()
    optimizer = torch.optim.SGD(outer.parameters(), lr=lr, momentum=momentum, nesterov=momentum > 0)
    for step in range(1, steps + 1):
        for rank, net in enumerate(nets):
            gradients(net, rank, step)
            inner[rank].step()
        if step % every == 0:
            for p, *ours in zip(outer.parameters(), *(net.parameters() for net in nets), strict=True):
                p.grad = p.detach() - sum(q.detach() for q in ours) / 2
            optimizer.step()
            for net in nets:
                net.load_state_dict(outer.state_dict())
    return list(outer.parameters())


def alike(ours: list[Any], theirs: Weights) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(torch.allclose(torch.from_numpy(p), q.detach(), rtol=0, atol=1e-9) for p, q in pairs)


def test_meeting_after_every_plain_step_is_ddp() -> None:
    expected = averaging_gradients(5)
    for weights, _, _ in run_ranks(in_rounds, 2, sgd, 5, 1, 1.0, 0.0):
        assert alike(weights, expected)


@pytest.mark.parametrize(("every", "lr", "momentum"), [(2, 1.0, 0.0), (1, 0.7, 0.0), (1, 1.0, 0.5)])
def test_any_other_setting_is_not(every, lr, momentum) -> None:
    """The control of the test above: it would notice."""
    (weights, _, _), _ = run_ranks(in_rounds, 2, sgd, 4, every, lr, momentum)
    assert not alike(weights, averaging_gradients(4))


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (1.0, 0.0)])
def test_rounds_of_four_equal_a_loop_written_by_hand(lr, momentum) -> None:
    expected = by_hand(12, 4, lr, momentum)
    first, second = run_ranks(in_rounds, 2, adamw, 12, 4, lr, momentum)
    assert alike(first[0], expected)
    assert all((p == q).all() for p, q in zip(first[0] + first[1], second[0] + second[1], strict=True))
    traffic = first[2]
    assert (traffic.calls, traffic.sent) == (3, traffic.plain / 4)
