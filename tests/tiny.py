"""Tiny runs for tests: composed from the shipped configs, trained in this process or on real ranks."""

import csv
import importlib.util
from math import nan
from pathlib import Path
from typing import Any

from lmforge.config.compose import Composer, config_folder
from lmforge.config.launch import Launch
from lmforge.config.parse import Tree, read_words
from lmforge.config.plain import to_config
from lmforge.runs.folder import RunFolder
from lmforge.runs.plan import plan_from_run, plan_train

ROOT = Path(__file__).resolve().parents[1]
SMALL = """
data=tokens precision=32-true optimizer=adamw schedule=constant schedule.warmup=0 batch.tokens=null batch.sequences=8
model.context=32 model.n_layer=2 model.n_head=2 model.n_kv_head=1 model.d_model=32 model.d_ff=64
trainer.max_steps=6 trainer.threads=1 trainer.log_every_n_steps=1 trainer.val_every_n_steps=null
callbacks.checkpoint.every_n_steps=100 callbacks.checkpoint.monitor=val/loss
"""


def compose(shards: Path | None, *words: str) -> dict[str, Any]:
    """The checked plain config of a small run on `shards` (None: the words say on what), below the working folder, with
    `words` on top."""
    tree = Tree(config_folder("train", ROOT / "train.py"))
    problems: list[str] = []
    place = [f"data.path={shards}"] if shards else []
    parsed = read_words([*SMALL.split(), *place, *words], tree, False, problems)
    return plan_train(Composer("train", tree), parsed, [], Launch(), problems).plain


def compose_on(job: str, folder: Path, *words: str) -> dict[str, Any]:
    """The checked plain config of a job on a run or an export: `evaluate.py run=folder words`, `lmforge export ...`."""
    tree = Tree(config_folder(job, ROOT / "train.py"))
    problems: list[str] = []
    parsed = read_words([f"run={folder}", *words], tree, False, problems)
    return plan_from_run(Composer(job, tree), Composer("train", tree), parsed, [], Launch(), problems).plain


def new_run(plain: dict[str, Any]) -> RunFolder:
    return RunFolder.create(plain)


def train(plain: dict[str, Any], folder: str | Path) -> dict[str, Any]:
    """Train in this process, a rank or a whole run; the summary."""
    return dict(_front_door("train").train(to_config(plain), RunFolder(Path(folder))))


def evaluate(plain: dict[str, Any], folder: str | Path) -> dict[str, Any]:
    return dict(_front_door("evaluate").evaluate(to_config(plain), RunFolder(Path(folder))))


def _front_door(name: str) -> Any:
    """train.py or evaluate.py as a module; they are scripts, not part of the package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def metrics(folder: str | Path, *columns: str) -> list[tuple[float, ...]]:
    """Rows of a run's metrics.csv: `step` and the named columns, NaN where nothing was measured."""
    with (Path(folder) / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [tuple(float(row[name]) if row.get(name) else nan for name in ("step", *columns)) for row in rows]
