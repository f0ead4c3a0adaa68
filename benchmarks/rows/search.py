"""Trials that Optuna's sampler needs to reach the validation loss of a whole grid."""

from importlib.util import find_spec
from statistics import median

import torch

from benchmarks import corpus, nanogpt
from benchmarks.report import SHOWN, Row, not_run
from benchmarks.settings import Settings

WHAT, GOAL = "Optuna's trials to the grid's best", "printed"
RATES, DECAYS = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2), (0.0, 0.03, 0.1, 0.3, 1.0)
SHAPE = {"vocabulary": corpus.VOCABULARY, "context": 32, "layers": 1, "heads": 2, "width": 32}


def rows(settings: Settings) -> list[Row]:
    if not find_spec("optuna"):
        return [not_run(WHAT, GOAL, "optuna is not installed")]
    torch.set_num_threads(1)
    text = b"".join(corpus.texts(settings.pick(4.0, 0.3)))
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).numpy().astype("int64")
    steps = settings.pick(100, 3)
    rates, decays = settings.pick((RATES, DECAYS), (RATES[:2], DECAYS[:2]))
    grid = {(rate, decay): _loss(tokens, rate, decay, steps) for rate in rates for decay in decays}
    best = min(grid.values())
    needed = [_trials(tokens, best, steps, len(grid), seed) for seed in range(settings.pick(3, 1))]
    reached = [n for n in needed if n <= len(grid)]
    found = f"{median(needed):.0f} (median of {sorted(needed)})" if reached else f"more than {len(grid)}"
    measured = (
        f"{found} trials of TPE to loss {best:.3f}; the grid has {len(grid)}, {len(reached)}/{len(needed)} got there"
    )
    return [Row(WHAT, GOAL, measured, SHOWN, {"grid": len(grid), "best": best, "needed": needed})]


def _trials(tokens, best: float, steps: int, most: int, seed: int) -> int:  # type: ignore[no-untyped-def]
    """Trials until the grid's best is reached to a thousandth; one more than `most` when it is not."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)

    def objective(trial: optuna.Trial) -> float:
        rate, decay = trial.suggest_float("rate", RATES[0], RATES[-1], log=True), trial.suggest_float("decay", 0.0, 1.0)
        loss = _loss(tokens, rate, decay, steps)
        if loss <= best * 1.001:
            trial.study.stop()
        return loss

    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=5))
    study.optimize(objective, n_trials=most)
    return len(study.trials) if study.best_value <= best * 1.001 else most + 1


def _loss(tokens, rate: float, decay: float, steps: int) -> float:  # type: ignore[no-untyped-def]
    """Validation loss of a very small network after a short training; the same for the same arguments."""
    torch.manual_seed(0)
    network = nanogpt.PlainGPT(**SHAPE)
    optimizer = nanogpt.make_adamw(network, rate, decay)
    held_out = len(tokens) * 9 // 10
    for _ in range(steps):
        ids, labels = nanogpt.get_batch(tokens[:held_out], 8, SHAPE["context"])
        nanogpt.plain_loss(network(ids), labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        ids, labels = nanogpt.get_batch(tokens[held_out:], 256, SHAPE["context"])
        return float(nanogpt.plain_loss(network(ids), labels))
