"""Train a model: compose -> check -> build -> run.

python train.py                                     a small GPT on text every machine has
python train.py strategy=fsdp precision=bf16-mixed  the same, sharded
python train.py --help                              everything that can be changed
"""

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from lmforge.runs.folder import RunFolder
from lmforge.start.entry import run_front_door


def train(cfg: DictConfig, run: RunFolder) -> Mapping[str, Any]:
    """Build what a checked config names, train it, and return its summary (empty when it was preempted)."""
    from lmforge.config.batch import batch_plan
    from lmforge.training import assemble, callbacks, resume, summary
    from lmforge.training.out_of_memory import explained

    assemble.quiet()
    assemble.keep_memory()
    plan = batch_plan(cfg)
    assemble.set_threads(cfg.trainer.threads, plan.devices)
    checkpoint = resume.newest_checkpoint(run.checkpoints, assemble.warn)
    start = (checkpoint.step, checkpoint.state["samples"]) if checkpoint else (0, 0)

    data = assemble.make_data(cfg)
    steps, samples, reason = assemble.run_length(cfg, data, plan, start)
    data.connect(plan, cfg.seed, samples, start)
    resume.check_data(checkpoint, data)

    task = assemble.make_task(cfg, data, steps, initialise=checkpoint is None)
    weights = resume.starting_weights(cfg, data) if checkpoint is None else None
    trainer = assemble.make_trainer(
        cfg,
        run.path,
        callbacks.make_callbacks(cfg, run, data, checkpoint, weights),
        callbacks.make_loggers(cfg, run, start[0]),
        **assemble.training_options(cfg, steps),
    )
    callbacks.keep_tokenizer(run, data)
    assemble.announce(cfg, run, task, plan, trainer, checkpoint)
    with explained(trainer):
        trainer.fit(task, data)

    resume.leave_if_stopped(trainer, run)
    result = summary.summarise(trainer, task, data, reason)
    if trainer.is_global_zero:
        summary.finish(trainer, result, run)
    return result


if __name__ == "__main__":
    run_front_door("train", train)
