"""resume= on the command line: finished runs, locked folders, changed words."""

from changes import SLOW_STEPS

from lmforge.runs.rows import read_rows
from lmforge.training.schedules import Linear


def test_a_finished_run_and_its_changes(program) -> None:
    program.train("trainer.max_steps=10", "schedule=linear", "schedule.warmup=0")
    run = program.run()
    done = program.train("trainer.max_steps=10", "schedule=linear", "schedule.warmup=0", "resume=auto")
    assert done.code == 0
    assert "is finished" in done.output
    refused = program(f"python train.py resume={run} model.n_layer=3")
    assert refused.code == 2
    assert "model.n_layer=3: the stored run has 2" in refused.output
    longer = program(f"python train.py resume={run} trainer.max_steps=15 optimizer.lr=0.5e-3")
    assert longer.code == 0, longer.output
    assert "optimizer.lr " in longer.output
    assert "-> 0.0005" in longer.output
    rate = Linear(warmup=0)
    assert f"horizon     10 -> 15 steps; rate at step 10: 0 -> {rate(10, 15):.4g} of the peak" in longer.output
    rows = read_rows(run / "metrics.csv")
    assert [int(row["step"]) for row in rows] == list(range(1, 16))
    assert float(rows[10]["train/lr"]) == 0.5e-3 * rate(11, 15)


def test_a_second_writer_is_refused(program) -> None:
    running = program.start("trainer.max_steps=100000", changes=(SLOW_STEPS,))
    running.wait_for(lambda: program.runs() and (program.run() / "metrics.csv").exists())
    second = program(f"python train.py resume={program.run()}")
    assert second.code == 2
    assert f"another process (pid {running.process.pid}) is writing this run" in second.output
    running.kill()
    assert program(f"python train.py resume={program.run()} trainer.max_steps=6").code == 0


def test_best_and_last_over_several_starts(program) -> None:
    """Three kills: steps only go forward, and at the end there are at most two best checkpoints and the last."""
    words = ("callbacks.checkpoint.keep_best=2", "resume=auto", "trainer.max_steps=40")
    for updates in (7, 16, 28):
        running = program.start(*words, changes=(SLOW_STEPS,))
        running.wait_for(lambda least=updates: program.runs() and logged(program) >= least)
        running.kill()
    outcome = program.train(*words)
    assert outcome.code == 0, outcome.output
    assert len(program.runs()) == 1
    rows = read_rows(program.run() / "metrics.csv")
    losses = {int(row["step"]): float(row["val/bits_per_byte"]) for row in rows if row["val/bits_per_byte"]}
    best = sorted(losses, key=lambda step: losses[step])[:2]
    kept = {int(path.name[5:]) for path in program.run().glob("checkpoints/step-*")}
    assert kept == {*best, 40}


def logged(program) -> int:
    return len(read_rows(program.run() / "metrics.csv"))


def test_a_refused_start_changes_nothing_for_the_next(program):
    program.train("trainer.max_steps=4")
    run = program.run()
    (run / "summary.json").unlink()  # as after a kill
    stored = (run / "config.yaml").read_text()
    refused = program(f"python train.py resume={run} trainer.max_steps=2")
    assert refused.code == 2
    assert "trainer.max_steps=2: fewer than the 4 steps" in refused.output
    assert (run / "config.yaml").read_text() == stored
    assert program(f"python train.py resume={run}").code == 0
