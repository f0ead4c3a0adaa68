"""The share of matrix products in the asked dtype, counted over one forward and backward pass."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from builders import random_ids, tiny_gpt
from fits import Fit, fit
from lmforge.parallel.mixed import mix
from lmforge.runs.folder import list_checkpoints
from lmforge.training.checkpoint import Checkpoint
from lmforge.training.matmul_share import MatmulFlops, MatmulShare


def test_flops_are_torchs(monkeypatch) -> None:
    """Its table lacks the CPU's fused attention, so the network takes the plain products."""
    monkeypatch.setattr("lmforge.models.attention.uses_matmul", lambda *args: True)
    network, ids = tiny_gpt(), random_ids(2, 16)
    with FlopCounterMode(display=False) as theirs:
        network(ids).sum().backward()
    with MatmulFlops() as ours:
        network(ids).sum().backward()
    assert sum(ours.flops.values()) == theirs.get_total_flops()
    assert ours.share(torch.float32) == 1.0
    assert ours.share(torch.bfloat16) == 0.0


def test_fused_attention_counts_as_its_products() -> None:
    q, k, v = (torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3))
    with MatmulFlops() as seen:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    one = 2 * 2 * 8 * 8 * 4  # a product of [8, 4] by [4, 8] for each head
    assert list(seen.flops.values()) == [2 * one + 5 * one]


@pytest.mark.parametrize(("mode", "active"), [(MatmulFlops, 0), (lambda: MatmulFlops().products, 1)])
def test_a_backward_pass_runs_without_a_dispatch_mode(mode, active) -> None:
    """Under which autograd would add up the gradients of a weight used twice in new memory."""
    weight, stack = torch.randn(8, 8, requires_grad=True), []
    weight.register_hook(lambda gradient: stack.append(torch._C._len_torch_dispatch_stack()))
    with mode():
        sum((torch.ones(2, 8) @ weight).sum() for _ in range(2)).backward()
    assert stack == [active]


def test_what_ran_in_another_dtype_is_named() -> None:
    network = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 24, bias=False))
    mix(network[:1], torch.bfloat16)
    with MatmulFlops() as seen:
        network[1](network[0](torch.ones(4, 8)).float()).sum().backward()
    assert seen.share(torch.bfloat16) == pytest.approx(2 / (2 + 3 * 3))  # the first needs no gradient of its input
    assert seen.others(torch.bfloat16) == "mm in float32 81.8%"
    assert MatmulFlops().share(torch.float32) is None


def digits(run: Fit) -> dict[str, object]:
    """The sha256 of every file of the last checkpoint."""
    return Checkpoint(list_checkpoints(run.folder / "checkpoints")[-1]).files


def test_a_run_says_it_once_and_its_digits_do_not_change(shards, monkeypatch, capsys) -> None:
    run = fit(shards, "precision=bf16-mixed", "trainer.max_steps=3")
    said = capsys.readouterr().err
    assert said.count("matmuls     100.0% of the FLOPs of matrix products were in bfloat16 (first step)") == 1
    assert json.loads((run.folder / "summary.json").read_text())["matmul_dtype_share"] == 1.0
    assert run.task.around_gradients is None
    monkeypatch.setattr(MatmulShare, "on_train_start", lambda *args: None)
    assert digits(fit(shards, "precision=bf16-mixed", "trainer.max_steps=3")) == digits(run)


def test_too_little_in_the_asked_dtype_is_a_warning(shards, monkeypatch, capsys) -> None:
    monkeypatch.setattr("lmforge.parallel.precision.mix", lambda network, dtype: None)  # the word does nothing
    run = fit(shards, "precision=bf16-mixed", "trainer.max_steps=2")
    warning = "only 0.0% of the FLOPs of matrix products were in bfloat16; others: "
    assert f"warning: {warning}" in capsys.readouterr().err
    (found,) = [told for told in run.summary["warnings"] if told.startswith(warning)]
    assert "mm in float32 " in found


def test_compiled_blocks_give_no_number(shards, capsys) -> None:
    run = fit(shards, "compile=eager", "trainer.max_steps=1", "trainer.val_every_n_steps=null")
    assert run.summary["matmul_dtype_share"] is None
    assert "matmuls     dtype not measured: compiled blocks hide their operations" in capsys.readouterr().err
