"""`lmforge soak` on real trainings: a short one passes, and says so in its report."""

import json

import pytest

from commands import start_command

SHORT = "hours=0.02 steps=400 save_every_n_steps=20 fault_every_n_steps=60"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_short_soak_passes(program, strategy) -> None:
    words = [*SHORT.split(), f"words=strategy={strategy} optimizer.lr=1e-3", "report=soak.json"]
    soaking = start_command(["lmforge", "soak", *words], program.folder, LMFORGE_CACHE=str(program.cache))
    outcome = soaking.finish(850)
    assert outcome.code == 0, outcome.output
    report = json.loads((program.folder / "soak.json").read_text())
    assert report["passed"]
    assert any(fault["moment"] and fault["recovered"] for fault in report["faults"])
    assert not list((program.cache / "soak").iterdir())


def test_what_it_cannot_train_is_wrong_input(program) -> None:
    outcome = program("lmforge soak words=strategy=fspd hours=0.001")
    assert outcome.code == 2
    assert "strategy=fspd" in outcome.output
    assert "did you mean fsdp" in outcome.output
