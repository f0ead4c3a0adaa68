"""FSDP holds a share of everything, and one rank alone may write."""

import pytest
import yaml
from jobs import train_on

from tiny import compose, metrics, new_run


@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_rank_holds_its_share(shards, world) -> None:
    plain = compose(shards, "strategy=fsdp", "trainer.max_steps=2", "batch.sequences=6")
    facts = train_on(world, plain, new_run(plain).path)
    total = sum(whole for _, whole in facts[0]["parameters"].values())
    shares = [sum(mine for mine, _ in rank["parameters"].values()) for rank in facts]
    assert sum(shares) == total
    assert max(shares) <= 1.05 * total / world  # rows do not always divide
    for name, (_, whole) in facts[0]["parameters"].items():
        assert sum(rank["parameters"][name][0] for rank in facts) == whole, name
    assert [rank["moments"] for rank in facts] == [2 * share for share in shares]


def test_ddp_holds_everything(shards) -> None:
    """The control of the test above."""
    plain = compose(shards, "strategy=ddp", "trainer.max_steps=2")
    facts = train_on(2, plain, new_run(plain).path)
    assert all(mine == whole for rank in facts for mine, whole in rank["parameters"].values())


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_one_rank_writes(shards, tmp_path, kind) -> None:
    words = (f"strategy={kind}", "trainer.devices=2", "trainer.val_every_n_steps=2")
    plain = compose(shards, *words, "callbacks.checkpoint.every_n_steps=2")
    folder = new_run(plain).path
    train_on(2, plain, folder)
    assert [path.parent for path in tmp_path.rglob("config.yaml")] == [tmp_path / folder]
    assert yaml.safe_load((folder / "config.yaml").read_text())["seed"] == 0
    assert [row[0] for row in metrics(folder)] == [1, 2, 3, 4, 5, 6]
    assert not list(tmp_path.rglob(".*.part"))
