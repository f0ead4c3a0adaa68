"""The checkpoint format: exact round trips, and a plain refusal of anything that is not whole."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from builders import random_ids, tiny_gpt
from lmforge.config.errors import UsageError
from lmforge.parallel.parallel import Parallel
from lmforge.runs.folder import list_checkpoints
from lmforge.training.checkpoint import Checkpoint, Piece, PieceReader, write_json, write_pieces
from lmforge.training.optimizers import adamw, muon
from lmforge.training.resume import find_checkpoint, load_optimizers, newest_checkpoint
from lmforge.training.saving import Keep, Saver, optimizer_pieces, weight_pieces
from lmforge.training.weights import load_weights, plain_name

KEEP = Keep(last=10, best=0, monitor="val/loss", mode="min")
Spoil = Callable[[Path], None]


def state(step: int, **more: object) -> dict[str, object]:
    return {"step": step, "metrics": {}, "callbacks": {}, **more}


def pieces(network: nn.Module, optimizers: tuple = ()) -> dict[str, dict[str, Piece]]:
    return {"weights": weight_pieces(network), "optimizer": optimizer_pieces(network, list(optimizers)), "local": {}}


def saved(folder: Path, network: nn.Module, *steps: int, optimizers: tuple = ()) -> list[Checkpoint]:
    saver = Saver(folder, rank=0, world=1, keep=KEEP)
    for step in steps or (1,):
        saver.save(state(step), pieces(network, optimizers))
    saver.wait()
    return [Checkpoint(path) for path in list_checkpoints(folder)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_weights_come_back_bit_for_bit_in_their_dtype(tmp_path, dtype) -> None:
    network, other = tiny_gpt(seed=1).to(dtype), tiny_gpt(seed=2).to(dtype)
    (checkpoint,) = saved(tmp_path, network)
    checkpoint.verify()
    load_weights(other, checkpoint.reader("weights"))
    for name, value in network.state_dict().items():
        assert other.state_dict()[name].equal(value)
        assert checkpoint.reader("weights").dtype(name) == dtype
    assert not other.embed.weight.equal(tiny_gpt(seed=2).embed.weight.to(dtype))


@pytest.mark.parametrize("make", [adamw, muon])
def test_optimizer_state_comes_back_and_the_next_step_is_the_same(tmp_path, make) -> None:
    adamw_options = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    muon_options = {**adamw_options, "momentum": 0.9, "adamw_lr": 0.01}
    options = adamw_options if make is adamw else muon_options

    def step(network: nn.Module, optimizers: list) -> None:
        network(random_ids(2, 8)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    network, resumed, forgetful = tiny_gpt(scale=3.0), tiny_gpt(seed=2), tiny_gpt(seed=3)
    mine, theirs, empty = (make(n, **options) for n in (network, resumed, forgetful))
    step(network, mine)
    (checkpoint,) = saved(tmp_path, network, optimizers=tuple(mine))
    load_weights(resumed, checkpoint.reader("weights"))
    load_weights(forgetful, checkpoint.reader("weights"))
    load_optimizers(resumed, theirs, checkpoint.reader("optimizer"))
    for model, optimizers in ((network, mine), (resumed, theirs), (forgetful, empty)):
        step(model, optimizers)
    assert all(a.equal(b) for a, b in zip(network.parameters(), resumed.parameters(), strict=True))
    assert not all(a.equal(b) for a, b in zip(network.parameters(), forgetful.parameters(), strict=True))


def test_optimizer_state_of_a_stranger_is_refused(tmp_path) -> None:
    network = tiny_gpt()
    write_pieces(tmp_path, "optimizer", 0, {"nowhere.weight/exp_avg": Piece(torch.zeros(2), (0,), (2,))})
    reader = PieceReader([tmp_path / "optimizer-00000.safetensors"])
    with pytest.raises(UsageError, match=r"nowhere\.weight"):
        load_optimizers(network, [], reader)


def test_tied_weights_are_stored_once_and_load_tied(tmp_path) -> None:
    network, other = tiny_gpt(tied=True), tiny_gpt(seed=2, tied=True)
    (checkpoint,) = saved(tmp_path, network)
    names = list(checkpoint.reader("weights").names())
    assert [name for name in names if "embed" in name or "head" in name] == ["embed.weight"]
    load_weights(other, checkpoint.reader("weights"))
    assert other(random_ids(1, 8)).equal(network(random_ids(1, 8)))
    with torch.no_grad():
        other.embed.weight.mul_(2.0)
    assert not other(random_ids(1, 8)).equal(network(random_ids(1, 8)))
    assert sum(p.numel() for p in other.parameters()) == sum(torch.Size(s).numel() for s in shapes(checkpoint))


def shapes(checkpoint: Checkpoint) -> list[tuple[int, ...]]:
    return list(checkpoint.reader("weights").shapes.values())


def test_pieces_of_any_cut_make_the_whole_and_any_part_of_it(tmp_path) -> None:
    whole = torch.arange(35.0).view(7, 5)
    for rank, rows in enumerate((slice(0, 3), slice(3, 4), slice(4, 7))):
        write_pieces(tmp_path, "weights", rank, {"w": Piece(whole[rows], (rows.start, 0), (7, 5))})
    reader = PieceReader(sorted(tmp_path.glob("*.safetensors")))
    assert reader.read("w").equal(whole)
    part = torch.empty(3, 2)
    reader.read_into("w", part, (2, 1))
    assert part.equal(whole[2:5, 1:3])
    with pytest.raises(UsageError, match="hold 20 of the 35 values"):
        PieceReader(sorted(tmp_path.glob("*.safetensors"))[:2]).read("w")


HALF, WHOLE = torch.ones(2, 4), (4, 4)
ODD: dict[str, tuple[dict[str, Piece], str]] = {
    "twice the same": ({"a": Piece(HALF, (0, 0), WHOLE), "b": Piece(HALF, (0, 0), WHOLE)}, "overlap"),
    "overlapping and a hole": ({"a": Piece(HALF, (0, 0), WHOLE), "b": Piece(HALF, (1, 0), WHOLE)}, "overlap"),
    "overlapping by a corner": (
        {"a": Piece(torch.ones(3, 3), (0, 0), WHOLE), "b": Piece(torch.ones(2, 2), (2, 2), WHOLE)},
        "overlap",
    ),
    "outside": ({"a": Piece(HALF, (0, 0), WHOLE), "b": Piece(HALF, (3, 0), WHOLE)}, "not inside"),
    "before the start": ({"a": Piece(HALF, (-1, 0), WHOLE)}, "not inside"),
    "another number of axes": ({"a": Piece(HALF, (0,), WHOLE)}, "not inside"),
    "shapes that differ": ({"a": Piece(HALF, (0, 0), WHOLE), "b": Piece(HALF, (2, 0), (5, 4))}, "another shape"),
    "an absurd shape": ({"a": Piece(HALF, (0, 0), (1 << 40, 1 << 20))}, "the files hold 8 of the"),
    "no numbers": ({"a": Piece(HALF, ("x", "y"), WHOLE)}, "incomplete or corrupt"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(("odd", "message"), ODD.values(), ids=ODD)
def test_pieces_that_do_not_fit_together_are_refused_before_memory_is_taken(tmp_path, odd, message) -> None:
    for rank, piece in enumerate(odd.values()):
        write_pieces(tmp_path, "optimizer", rank, {"norm.weight/slot": piece})
    with pytest.raises(UsageError, match=message):
        PieceReader(sorted(tmp_path.glob("*.safetensors"))).read("norm.weight/slot")
    network = tiny_gpt()
    optimizers = adamw(network, 0.1, (0.9, 0.95), 1e-8, 0.0)
    with pytest.raises(UsageError, match=message):
        load_optimizers(network, optimizers, PieceReader(sorted(tmp_path.glob("*.safetensors"))))


def test_a_scalar_is_one_piece(tmp_path) -> None:
    for rank in range(2):
        write_pieces(tmp_path, "local", rank, {"sum": Piece(torch.tensor(3.0), (), ())})
    first, _ = files = sorted(tmp_path.glob("*.safetensors"))
    assert PieceReader([first]).read("sum") == 3.0
    with pytest.raises(UsageError, match="overlap"):
        PieceReader(files)


def largest(folder: Path) -> Path:
    return max(folder.glob("weights-*"), key=lambda path: path.stat().st_size)


def cut(share: float) -> Spoil:
    def spoil(folder: Path) -> None:
        data = largest(folder).read_bytes()
        largest(folder).write_bytes(data[: int(len(data) * share)])

    return spoil


def flip(folder: Path) -> None:
    data = bytearray(largest(folder).read_bytes())
    data[-100] ^= 1
    largest(folder).write_bytes(data)


def rewrite_state(text: str) -> Spoil:
    return lambda folder: (folder / "state.json").write_text(text) and None


SPOILS: dict[str, Spoil] = {
    "half": cut(0.5),
    "empty": cut(0.0),
    "missing shard": lambda folder: largest(folder).unlink(),
    "flipped bit": flip,
    "no state": lambda folder: (folder / "state.json").unlink(),
    "state cut": lambda folder: (folder / "state.json").write_text((folder / "state.json").read_text()[:-20]) and None,
    "state empty": rewrite_state(""),
    "state garbage": rewrite_state("\x00\x01 not json"),
    "state of another shape": rewrite_state('[{"step": 3}]'),
    "state without files": rewrite_state('{"format": 1, "step": 3}'),
    "state with odd files": rewrite_state('{"format": 1, "step": 3, "files": [{"file": "a"}]}'),
    "a file outside": rewrite_state('{"format": 1, "step": 3, "files": [{"file": "../x", "bytes": 1, "sha256": ""}]}'),
}


@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS)
def test_a_broken_checkpoint_is_passed_over_by_name_and_refused_when_asked_for(tmp_path, spoil) -> None:
    saved(tmp_path, tiny_gpt(), 1, 2, 3)
    broken = tmp_path / "step-00000003"
    spoil(broken)
    reports: list[str] = []
    newest = newest_checkpoint(tmp_path, reports.append)
    assert newest is not None
    assert newest.step == 2
    assert len(reports) == 1
    assert str(broken) in reports[0]
    if spoil is not flip:  # which only reading the whole file can show
        with pytest.raises(UsageError, match="incomplete or corrupt checkpoint"):
            Checkpoint(broken)
    for word in ("step-00000003", str(broken)):
        with pytest.raises(UsageError, match=f"incomplete or corrupt checkpoint .*{broken.name}"):
            find_checkpoint(tmp_path, word, KEEP, reports.append)


def test_a_whole_checkpoint_is_not_taken_for_broken(tmp_path) -> None:
    saved(tmp_path, tiny_gpt(), 1, 2, 3)
    reports: list[str] = []
    assert newest_checkpoint(tmp_path, reports.append).step == 3
    assert find_checkpoint(tmp_path, "step-00000002", KEEP, reports.append).step == 2
    assert reports == []


def test_when_none_is_whole_nothing_starts_again_in_silence(tmp_path) -> None:
    saved(tmp_path, tiny_gpt(), 1)
    flip(tmp_path / "step-00000001")
    reports: list[str] = []
    for find in (newest_checkpoint, lambda *where: find_checkpoint(where[0], "last", KEEP, where[1])):
        with pytest.raises(UsageError, match=r"every checkpoint in .* is incomplete or corrupt"):
            find(tmp_path, reports.append)
    assert newest_checkpoint(tmp_path / "empty", reports.append) is None
    with pytest.raises(UsageError, match="no complete checkpoint"):
        find_checkpoint(tmp_path / "empty", "last", KEEP, reports.append)
    with pytest.raises(UsageError, match=r"no such checkpoint.*did you mean step-00000001"):
        find_checkpoint(tmp_path, "step-0000001", KEEP, reports.append)


def test_a_later_format_is_named(tmp_path) -> None:
    (checkpoint,) = saved(tmp_path, tiny_gpt())
    write_json(checkpoint.folder / "state.json", checkpoint.state | {"format": 2})
    with pytest.raises(UsageError, match="format 2; this version reads format 1"):
        Checkpoint(checkpoint.folder)


def test_what_is_not_a_checkpoint_folder_is_not_listed(tmp_path) -> None:
    saved(tmp_path, tiny_gpt(), 12)
    for name in (".step-00000013.part", "step-x", "step-00000014.tmp", "best"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000015").write_text("a file")
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000012"]


def test_the_hash_is_that_of_the_weights(tmp_path) -> None:
    same, again = saved(tmp_path / "a", tiny_gpt(seed=1), 1, 2)
    (other,) = saved(tmp_path / "b", tiny_gpt(seed=2))
    assert same.hash == again.hash != other.hash


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module."])
def test_wrappers_prefixes_are_taken_off(tmp_path, prefix) -> None:
    network = tiny_gpt(seed=1)
    renamed = {f"{prefix}{name}": piece for name, piece in weight_pieces(network).items()}
    write_pieces(tmp_path, "weights", 0, renamed)
    other = tiny_gpt(seed=2)
    load_weights(other, PieceReader([tmp_path / "weights-00000.safetensors"]))
    assert all(a.equal(b) for a, b in zip(network.parameters(), other.parameters(), strict=True))


def test_prefixes_inside_a_name_are_taken_off_too() -> None:
    assert plain_name("module.blocks.0._orig_mod.attention._checkpoint_wrapped_module.q.weight") == (
        "blocks.0.attention.q.weight"
    )
    assert plain_name("submodule.modules.weight") == "submodule.modules.weight"


def test_a_key_of_another_rank_is_missed_here_too(tmp_path) -> None:
    """Ranks that hold different parts of a network all refuse the same files, so none waits for one that did."""
    network, part = tiny_gpt(seed=1), tiny_gpt(seed=2)
    write_pieces(tmp_path, "weights", 0, {n: p for n, p in weight_pieces(network).items() if n != "norm.weight"})
    first = Parallel(part)  # knows all names
    del part.norm
    with pytest.raises(UsageError, match=r"missing norm\.weight, unexpected none"):
        load_weights(part, PieceReader([tmp_path / "weights-00000.safetensors"]), first)


def test_keys_that_do_not_match_are_listed_and_nothing_is_changed(tmp_path) -> None:
    found = weight_pieces(tiny_gpt(seed=1))
    del found["norm.weight"]
    found["extra.weight"] = Piece(torch.zeros(2), (0,), (2,))
    found["embed.weight"] = Piece(torch.zeros(3, 32), (0, 0), (3, 32))
    write_pieces(tmp_path, "weights", 0, found)
    network, untouched = tiny_gpt(seed=2), tiny_gpt(seed=2)
    with pytest.raises(UsageError) as caught:
        load_weights(network, PieceReader([tmp_path / "weights-00000.safetensors"]))
    message = str(caught.value)
    assert "missing norm.weight" in message
    assert "unexpected extra.weight" in message
    assert "embed.weight: [3, 32] in the file, [64, 32] in the model" in message
    assert all(a.equal(b) for a, b in zip(network.parameters(), untouched.parameters(), strict=True))


def test_nothing_on_disk_is_a_pickle(tmp_path) -> None:
    (checkpoint,) = saved(tmp_path, tiny_gpt())
    kinds = {path.suffix for path in checkpoint.folder.iterdir()}
    assert kinds == {".safetensors", ".json"}
    assert json.loads((checkpoint.folder / "state.json").read_text())["step"] == 1


def test_a_weights_file_that_is_none_is_refused_by_name(tmp_path) -> None:
    (tmp_path / "w.safetensors").write_bytes(b"\x80\x04 not safetensors")
    with pytest.raises(UsageError, match=r"incomplete or corrupt weights file .*w\.safetensors"):
        PieceReader([tmp_path / "w.safetensors"])
