"""What processes that a job starts find in their environment: the run folder, and the config where it is another."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from lmforge.config.launch import CONFIG_VARIABLE, RUN_VARIABLE
from lmforge.config.plain import dump_yaml
from lmforge.runs.folder import RunFolder


@contextmanager
def announced(name: str, config: DictConfig, run: RunFolder) -> Iterator[None]:
    """While the job runs, processes that it starts find its run folder (and config, where that is not the folder's)
    in the environment."""
    if os.environ.get(RUN_VARIABLE):
        yield
        return
    os.environ[RUN_VARIABLE] = str(run.path.resolve())
    own: str | None = None
    try:
        if name != "train":
            own = os.environ[CONFIG_VARIABLE] = _temporary(dump_yaml(OmegaConf.to_container(config, resolve=True)))
        yield
    finally:
        os.environ.pop(RUN_VARIABLE, None)
        if own:
            os.environ.pop(CONFIG_VARIABLE, None)
            Path(own).unlink(missing_ok=True)


def _temporary(text: str) -> str:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", delete=False, encoding="utf-8") as file:
        file.write(text)
    return file.name
