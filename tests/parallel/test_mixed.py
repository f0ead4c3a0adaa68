"""Layers that compute in bfloat16 from float32 weights."""

import pytest
import torch
from torch import nn

from lmforge.config.errors import UsageError
from lmforge.models.gpt import GPT
from lmforge.parallel.mixed import mix
from lmforge.parallel.plan import initialise

OPTIONS = {
    "qwen": {},
    "gpt2": {"norm": "layer", "qk_norm": False, "positions": "learned", "activation": "gelu", "bias": True},
    "untied": {"tied": False},
}


def build(**options) -> GPT:
    with torch.device("meta"):
        network = GPT(64, 16, 2, 2, 1, 32, 64, **options)
    network.to_empty(device="cpu")
    initialise(network, 0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return network


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_forward_is_low_and_gradients_are_float32(options) -> None:
    network, ids = build(**options), torch.randint(64, (2, 16))
    exact = network(ids)
    mix(network, torch.bfloat16)
    logits = network(ids)
    logits.float().square().mean().backward()
    assert logits.dtype == torch.bfloat16
    assert torch.allclose(logits.float(), exact.detach(), atol=0.05 * exact.detach().abs().max().item())
    assert not torch.equal(logits.float(), exact)
    assert {p.grad.dtype for p in network.parameters() if p.grad is not None} == {torch.float32}
    assert all(p.grad is not None for p in network.parameters())


def test_gradients_point_the_same_way() -> None:
    ids = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(0))
    gradients = []
    for low in (False, True):
        network = build()
        if low:
            mix(network, torch.bfloat16)
        network(ids).float().logsumexp(-1).mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in network.parameters()]))
    assert torch.cosine_similarity(*gradients, dim=0) > 0.99


def test_names_and_weights_stay() -> None:
    network = build()
    before = {name: p.clone() for name, p in network.state_dict().items()}
    mix(network, torch.bfloat16)
    assert list(network.state_dict()) == list(before)
    assert all(torch.equal(p, before[name]) for name, p in network.state_dict().items())


def test_a_layer_of_another_kind_is_refused_by_name() -> None:
    network = nn.Sequential(nn.Linear(8, 8), nn.Conv1d(8, 8, 1))
    with pytest.raises(UsageError, match="1 is a Conv1d"):
        mix(network, torch.bfloat16)
