"""The network: documents kept apart, the cache, causality, starting values, sizes and FLOPs."""

from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from builders import SHAPE, packed, random_ids, tiny_gpt
from lmforge.models import attention
from lmforge.models.gpt import GPT, Cache, rotary, rotate
from lmforge.parallel.plan import initialise

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "model"
KERNELS = {"fused": False, "matmul": True}
OPTIONS = [
    {"positions": positions, "n_kv_head": heads, "norm_place": place, "tied": tied}
    for positions, heads, place, tied in product(("rope", "learned"), (4, 2, 1), ("pre", "post"), (True, False))
]
OTHERS = [
    {"norm": "layer", "activation": "gelu", "bias": True, "qk_norm": False},
    {"norm": "layer", "activation": "relu2", "positions": "learned"},
    {"head_dim": 16, "rope_base": 500.0, "qk_norm": False},
]


def short(options: dict[str, Any]) -> str:
    return "-".join(str(value) for value in options.values())


@pytest.fixture(params=["fused", "matmul"])
def kernel(request, monkeypatch) -> str:
    monkeypatch.setattr(attention, "uses_matmul", lambda *facts: KERNELS[request.param])
    return request.param


def a_and_b(tmp_path: Path, a: list[int], b: list[int]) -> dict[str, Tensor]:
    batch = packed(tmp_path / "-".join(map(str, a)), [a, b], len(a) + len(b)).batch(torch.arange(1).numpy())
    return {name: batch[name] for name in ("input_ids", "doc_ids", "positions")}


@pytest.mark.parametrize("options", [{}, {"positions": "learned"}], ids=["rope", "learned"])
def test_a_packed_document_neither_sees_nor_feels_the_one_before(tmp_path, kernel, options) -> None:
    network = tiny_gpt(scale=5.0, **options)
    a, b = [5, 9, 2, 7, 1], [3, 8, 4, 4, 6, 2, 1]
    packed_b = network(**a_and_b(tmp_path, a, b))[0, 5:]
    other_b = network(**a_and_b(tmp_path, [60, 61, 62, 63, 50], b))[0, 5:]
    alone = network(torch.tensor([b]))[0]
    assert packed_b.equal(other_b)
    assert torch.allclose(packed_b, alone, atol=1e-5)
    batch = a_and_b(tmp_path / "again", a, b)
    unmasked = network(**batch | {"doc_ids": torch.zeros_like(batch["doc_ids"])})[0, 5:]
    unmoved = network(**batch | {"positions": torch.arange(12)[None]})[0, 5:]
    assert not torch.allclose(unmasked, alone, atol=1e-2)
    assert torch.allclose(unmoved, alone, atol=1e-5) == (options == {})  # rotary positions are relative


def test_bf16_matmul_attention_stays_close_to_float32() -> None:
    network, ids = tiny_gpt(scale=3.0), random_ids(2, 32)
    docs = torch.arange(32)[None].expand(2, -1) // 10
    exact = network(ids, docs)
    low = network.bfloat16()(ids, docs).float()
    assert (low - exact).abs().mean() < 0.03 * exact.abs().mean()
    assert (low - exact.roll(1, 1)).abs().mean() > 0.3 * exact.abs().mean()


@pytest.mark.parametrize("options", [*OPTIONS, *OTHERS], ids=short)
def test_cached_logits_equal_a_full_forward_pass(options) -> None:
    network, ids = tiny_gpt(scale=5.0, **options), random_ids(2, 12)
    full = network(ids)
    cache = Cache(capacity=12)
    steps = [network(part, cache=cache) for part in (ids[:, :5], ids[:, 5:6], ids[:, 6:7], ids[:, 7:11], ids[:, 11:])]
    assert torch.allclose(torch.cat(steps, 1), full, atol=1e-4)
    assert cache.length == 12
    lagging = Cache(capacity=12)
    network(ids[:, :5], cache=lagging)
    lagging.length -= 1  # mutation: a cache that forgot one position
    assert not torch.allclose(network(ids[:, 5:6], cache=lagging), full[:, 5:6], atol=1e-2)


@pytest.mark.parametrize("options", [{}, *OTHERS], ids=short)
def test_a_later_token_changes_nothing_earlier(kernel, options) -> None:
    network, ids = tiny_gpt(scale=5.0, **options), random_ids(1, 10)
    changed = ids.clone()
    changed[0, 6] = (ids[0, 6] + 1) % 64
    before, after = network(ids), network(changed)
    assert torch.allclose(before[:, :6], after[:, :6], atol=1e-6)
    assert not torch.allclose(before[:, 6:], after[:, 6:], atol=1e-2)


