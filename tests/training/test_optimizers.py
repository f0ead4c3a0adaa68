"""Parameter groups, AdamW's decay, and Muon against its formula and torch's own."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from builders import random_ids, tiny_gpt
from lmforge.tasks.update import set_learning_rate
from lmforge.training import optimizers
from lmforge.training.optimizers import Muon, adamw, muon, orthogonalize

ADAMW = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
MUON = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1, "adamw_lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8}


def named_groups(network: nn.Module, made: list[Optimizer]) -> list[tuple[str, dict[str, float], set[str]]]:
    names = {p: name for name, p in network.named_parameters()}
    return [
        (type(optimizer).__name__, group, {names[p] for p in group["params"]})
        for optimizer in made
        for group in optimizer.param_groups
    ]


def test_adamw_decays_matrices_and_nothing_else() -> None:
    network = tiny_gpt(bias=True, norm="layer", positions="learned", tied=False)
    (_, first, decayed), (_, second, plain) = named_groups(network, adamw(network, **ADAMW))
    assert (first["weight_decay"], second["weight_decay"]) == (0.1, 0.0)
    assert decayed == {name for name, p in network.named_parameters() if p.dim() == 2}
    assert plain == {name for name, _ in network.named_parameters() if name.endswith("bias") or "norm" in name}


def test_muon_takes_the_matrices_inside_the_blocks_and_adamw_the_rest() -> None:
    network = tiny_gpt(tied=False, positions="learned")
    groups = named_groups(network, muon(network, **MUON))
    (matrices,) = [names for kind, _, names in groups if kind == "Muon"]
    assert matrices == {name for name, p in network.named_parameters() if p.dim() == 2 and name.startswith("blocks.")}
    rest = set().union(*(names for kind, _, names in groups if kind == "AdamW"))
    assert rest == {name for name, _ in network.named_parameters()} - matrices
    assert {group["weight_decay"] for kind, group, _ in groups if kind == "AdamW"} == {0.0}


def test_frozen_parameters_are_left_out() -> None:
    network = tiny_gpt()
    network.embed.weight.requires_grad_(False)
    for made in (adamw(network, **ADAMW), muon(network, **MUON)):
        assert all("embed.weight" not in names for _, _, names in named_groups(network, made))


def test_every_group_follows_the_schedule_from_its_own_peak() -> None:
    network = tiny_gpt()
    made = muon(network, **MUON)
    assert set_learning_rate(made, 0.5) == 0.01
    assert set_learning_rate(made, 0.25) == 0.005  # of the peak, not of the last rate
    assert sorted({group["lr"] for optimizer in made for group in optimizer.param_groups}) == [7.5e-4, 5e-3]


def test_one_adamw_step_is_torchs() -> None:
    network = tiny_gpt()
    reference = copy.deepcopy(network)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    (ours,) = adamw(network, **ADAMW | {"weight_decay": 0.0})
    for model, optimizer in ((network, ours), (reference, theirs)):
        model(random_ids(2, 8)).square().mean().backward()
        optimizer.step()
    for ours_p, theirs_p in zip(network.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(ours_p, theirs_p, atol=1e-6)


@pytest.mark.parametrize("shape", [(32, 32), (64, 16), (16, 64), (128, 96)])
def test_orthogonalized_singular_values_are_near_one(shape) -> None:
    matrix = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalize(matrix))
    assert float(values.quantile(0.02)) > 0.6
    assert float(values.max()) < 1.3
    assert float(torch.linalg.svdvals(orthogonalize(matrix, steps=1)).quantile(0.02)) < 0.6


def test_orthogonalized_matrices_keep_their_singular_vectors_and_scale_plays_no_part() -> None:
    matrix = torch.randn(1, 24, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    turned = u.mT @ orthogonalize(matrix) @ v.mT
    assert torch.allclose(turned, torch.diag_embed(turned.diagonal(dim1=-2, dim2=-1)), atol=1e-8)
    assert torch.allclose(orthogonalize(1e4 * matrix), orthogonalize(matrix), atol=1e-8)
    assert torch.allclose(orthogonalize(matrix.mT), orthogonalize(matrix).mT, atol=1e-8)


def test_a_stack_of_matrices_is_orthogonalized_one_by_one() -> None:
    matrices = torch.randn(5, 16, 24, generator=torch.Generator().manual_seed(0))
    matrices[2] *= 100.0  # a norm over the whole stack would show
    alone = torch.cat([orthogonalize(matrix[None]) for matrix in matrices])
    assert torch.allclose(orthogonalize(matrices), alone, atol=1e-5)
    assert not torch.allclose(orthogonalize(matrices.flip(0)), alone, atol=1e-1)


def test_a_zero_gradient_gives_a_zero_update() -> None:
    assert orthogonalize(torch.zeros(1, 8, 8)).abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_low_precision_is_iterated_in_float32(dtype) -> None:
    result = orthogonalize(torch.randn(1, 8, 8).to(dtype))
    assert result.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def weights_after(optimizer_of, shape: tuple[int, int], steps: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    p = nn.Parameter(torch.randn(shape, generator=generator))
    optimizer = optimizer_of([p])
    for _ in range(steps):
        p.grad = torch.randn(shape, generator=generator)
        optimizer.step()
    return p.detach()


@pytest.mark.parametrize("shape", [(32, 32), (64, 24), (24, 64)])
def test_muon_is_torchs_within_its_bf16(shape) -> None:
    def theirs(p):
        return torch.optim.Muon(p, lr=0.1, momentum=0.9, weight_decay=0.3, adjust_lr_fn="match_rms_adamw")

    start = weights_after(lambda p: Muon(p, 0.0, 0.9, 0.0), shape)
    moved = weights_after(lambda p: Muon(p, 0.1, 0.9, 0.3), shape) - start
    expected = weights_after(theirs, shape) - start
    assert (moved - expected).norm() < 0.03 * expected.norm()
    for wrong in (Muon([nn.Parameter(start)], 0.1, 0.5, 0.3), Muon([nn.Parameter(start)], 0.12, 0.9, 0.3)):
        options = (wrong.defaults["lr"], wrong.defaults["momentum"], wrong.defaults["weight_decay"])
        other = weights_after(lambda p, options=options: Muon(p, *options), shape) - start
        assert (other - expected).norm() > 0.03 * expected.norm()


def test_muon_steps_matrices_of_one_shape_as_it_would_each_alone(monkeypatch) -> None:
    batches = []
    whole = optimizers.orthogonalize
    monkeypatch.setattr(optimizers, "orthogonalize", lambda m: batches.append(len(m)) or whole(m))
    start = [torch.randn(16, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)]

    def stepped(groups: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        done = []
        for values in groups:
            parameters = [nn.Parameter(value.clone()) for value in values]
            optimizer = Muon(parameters, 0.1, 0.9, 0.0)
            for p in parameters:
                p.grad = p.detach().sin()
            optimizer.step()
            done += [p.detach() for p in parameters]
        return done

    together, alone = stepped([start]), stepped([[value] for value in start])
    assert batches == [3, 1, 1, 1]
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(together, alone, strict=True))
    assert not torch.allclose(together[0] - start[0], together[1] - start[1], atol=1e-2)


def test_muon_without_a_gradient_leaves_a_matrix_alone() -> None:
    p = nn.Parameter(torch.ones(4, 4))
    Muon([p], 0.1, 0.9, 0.5).step()
    assert (p == 1).all()


def test_muon_makes_its_buffer_once(monkeypatch) -> None:
    made: list[torch.Size] = []
    zeros = torch.zeros_like
    monkeypatch.setattr(optimizers.torch, "zeros_like", lambda p, **more: made.append(p.shape) or zeros(p, **more))
    p = nn.Parameter(torch.randn(4, 4))
    optimizer = Muon([p], lr=0.1, momentum=0.9, weight_decay=0.0)
    for _ in range(3):
        p.grad = torch.randn(4, 4)
        optimizer.step()
    assert made == [p.shape]
