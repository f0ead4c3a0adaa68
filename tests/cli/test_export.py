"""Exports as typed: made, scored, spoken with, trained on, opened in a notebook; and what is said of wrong words."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lmforge.data.tokenizer import Tokenizer

NOTEBOOK = """
import sys
sys.modules.update(dict.fromkeys(("hydra", "lightning"), None))
import torch
from lmforge.export import load
network, tokenizer = load(sys.argv[1])
ids = torch.tensor([[tokenizer.bos, *tokenizer.encode("a0 b1")]])
print(network(ids).argmax(-1).tolist(), tokenizer.size, not network.training)
"""


def loss(folder: Path) -> float:
    (file,) = folder.glob("evaluation-*.json")
    return float(json.loads(file.read_text())["loss"])


def test_the_way_out_and_onward(program, tokens) -> None:
    """Two processes that Lightning launches score the export too: they find its folder, which holds no config.yaml."""
    program.train("trainer.max_steps=2", "precision=bf16-true")
    exported = program("lmforge export run=latest out=here/model")
    assert exported.code == 0, exported.output
    assert "export      here/model (written)" in exported.output
    folder, run = program.folder / "here" / "model", program.run()
    data = f"data=tokens data.path={tokens}"
    for line in ("python evaluate.py run=latest", f"python evaluate.py run=here/model {data} trainer.devices=2"):
        scored = program(line)
        assert scored.code == 0, scored.output
    assert loss(folder) == pytest.approx(loss(run), abs=1e-6)
    spoken = [program(f"lmforge generate run={place} prompt=a0 max_new_tokens=6 seed=1") for place in (run, folder)]
    assert spoken[0].output == spoken[1].output
    again = program.train("weights=here/model", "trainer.max_steps=1", "name=again")
    assert again.code == 0, again.output
    code = [sys.executable, "-c", NOTEBOOK, "here/model"]
    notebook = subprocess.run(code, cwd=program.folder, capture_output=True, text=True, timeout=120, env=os.environ)
    size = Tokenizer.load(folder / "tokenizer.json").size
    assert notebook.stdout.strip().endswith(f"]] {size} True"), notebook.stderr


def test_wrong_words(program, tokens) -> None:
    program.train("trainer.max_steps=1")
    assert program("lmforge export run=latest out=model").code == 0
    for line, *said in (
        ("lmforge export run=latest formt=safetensors", "unknown key formt; did you mean format?"),
        ("lmforge export run=latest format=safetensor", "did you mean safetensors?"),
        ("lmforge export run=latest dtype=bf16", "allowed: one of keep, float64, float32, bfloat16, float16"),
        ("lmforge export run=latest dtype=fp16 ckpt=bst", "dtype=fp16: not allowed", "ckpt=bst: no such checkpoint"),
        ("lmforge export run=latest out=runs", "out=runs: is there already"),
        ("lmforge export run=model", "an export already; give the run it came from, default/"),
        ("lmforge export run=modle", "no such run folder"),
        ("lmforge exprot", "did you mean export?"),
        ("python evaluate.py run=model", "an export holds no data; say what to score: data=hub|mix|stdlib|text|tokens"),
        (f"python evaluate.py run=model data=tokens data.path={tokens} ckpt=last", "leave ckpt out"),
        (
            f"python evaluate.py run=model data=tokens data.path={tokens} model.d_ff=32",
            "model.d_ff=32 (the run has 64)",
        ),
        ("python train.py resume=model", "not a run folder"),
        ("python evaluate.py run=latest calibration_bins=-1 domains=2", "calibration_bins=-1", "domains=2"),
    ):
        outcome = program(line)
        assert outcome.code == 2, outcome.output
        assert all(part in outcome.output for part in said), outcome.output
    assert program("lmforge export --help").code == 0