def test_rotary_is_a_rotation_of_complex_numbers() -> None:
    x = torch.randn(2, 3, 7, 8, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 0, 1, 2, 3]])
    ours = rotate(x, *rotary(positions, 8, 100.0, torch.float32))
    turn = positions[:, None, :, None].double() / 100.0 ** (torch.arange(4).double() / 4)
    z = torch.complex(x[..., :4].double(), x[..., 4:].double()) * torch.polar(torch.ones_like(turn), turn)
    assert torch.allclose(ours, torch.cat((z.real, z.imag), -1).float(), atol=1e-5)
    interleaved = torch.view_as_real(
        torch.view_as_complex(x.unflatten(-1, (4, 2)).contiguous())
        * torch.polar(torch.ones_like(turn), turn).to(torch.complex64)
    ).flatten(-2)
    assert not torch.allclose(ours, interleaved, atol=1e-2)


def test_post_norm_differs_from_pre_norm() -> None:
    ids = random_ids(1, 8)
    assert not torch.allclose(tiny_gpt(norm_place="pre")(ids), tiny_gpt(norm_place="post")(ids), atol=1e-3)


def parameters(network: torch.nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


@pytest.mark.parametrize(("preset", "count"), [("gpt2-124m", 124_439_808), ("gpt2-355m", 354_823_168)])
def test_published_sizes(preset, count) -> None:
    options = yaml.safe_load((CONFIGS / f"{preset}.yaml").read_text())
    options.pop("_target_")
    with torch.device("meta"):
        assert parameters(GPT(**options)) == count
        assert parameters(GPT(**options | {"tied": False})) == count + 50257 * options["d_model"]


def starting_values(seed: int, **options: Any) -> dict[str, Tensor]:
    network = GPT(**{**SHAPE, **options})
    initialise(network, seed)
    return network.state_dict()


def test_a_starting_value_depends_on_seed_and_name_alone() -> None:
    values, other = starting_values(4), starting_values(4, dropout=0.5, rope_base=5.0, n_layer=3)
    reseeded = starting_values(5)
    drawn = [name for name, value in values.items() if value.unique().numel() > 1]
    assert len(drawn) == 1 + 2 * 5  # the embedding and five matrices a block
    assert all(values[name].equal(other[name]) for name in values)
    assert not any(values[name].equal(reseeded[name]) for name in drawn)
    assert not any(values[a].equal(values[b]) for a, b in combinations(drawn, 2) if values[a].shape == values[b].shape)


def test_every_block_starts_as_the_identity() -> None:
    values = starting_values(4, d_model=128, d_ff=256, bias=True, tied=False)
    zeros = {name for name, value in values.items() if value.count_nonzero() == 0}
    assert zeros == {name for name in values if name.endswith(("bias", "attention.out.weight", "ff.down.weight"))}
    assert all((value == 1).all() for name, value in values.items() if name.endswith("norm.weight"))
    for name in ("embed.weight", "head.weight", "blocks.0.attention.q.weight", "blocks.1.ff.up.weight"):
        assert float(values[name].std()) == pytest.approx(0.02, rel=0.05)


def linear_flops(network: GPT, time: int) -> int:
    """Forward FLOPs of all plain matrix products, as torch counts them."""
    with FlopCounterMode(display=False) as counter:
        network(random_ids(1, time))
    counts = counter.get_flop_counts()["Global"]
    return sum(flops for operation, flops in counts.items() if operation in (torch.ops.aten.mm, torch.ops.aten.addmm))


@pytest.mark.parametrize("options", [{}, {"tied": False}, {"positions": "learned"}, OTHERS[0], OTHERS[2]], ids=short)
def test_flops_of_the_linear_layers_are_those_that_torch_counts(options) -> None:
    network = tiny_gpt(**options)
    with torch.no_grad():
        counted = linear_flops(network, 16)
    assert 16 * 2 * network.matmul_parameters == counted
    assert counted != 16 * 2 * parameters(network)


def test_attentions_flops_are_half_a_square() -> None:
    network = tiny_gpt()
    extra = network.flops_per_token(20) - network.flops_per_token(10)
    per_layer = 2 * 2 * (10 / 2) * network.n_head * network.head_dim  # two products over 5 more keys on average
    assert extra == 3 * SHAPE["n_layer"] * per_layer


def test_dropout_acts_in_training_alone() -> None:
    network, ids = tiny_gpt(dropout=0.5), random_ids(1, 8)
    assert network(ids).equal(network(ids))
    network.train()
    assert not network(ids).equal(network(ids))
