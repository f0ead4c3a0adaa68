"""Compressed gradients on two real ranks whose own gradients are chosen here, so that every sum can be checked."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lmforge.parallel.compress import FLOAT16_UNIT, Compression, PowerSGD, Rounded
from ranks import run_ranks

SHAPES = {"wide": (24, 40), "tall": (40, 24), "twin": (24, 40), "vector": (7,), "small": (3, 5)}
MATRICES = [name for name, shape in SHAPES.items() if shape[0] > 20]
Gradients = dict[str, Tensor]
RANK = 4


class Given(nn.Module):
    """A network whose gradient is what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.ones(shape, dtype=torch.float64)))

    def forward(self, gradients: Gradients) -> Tensor:
        return torch.stack([(p * gradients[name]).sum() for name, p in self.named_parameters()]).sum()


def drawn(rank: int, step: int, size: float = 1.0) -> Gradients:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return {name: size * torch.randn(s, generator=generator, dtype=torch.float64) for name, s in SHAPES.items()}


def average(step: int, world: int = 2) -> Gradients:
    each = [drawn(rank, step) for rank in range(world)]
    return {name: sum(g[name] for g in each) / world for name in SHAPES}


def exchange(
    make: Callable[..., Compression],
    gradients: Callable[[int, int], Gradients],
    steps: int = 1,
    bucket_mb: float = 25,
    registered: bool = True,
    device: str = "cpu",
) -> dict[str, Any]:
    """What a rank has after some updates: its gradients in each, its hook's figures and memory after the last."""
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    network = Given().to(device)
    compression = make(network)
    replica = DistributedDataParallel(network, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb)
    if registered:
        compression.register(replica)
    seen = []
    for step in range(steps):
        replica({name: g.to(device) for name, g in gradients(dist.get_rank(), step).items()}).backward()
        seen.append(
            {name: p.grad.cpu().clone().numpy() for name, p in network.named_parameters() if p.grad is not None}
        )
        network.zero_grad(set_to_none=True)
    memory = compression.memory.own | compression.memory.shared
    return {
        "seen": seen,
        "traffic": compression.traffic,
        "memory": {name: t.cpu().numpy() for name, t in memory.items()},
    }


def on_two_ranks(*args: Any) -> list[dict[str, Any]]:
    """`exchange` on each; tensors travel as arrays, which a process that has ended need not be asked for."""
    ranks = run_ranks(exchange, 2, *args)
    for rank in ranks:
        rank["seen"] = [{name: torch.from_numpy(g) for name, g in seen.items()} for seen in rank["seen"]]
        rank["memory"] = {name: torch.from_numpy(values) for name, values in rank["memory"].items()}
    return ranks


def close(ours: Gradients, theirs: Gradients, tolerance: float) -> bool:
    return all(torch.allclose(ours[name], theirs[name], rtol=tolerance, atol=1e-30) for name in SHAPES)


