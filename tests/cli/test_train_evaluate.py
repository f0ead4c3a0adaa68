"""From training to evaluation and generation, as typed."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from lmforge.runs.folder import list_checkpoints
from lmforge.training.checkpoint import Checkpoint


def evaluation(folder: Path) -> dict:
    (file,) = folder.glob("evaluation-*.json")
    return json.loads(file.read_text())


@pytest.mark.parametrize("devices", [1, 2])
def test_fsdp_in_bf16(program, devices) -> None:
    """One process, and two that Lightning's launcher starts: really sharded, one folder, readable by evaluate.py."""
    outcome = program.train("strategy=fsdp", "precision=bf16-mixed", f"trainer.devices={devices}")
    assert outcome.code == 0, outcome.output
    run = program.run()
    how = "mesh (dp 2) over gloo (env://)" if devices == 2 else "single"
    assert f"strategy    {how}, bf16-mixed: weights float32, compute bfloat16" in outcome.output
    assert len(list((run / "checkpoints").glob("step-00000020/weights-*"))) == devices
    assert (run / "metrics.csv").read_text().count("\n") == 21
    scored = program(f"python evaluate.py run={run}")
    assert scored.code == 0, scored.output
    result = evaluation(run)
    assert result["precision"] == "weights float32, compute float32, gradient reduction float32"
    trained = json.loads((run / "summary.json").read_text())
    assert result["loss"] == pytest.approx(trained["val/loss"], rel=0.02)


def test_the_printed_checkpoint_can_be_pasted(program) -> None:
    outcome = program.train("trainer.max_steps=2")
    (printed,) = re.findall(r"^checkpoint +(\S+)$", outcome.output, flags=re.MULTILINE)
    assert not set(printed) & set("=,{}$ ")
    scored = program(f"python evaluate.py run=latest ckpt={printed}")
    assert scored.code == 0, scored.output
    first = evaluation(program.run())
    awkward = Path(printed).with_name("epoch=1-step=20.ckpt")
    shutil.copytree(program.folder / printed, program.folder / awkward)
    for typed in (f'ckpt="{awkward}"', "ckpt=" + str(awkward).replace("=", "\\=")):
        scored = program(f"python evaluate.py run=latest '{typed}'")
        assert scored.code == 0, scored.output
        assert evaluation(program.run()) == first | {"checkpoint": str(awkward)}


def test_missing_checkpoints_are_never_random_weights(program) -> None:
    program.train("trainer.max_steps=2")
    outcome = program("python evaluate.py run=latest ckpt=bets")
    assert outcome.code == 2
    assert "did you mean best?" in outcome.output
    shutil.rmtree(program.run() / "checkpoints")
    outcome = program("python evaluate.py run=latest")
    assert outcome.code == 2
    assert "no checkpoint" in outcome.output


def test_generate(program) -> None:
    program.train("trainer.max_steps=2")
    texts = [
        program(f"lmforge generate run=latest 'prompt=a0 b1, c' max_new_tokens=12 {words}").output
        for words in ("seed=3", "seed=3", "seed=4", "temperature=0 seed=1", "temperature=0 seed=2 stream=false")
    ]
    assert all(text.startswith("a0 b1, c") for text in texts), texts
    assert texts[0] == texts[1] != texts[2]
    assert texts[3] == texts[4] != texts[0]
    refused = program(f"lmforge generate run=latest 'prompt={'long ' * 60}'")
    assert refused.code == 2
    assert "keep_end=true" in refused.output


def test_new_run_from_weights(program) -> None:
    """A run folder, a checkpoint folder and a plain weights file start with the same loss; other shapes are refused."""
    program.train("name=first")
    first = program.run("first")
    checkpoint = list_checkpoints(first / "checkpoints")[-1]
    best = json.loads((first / "summary.json").read_text())["val/loss"]
    losses = []
    for number, weights in enumerate([first, checkpoint, checkpoint / "weights-00000.safetensors"]):
        outcome = program.train(f"weights={weights}", f"name=from{number}", "trainer.max_steps=1", "optimizer.lr=1e-9")
        assert outcome.code == 0, outcome.output
        losses.append(json.loads((program.run(f"from{number}") / "summary.json").read_text())["val/loss"])
    assert losses == pytest.approx([best] * 3, abs=1e-4)
    wrong = program.train(f"weights={first}", "name=wrong", "model.d_ff=32", "model.n_layer=1")
    assert wrong.code == 2
    assert "blocks.0.ff.down.weight: [32, 64] in the file, [32, 32] in the model" in wrong.output
    assert "unexpected blocks.1." in wrong.output


def test_what_a_run_leaves_behind(program) -> None:
    """Resolved config with the override, seed, code version, packages, command: in the folder and in each logger."""
    outcome = program.train("logger=many", "trainer.max_steps=2", "optimizer.lr=0.00123", "seed=7")
    assert outcome.code == 0, outcome.output
    run = program.run()
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert (config["optimizer"]["lr"], config["seed"]) == (0.00123, 7)
    facts = json.loads((run / "provenance.json").read_text())
    (start,) = yaml.safe_load((run / "overrides.yaml").read_text())
    assert "optimizer.lr=0.00123" in start["overrides"]
    assert "train.py" in start["command"]
    assert facts["packages"]["torch"]
    stored = {
        "tensorboard": (run / "tensorboard" / "hparams.yaml").read_text(),
        "wandb": "".join(file.read_text(errors="replace") for file in run.glob("wandb/*/*.wandb")),
    }
    for name, text in stored.items():
        for part in ("0.00123", facts["packages"]["torch"], "optimizer.lr=0.00123"):
            assert part in text, (name, part)


def test_the_checkpoint_is_whole(program) -> None:
    program.train("trainer.max_steps=2")
    Checkpoint(list_checkpoints(program.run() / "checkpoints")[-1]).verify()
