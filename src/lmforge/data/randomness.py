"""Random numbers as a function of what they are for, so that no generator's state has to be saved or shared."""

import random

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
