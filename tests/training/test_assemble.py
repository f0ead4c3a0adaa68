"""From a config to a run's objects: limits, metrics that cannot be measured, loggers, what is printed on the way."""

import ctypes
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from lightning.pytorch.plugins.environments import LightningEnvironment

from fits import fit, score
from lmforge.config.errors import Exit, Terminated, UsageError
from lmforge.config.plain import to_config
from lmforge.data.shards import write_shards
from lmforge.models.gpt import GPT
from lmforge.runs.folder import RunFolder
from lmforge.training import assemble
from lmforge.training.checkpointing import CheckpointCallback
from lmforge.training.preemption import Preemption
from lmforge.training.resume import leave_if_stopped
from tiny import compose


def test_a_run_that_is_further_than_max_steps_is_refused_with_both_numbers(shards) -> None:
    run = fit(shards, "trainer.max_steps=5")
    with pytest.raises(UsageError, match=r"trainer\.max_steps=3: fewer than the 5 steps"):
        fit(shards, "trainer.max_steps=3", folder=run.folder)


BITS = "callbacks.checkpoint.monitor=val/bits_per_byte"


def test_without_a_tokenizer_the_loss_stands_in_for_bits_per_byte_in_one_line(shards, capsys) -> None:
    stop = ("callbacks.early_stopping.patience=1", "callbacks.early_stopping.min_delta=100")
    words = (BITS, *stop, "trainer.val_every_n_steps=1", "callbacks.checkpoint.keep_last=9")
    run = fit(shards, *words)
    assert (run.summary["steps"], run.summary["reason"], run.summary["early_stopping_waited"]) == (
        2,
        "early_stopping",
        1,
    )
    lines = [line for line in capsys.readouterr().err.splitlines() if "tokenizer.json" in line]
    assert len(lines) == 1
    assert "callbacks.checkpoint.monitor, callbacks.early_stopping.monitor: val/loss" in lines[0]
    keep = next(c for c in run.trainer.callbacks if isinstance(c, CheckpointCallback)).keep
    assert keep.monitor == "val/loss"
    score(run.folder, "ckpt=best")
    assert "has val" not in capsys.readouterr().err  # evaluation knows what stood in


def test_without_a_validation_split_only_a_run_that_waits_for_one_is_refused(tmp_path, capsys) -> None:
    folder = write_shards(tmp_path / "s", {"train": [np.arange(50)] * 20}, vocab_size=60)
    run = fit(folder, BITS)
    assert run.summary["early_stopping_waited"] is None
    assert "warning" not in capsys.readouterr().err
    with pytest.raises(UsageError, match=r"callbacks\.early_stopping\.patience=3: .* no validation"):
        fit(folder, "callbacks.early_stopping.patience=3")


@pytest.mark.parametrize(
    "words", [("logger.wandb=null",), ("~logger.wandb",), ("logger.csv=null", "logger.wandb=null")]
)
def test_a_logger_that_is_switched_off_is_not_there(shards, words, capsys) -> None:
    run = fit(shards, "logger=wandb", *words, "trainer.max_steps=1")
    assert [logger.name for logger in run.trainer.loggers] == ([] if len(words) > 1 else ["csv"])
    assert f"loggers     {'none' if len(words) > 1 else 'csv'}\n" in capsys.readouterr().err


def test_the_profilers_table_is_where_the_end_of_the_run_says(shards, capsys) -> None:
    run = fit(shards, "trainer.profiler=simple", "trainer.max_steps=2")
    (table,) = run.folder.glob("*profile*.txt")
    assert "run_training_batch" in table.read_text()
    assert f"profile     {table}" in capsys.readouterr().out


def test_what_the_package_logs_is_seen_once(capsys, monkeypatch) -> None:
    for _ in range(2):
        assemble.quiet()
    logging.getLogger("lmforge.data.prepare").info("preparing data=%s", "stdlib")
    logging.getLogger("lmforge.data.prepare").warning("lost")
    assert capsys.readouterr().err == "preparing data=stdlib\nwarning: lost\n"
    monkeypatch.setattr(assemble.rank_zero_only, "rank", 1)
    logging.getLogger("lmforge.data.prepare").info("of another rank")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("answer", "expected"), [(1, [-3, -1]), (0, [-3])])
