"""Score a trained run: compose -> check -> build -> run.

python evaluate.py run=latest                        the newest run's best checkpoint on its own validation split
python evaluate.py run=FOLDER ckpt=last split=test
python evaluate.py --help
"""

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from lmforge.runs.folder import RunFolder
from lmforge.start.entry import run_front_door


def evaluate(cfg: DictConfig, run: RunFolder) -> Mapping[str, Any]:
    """Rebuild model and data from the run's own config, load the named checkpoint, and report what it scores."""
    from dataclasses import replace

    from lmforge.config.batch import batch_plan
    from lmforge.evaluation import details, score
    from lmforge.training import assemble, resume

    assemble.quiet()
    assemble.keep_memory()
    checkpoint = resume.find_weights(run, cfg.ckpt, assemble.warn)
    plan = replace(batch_plan(cfg), micro=cfg.batch_sequences)
    assemble.set_threads(cfg.trainer.threads, plan.devices)

    data = assemble.make_data(cfg)
    data.connect(plan, cfg.seed, samples=0)
    resume.check_tokenizer(checkpoint, data)
    task = assemble.make_task(cfg, data, steps=1, initialise=False)
    watching = details.Details(cfg, data)
    callbacks = [score.LoadWeights(checkpoint), watching]
    trainer = assemble.make_trainer(cfg, run.path, callbacks, loggers=False, limit_val_batches=cfg.limit_batches or 1.0)
    data.trainer = trainer
    trainer.validate(task, data.scoring_loader(cfg.split), verbose=False)

    result = score.report(cfg, task, data, checkpoint, trainer.precision_plugin, watching.results)
    if trainer.is_global_zero:
        score.publish(result, run)
    return result


if __name__ == "__main__":
    run_front_door("evaluate", evaluate)
