"""Random numbers as a function of what they are for, so that no generator's state has to be saved or shared."""

import hashlib
import random
from typing import Any

import numpy as np
import torch


def seed_streams(*key: int) -> None:
    """Set Python's, numpy's and torch's global generators from `key`, such as (seed, rank, step)."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=12).digest()  # a fifth of numpy's SeedSequence's time
    one, two, three = (int.from_bytes(digest[start : start + 4], "little") for start in (0, 4, 8))
    random.seed(one)
    np.random.seed(two)
    torch.default_generator.manual_seed(three)  # torch.manual_seed asks every backend, ten times the cost
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(three)


def state_of_streams() -> tuple[object, ...]:
    """Where the generators that `seed_streams` sets stand, to be compared."""
    words: Any = np.random.get_state()
    return random.getstate(), words[1].tobytes(), words[2:], torch.get_rng_state().numpy().tobytes()
