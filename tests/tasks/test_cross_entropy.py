"""The 16-bit cross-entropy against torch's own on float32 copies."""

import pytest
import torch
import torch.nn.functional as F

from lmforge.data.packing import IGNORED
from lmforge.tasks import cross_entropy
from lmforge.tasks.cross_entropy import in_chunks, summed_cross_entropy


def both(dtype: torch.dtype, scale: float = 1 / 2047) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(40, 64, generator=generator)).to(dtype)
    labels = torch.randint(64, (40,), generator=generator)
    labels[::5] = IGNORED
    found = []
    for function in (summed_cross_entropy, lambda x, y: F.cross_entropy(x.float(), y, reduction="sum")):
        leaf = logits.clone().requires_grad_()
        loss = function(leaf, labels)
        (loss * scale).backward()
        found += [loss.detach(), leaf.grad]
    return tuple(found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_loss_and_gradient_are_torchs(dtype) -> None:
    loss, gradient, expected, expected_gradient = both(dtype)
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    assert gradient.dtype == dtype
    assert torch.equal(gradient, expected_gradient) or torch.allclose(gradient, expected_gradient, rtol=1e-2, atol=1e-7)
    assert gradient.float().sum() == pytest.approx(expected_gradient.float().sum().item(), abs=1e-4)
    assert (gradient[::5] == 0).all()


@pytest.mark.parametrize("far", [80.0, 90.0, 120.0, 600.0])
def test_a_loss_beyond_float32s_probabilities_is_not_capped(far) -> None:
    logits = torch.tensor([[far, 0.0, 1.0], [0.0, 1.0, 2.0]], dtype=torch.bfloat16, requires_grad=True)
    labels = torch.tensor([1, 1])
    loss = summed_cross_entropy(logits, labels)
    loss.backward()
    assert loss.item() == pytest.approx(F.cross_entropy(logits.double(), labels, reduction="sum").item(), rel=1e-6)
    assert logits.grad[0].tolist() == pytest.approx([1.0, -1.0, 0.0], abs=1e-30)


def test_the_way_of_other_devices_gives_the_same() -> None:
    logits = 60 * torch.randn(16, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    target = torch.arange(16)[:, None] % 8
    p = torch.softmax(logits, dim=-1, dtype=torch.float32)
    expected = F.cross_entropy(logits.double(), target.squeeze(1), reduction="none").float()
    assert (expected > 87).any()
    assert torch.allclose(cross_entropy._through_the_top(logits, p, target), expected, atol=1e-5)
    assert torch.allclose(cross_entropy._losses(logits, p, target), expected, atol=1e-5)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_a_row_without_a_label_poisons_nothing(poison) -> None:
    logits = torch.tensor([[poison, poison], [1.0, 2.0]], dtype=torch.bfloat16, requires_grad=True)
    loss = summed_cross_entropy(logits, torch.tensor([IGNORED, 1]))
    loss.backward()
    assert loss.item() == pytest.approx(F.cross_entropy(torch.tensor([[1.0, 2.0]]), torch.tensor([1])).item(), rel=1e-6)
    assert logits.grad[0].tolist() == [0.0, 0.0]
    assert torch.isfinite(logits.grad).all()


def test_logits_that_are_not_finite_stay_visible() -> None:
    logits = torch.tensor([[float("nan"), 0.0]], dtype=torch.bfloat16, requires_grad=True)
    assert torch.isnan(summed_cross_entropy(logits, torch.tensor([1])))


def _total(losses):
    return torch.stack(losses).sum()


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_in_chunks_loss_and_gradients_are_those_of_all_at_once(chunk) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 5, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(11, (10,), generator=generator)
    labels[3] = IGNORED
    sizes: list[int] = []

    def head(x: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        return x @ weight.mT

    whole = summed_cross_entropy((hidden @ weight.mT).flatten(0, 1), labels)
    parts = in_chunks(hidden, head, part=summed_cross_entropy, join=_total, labels=labels, chunk=chunk)
    assert torch.allclose(whole, parts, rtol=1e-12)
    for expected, found in zip(*(torch.autograd.grad(loss, (hidden, weight)) for loss in (whole, parts)), strict=True):
        assert torch.allclose(expected, found, rtol=1e-12)
    assert max(sizes) <= chunk
    assert sum(sizes) == 20  # forward, and once more in backward