power = partial(PowerSGD, rank=RANK, start_step=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_rounded_gradients_take_a_quarter_of_64_bits(dtype, tolerance) -> None:
    unit = FLOAT16_UNIT if dtype == torch.float16 else 1.0
    ranks = on_two_ranks(partial(Rounded, dtype=dtype, unit=unit), partial(halved, 1))
    expected = {name: g / 2 for name, g in drawn(0, 0).items()}
    for rank in ranks:
        assert close(rank["seen"][0], expected, tolerance)
        assert not close(rank["seen"][0], expected, 1e-9)  # it really travelled in few digits
        assert rank["traffic"].sent * 4 == rank["traffic"].plain
        assert rank["traffic"].calls == 1


def halved(divisor: float, rank: int, step: int) -> Gradients:
    return {name: g / divisor / 2 for name, g in drawn(0, step).items()}


def test_a_hook_that_is_not_registered_counts_nothing() -> None:
    (rank, _) = on_two_ranks(partial(Rounded, dtype=torch.bfloat16), drawn, 1, 25, False)
    assert (rank["traffic"].calls, rank["traffic"].sent) == (0, 0)
    assert close(rank["seen"][0], average(0), 1e-9)


@pytest.mark.parametrize(("unit", "survive"), [(FLOAT16_UNIT, True), (1.0, False)])
def test_small_gradients_survive_float16(unit, survive) -> None:
    (rank, _) = on_two_ranks(partial(Rounded, dtype=torch.float16, unit=unit), partial(halved, 1e7))
    expected = {name: g / 1e7 / 2 for name, g in drawn(0, 0).items()}
    errors = [((rank["seen"][0][name] - expected[name]).norm() / expected[name].norm()) for name in SHAPES]
    assert (max(errors) < 1e-2) == survive


def huge_on_rank_1(rank: int, step: int) -> Gradients:
    return drawn(rank, step) | {"wide": torch.full(SHAPES["wide"], 1e6 * rank, dtype=torch.float64)}


def nan_on_rank_1_later(rank: int, step: int) -> Gradients:
    bad = torch.full(SHAPES["twin"], torch.nan, dtype=torch.float64)
    return drawn(rank, step) | ({"twin": bad} if (rank, step) == (1, 1) else {})


def test_what_float16_cannot_hold_is_not_finite_on_any_rank() -> None:
    """So that the update is skipped on all."""
    for rank in on_two_ranks(partial(Rounded, dtype=torch.float16, unit=FLOAT16_UNIT), huge_on_rank_1):
        assert not rank["seen"][0]["wide"].isfinite().any()


def test_power_sgd_sends_two_thin_factors() -> None:
    for rank in on_two_ranks(power, drawn, 2):
        numbers = sum(RANK * sum(SHAPES[name]) for name in MATRICES) + 7 + 15
        assert rank["traffic"].sent == 8 * numbers
        assert rank["traffic"].calls == 2
        for name in ("vector", "small"):
            assert torch.allclose(rank["seen"][1][name], average(1)[name], rtol=1e-12)


def of_low_rank(rank: int, step: int) -> Gradients:
    """Matrices that lie on all ranks in the same few dimensions."""
    basis = torch.randn(40, RANK, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    gradients = drawn(rank, step)
    return gradients | {"tall": basis @ gradients["tall"][:RANK], "wide": gradients["wide"][:, :RANK] @ basis.mT}


def test_power_sgd_is_exact_where_few_columns_suffice() -> None:
    each = [of_low_rank(rank, 0) for rank in range(2)]
    for rank in on_two_ranks(power, of_low_rank):
        for name, alike in (("tall", True), ("wide", True), ("twin", False)):
            expected = (each[0][name] + each[1][name]) / 2
            assert torch.allclose(rank["seen"][0][name], expected, rtol=1e-9) == alike, name


def forgetful(network: nn.Module) -> Compression:
    """A mutation: the error memory is emptied before it is used."""
    compression = power(network)
    send = compression.send

    def empty_first(bucket: dist.GradBucket) -> Any:
        for error in compression.memory.own.values():
            error.zero_()
        return send(bucket)

    compression.send = empty_first  # type: ignore[method-assign]
    return compression


@pytest.mark.parametrize(("make", "kept"), [(power, True), (forgetful, False)])
def test_what_power_sgd_leaves_out_comes_later(make, kept) -> None:
    """All gradients there were = all that came out + what the ranks' error memories still hold, on average."""
    steps = 5
    ranks = on_two_ranks(make, drawn, steps)
    for name in MATRICES:
        given = sum(average(step)[name] for step in range(steps))
        came = sum(seen[name] for seen in ranks[0]["seen"])
        held = sum(rank["memory"][f"powersgd/error/{name}"] for rank in ranks) / 2
        assert torch.allclose(came + held, given, rtol=1e-9) == kept
        assert held.norm() > 0.1 * given.norm()
        assert all(
            torch.equal(mine[name], theirs[name]) for mine, theirs in zip(*(r["seen"] for r in ranks), strict=True)
        )


def test_buckets_do_not_matter_to_power_sgd() -> None:
    """DDP changes them after the first update, also after the first of a resumed run."""
    one = on_two_ranks(power, drawn, 3)
    many = on_two_ranks(power, drawn, 3, 0.001)
    assert many[0]["traffic"].calls > one[0]["traffic"].calls
    assert many[0]["traffic"].sent == one[0]["traffic"].sent
    for ours, theirs in zip(one[0]["seen"], many[0]["seen"], strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in SHAPES)


def test_an_update_that_is_not_finite_leaves_no_trace_in_the_memory() -> None:
    bad, good = (on_two_ranks(power, given, steps) for given, steps in ((nan_on_rank_1_later, 2), (drawn, 1)))
    for ours, theirs in zip(bad, good, strict=True):
        assert not ours["seen"][1]["twin"].isfinite().any()
        names = [name for name in theirs["memory"] if name != "powersgd/updates"]
        assert all(torch.equal(ours["memory"][name], theirs["memory"][name]) for name in names)


def test_the_first_updates_travel_whole() -> None:
    for rank in on_two_ranks(partial(PowerSGD, rank=RANK, start_step=2), drawn, 3, 0.001):
        assert [close(seen, average(step), 1e-12) for step, seen in enumerate(rank["seen"])] == [True, True, False]
        assert rank["memory"]["powersgd/updates"] == 3


def growing(rank: int, step: int) -> Gradients:
    return {name: g * 2.0 ** (step + 3) for name, g in drawn(rank, step).items()}


def with_scale(network: nn.Module) -> Compression:
    compression = power(network)
    compression.scale = lambda: 2.0 ** (int(compression.updates) + 2)  # type: ignore[attr-defined]
    return compression


def test_a_loss_scale_that_changes_does_not_reach_the_memory() -> None:
    """A scaled loss, as float16 needs it, with a scale that is another one at each update."""
    plain, scaled = on_two_ranks(power, drawn, 4), on_two_ranks(with_scale, growing, 4)
    for step, (ours, theirs) in enumerate(zip(scaled[0]["seen"], plain[0]["seen"], strict=True)):
        assert all(torch.equal(ours[name], theirs[name] * 2.0 ** (step + 3)) for name in SHAPES)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("make", [power, partial(Rounded, dtype=torch.float16, unit=FLOAT16_UNIT)])
def test_a_gpu_exchanges_as_a_cpu_does(make) -> None:
    """One rank: streams and futures are what differs there."""
    (here,), (there,) = (run_ranks(exchange, 1, make, drawn, 3, 0.001, True, device) for device in ("cpu", "cuda"))
    for ours, theirs in zip(here["seen"], there["seen"], strict=True):
        assert all(theirs[name] == pytest.approx(ours[name], rel=1e-6, abs=1e-9) for name in SHAPES)
