"""The probe of a soak: it notes every row of every update, and spoils whole bursts only."""

import pytest

from fits import After, fit
from lmforge.config.errors import NonFinite
from lmforge.runs.folder import list_checkpoints
from lmforge.soak.reference import digits, samples
from tiny import compose, new_run

WORDS = (
    "callbacks=probed",
    "callbacks.checkpoint.every_n_steps=5",
    "trainer.max_steps=12",
    "trainer.nonfinite_patience=3",
)


def test_every_row_of_every_update_is_noted(shards) -> None:
    run = fit(shards, *WORDS)
    found = samples(run.folder)
    assert list(found) == list(range(1, 13))
    assert all(rows.total() == 8 for rows in found.values())
    assert found[1] != found[2]


@pytest.mark.parametrize("ordered", [0, 2, 4])
def test_a_burst_begins_at_a_save_border_and_undoes_nothing(shards, ordered) -> None:
    """Whenever it is ordered: skipped updates would get into a checkpoint else."""
    whole = fit(shards, *WORDS).folder
    folder = new_run(compose(shards, *WORDS)).path
    order = After(ordered, lambda trainer, task: (folder / "probe" / "spoil").touch())
    if ordered == 0:
        (folder / "probe").mkdir()
        (folder / "probe" / "spoil").touch()
    with pytest.raises(NonFinite, match=f"the last one {8 if ordered else 3}"):
        fit(shards, *WORDS, folder=folder, also=(order,))
    assert [path.name for path in list_checkpoints(folder / "checkpoints")] == ["step-00000005"][: bool(ordered)]
    (folder / "probe" / "spoil").unlink()
    fit(shards, *WORDS, folder=folder)
    assert digits(folder) == digits(whole)
    assert samples(folder) == samples(whole)
