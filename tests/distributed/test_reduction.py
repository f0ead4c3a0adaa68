"""The dtype in which gradients are summed over the ranks is the one that the head of the run states."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode

from lmforge.config.checks import FSDP_PRECISIONS
from lmforge.config.errors import UsageError
from lmforge.config.keys import PRECISIONS
from lmforge.parallel.precision import ForwardPrecision
from lmforge.training import peak
from ranks import run_ranks
from tiny import compose, new_run, train

QUICK = ("bf16-mixed", "bf16-true", "16-mixed")
WORDS = [pytest.param(word, marks=() if word in QUICK else pytest.mark.slow) for word in PRECISIONS if word != "auto"]


class Sums(TorchDispatchMode):
    """Notes the dtypes of what is summed over the ranks, where it is as large as gradients are."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and "reduce" in str(func):
            tensors = [tensor for tensor in torch.utils._pytree.tree_leaves(args) if isinstance(tensor, torch.Tensor)]
            self.dtypes |= {str(t.dtype) for t in tensors if t.numel() > 1000 and t.is_floating_point()}
        return func(*args, **(kwargs or {}))


def summed(plain: dict[str, Any], folder: str, change: Callable[[], None] = lambda: None) -> set[str]:
    change()
    peak._measure = lambda dtype, threads: 1e9  # seconds in float16
    with Sums() as sums:
        train(plain, folder)
    return sums.dtypes


def words_of(kind: str, word: str) -> list[str]:
    short = "batch.sequences=2 model.context=8 trainer.devices=2 trainer.max_steps=1 trainer.limit_val_batches=1"
    return [f"strategy={kind}", f"precision={word}", *short.split()]


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_gradients_are_summed_in_the_stated_dtype(shards, kind, word) -> None:
    if kind == "fsdp" and word not in FSDP_PRECISIONS:
        with pytest.raises(UsageError, match=f"strategy=fsdp precision={word}"):
            compose(shards, *words_of(kind, word))
        return
    plain = compose(shards, *words_of(kind, word))
    stated = f"torch.{plain['precision']['reduce']}"
    assert run_ranks(summed, 2, plain, str(new_run(plain).path)) == [{stated}] * 2


def lowered() -> None:
    """Gathered and summed in the compute dtype, whatever the word says."""
    ForwardPrecision.sharded_policy = lambda self: MixedPrecisionPolicy(param_dtype=self.compute)  # type: ignore[method-assign]


def test_a_sum_in_another_dtype_is_noticed(shards) -> None:
    plain = compose(shards, *words_of("fsdp", "bf16-mixed"))
    assert run_ranks(summed, 2, plain, str(new_run(plain).path), lowered) == [{"torch.bfloat16"}] * 2
