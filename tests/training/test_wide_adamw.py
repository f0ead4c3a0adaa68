"""AdamW for 16-bit weights."""

import math

import pytest
import torch

from lmforge.training.optimizers import WideAdamW
from tiny import compose, metrics, new_run, train


def steps(kind: type, dtype: torch.dtype, **options: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.randn(8, 8, generator=generator).to(dtype))
    group = {"params": [p], "weight_decay": 0.1}
    optimizer = kind([group], lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    for _ in range(20):
        p.grad = (1e-5 * torch.randn(8, 8, generator=generator)).to(dtype)
        optimizer.step()
    return p.detach().float()


def test_in_float32_it_is_torchs_adamw() -> None:
    assert torch.allclose(steps(WideAdamW, torch.float32), steps(torch.optim.AdamW, torch.float32), atol=1e-6)


def test_small_gradients_count_in_float16_where_torchs_squares_vanish() -> None:
    exact = steps(torch.optim.AdamW, torch.float32)
    assert torch.allclose(steps(WideAdamW, torch.float16), exact, atol=0.02)
    assert not torch.allclose(steps(torch.optim.AdamW, torch.float16), exact, atol=0.02, equal_nan=False)


@pytest.mark.parametrize("precision", ["16-true", "bf16-true", "16-mixed", "bf16-mixed"])
def test_every_16_bit_precision_learns(shards, precision: str) -> None:
    plain = compose(shards, f"precision={precision}", "trainer.max_steps=30", "optimizer.lr=1e-2", "trainer.threads=1")
    folder = new_run(plain).path
    train(plain, folder)
    losses = [loss for _, loss in metrics(folder, "train/loss")]
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0] - 0.5


def test_its_step_is_counted_on_the_cpu_wherever_the_checkpoint_was_read_to() -> None:
    p = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = WideAdamW([{"params": [p], "weight_decay": 0.0}], lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    moments = {name: torch.zeros(2) for name in ("exp_avg", "exp_avg_sq")}
    elsewhere = torch.Tensor._make_subclass(Elsewhere, torch.tensor(7.0))
    optimizer.state[p] = {"step": elsewhere, **moments}
    p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.step()
    step = optimizer.state[p]["step"]
    assert (float(step), step.device.type, type(step)) == (9.0, "cpu", torch.Tensor)
    assert Elsewhere.copies == 1


class Elsewhere(torch.Tensor):
    """A number on a device that a step should not have to wait for."""

    copies = 0

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        Elsewhere.copies += 1
        return self.as_subclass(torch.Tensor)
