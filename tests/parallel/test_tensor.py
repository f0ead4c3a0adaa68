"""What tensor parallelism needs to know of a network."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lmforge.config.errors import UsageError
from lmforge.models.gpt import GPT
from lmforge.parallel.tensor import split_matrices


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_layer_that_no_plan_names_is_refused(one_rank) -> None:
    """It would be trained by each rank on other positions, and no gradient would tell the others."""
    with torch.device("meta"):
        network = GPT(64, 16, 2, 2, 1, 32, 64)
        network.blocks["1"].gate = nn.Linear(32, 1)
    with pytest.raises(UsageError, match=r"strategy\.tp=1: no tensor_plan of GPT .* blocks\.1\.gate\.weight, blocks\."):
        split_matrices(network, init_device_mesh("cpu", (1,)))
