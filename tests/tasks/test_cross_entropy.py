"""The 16-bit cross-entropy against torch's own on float32 copies."""

import pytest
import torch
import torch.nn.functional as F

from lmforge.data.packing import IGNORED
from lmforge.tasks.cross_entropy import summed_cross_entropy


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


def test_a_target_without_any_probability_has_a_finite_loss() -> None:
    logits = torch.tensor([[300.0, -300.0]], dtype=torch.bfloat16, requires_grad=True)
    loss = summed_cross_entropy(logits, torch.tensor([1]))
    loss.backward()
    assert torch.isfinite(loss)
    assert logits.grad.tolist() == [[1.0, -1.0]]


def test_logits_that_are_not_finite_stay_visible() -> None:
    logits = torch.tensor([[float("nan"), 0.0]], dtype=torch.bfloat16, requires_grad=True)
    assert torch.isnan(summed_cross_entropy(logits, torch.tensor([1])))
