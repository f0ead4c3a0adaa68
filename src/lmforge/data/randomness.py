"""Random numbers as a function of what they are for, so that no generator's state has to be saved or shared."""

import random
from typing import Any

import numpy as np
import torch


def seed_streams(*key: int) -> None:
    """Set Python's, numpy's and torch's global generators from `key`, such as (seed, rank, step)."""
    words = np.random.SeedSequence(key).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    torch.default_generator.manual_seed(int(words[2]))  # torch.manual_seed asks every backend, ten times the cost
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(int(words[2]))


def state_of_streams() -> tuple[object, ...]:
    """Where the generators that `seed_streams` sets stand, to be compared."""
    words: Any = np.random.get_state()
    return random.getstate(), words[1].tobytes(), words[2:], torch.get_rng_state().numpy().tobytes()