def test_the_trim_threshold_follows_the_other_one_only_where_that_was_taken(monkeypatch, answer, expected) -> None:
    """On its own it would switch off glibc's growing threshold and make things worse."""
    asked: list[int] = []
    library = SimpleNamespace(mallopt=lambda option, value: asked.append(option) or answer)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    assemble.keep_memory()
    assert asked == expected


SHELL = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_NAME": "train", "SLURM_LOCALID": "0"}


def environment(cfg: Any) -> Any:
    _, environment = assemble.make_plugins(cfg, "cpu")
    return environment


@pytest.mark.parametrize(("words", "static"), [("", True), ("batch.micro_sequences=2", False)])
def test_the_graph_is_static_where_every_backward_pass_ends_an_update(shards, words, static) -> None:
    """torch 2.13 would fail, or stop averaging gradients, after backward passes inside `no_sync`."""
    cfg = to_config(compose(shards, "strategy=ddp", "trainer.devices=2", *words.split()))
    assert assemble.make_plan(cfg).static_graph == static


def test_a_batch_scripts_shell_is_one_process(shards) -> None:
    cfg = to_config(compose(shards))
    os.environ |= SHELL
    assert isinstance(environment(cfg), LightningEnvironment)
    os.environ |= {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_NODELIST": "n[4-5]"}
    os.environ |= {"SLURM_LOCALID": "1", "SLURM_NNODES": "2"}
    task = environment(cfg)
    assert (task.global_rank(), task.world_size(), task.local_rank(), task.node_rank()) == (3, 4, 1, 1)
    assert (task.main_address, task.main_port) == ("n4", 15007)


def test_ranks_of_this_program_meet_where_the_command_says(shards) -> None:
    os.environ["MASTER_PORT"] = "1"
    words = ("strategy=ddp", "strategy.init_method=tcp://127.0.0.1:29511")
    own = environment(to_config(compose(shards, *words)))
    assert (own.main_address, own.main_port) == ("127.0.0.1", 29511)
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("127.0.0.1", "29511")  # for its children


@pytest.mark.parametrize("rank", [0, 1])
def test_nccl_writes_to_a_file_of_each_rank(shards, tmp_path, rank) -> None:
    if rank:
        os.environ |= {"LMFORGE_RUN": str(tmp_path), "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    cfg = to_config(compose(shards, "strategy=ddp", "trainer.devices=2", "strategy.nccl_debug=INFO"))
    assemble.make_trainer(cfg, tmp_path / "50%", [], False)
    assert os.environ["NCCL_DEBUG"] == "INFO"
    assert os.environ["NCCL_DEBUG_FILE"] == f"{tmp_path}/50%%/nccl-rank-{rank}-%h-%p.log"


def test_without_a_word_nccl_is_left_as_the_environment_says(shards, tmp_path) -> None:
    os.environ["NCCL_DEBUG"] = "WARN"
    assemble.make_trainer(to_config(compose(shards, "strategy=ddp", "trainer.devices=2")), tmp_path, [], False)
    assert os.environ["NCCL_DEBUG"] == "WARN"
    assert "NCCL_DEBUG_FILE" not in os.environ


def test_a_run_in_a_batch_scripts_shell_trains(shards) -> None:
    os.environ |= SHELL
    assert fit(shards, "trainer.max_steps=1").summary["steps"] == 1


def test_a_run_without_checkpoints_does_not_say_that_it_saved() -> None:
    stopped = Preemption()
    stopped.stopped = Exit.SIGTERM
    trainer: Any = SimpleNamespace(callbacks=[stopped], global_step=4)
    with pytest.raises(Terminated, match="stopped at step 4; nothing was saved"):
        leave_if_stopped(trainer, RunFolder(Path("run")))


def test_rows_that_the_data_decide_must_divide_as_well(shards) -> None:
    shape = "model.n_head=3 model.n_kv_head=3 model.d_model=48 model.d_ff=48 model.context=48 model.vocab_size=null"
    config = to_config(compose(shards, "strategy=tensor", "strategy.tp=3", "trainer.devices=3", *shape.split()))
    with pytest.raises(UsageError, match=r"model\.vocab_size=null: 320 rows, .*strategy\.tp=3 .*model\.vocab_size=321"):
        assemble.check_rows(config, GPT(320, 8, 1, 3, 3, 48, 48))
    assemble.check_rows(config, GPT(384, 8, 1, 3, 3, 48, 48))
