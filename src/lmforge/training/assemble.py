"""From a checked config to the objects of a run: data, task, trainer."""

import ctypes
import logging
import os
import sys
import warnings
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.profilers import Profiler, SimpleProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from lmforge.config.batch import BatchPlan, batch_plan, layout_of, strategy_kind
from lmforge.config.build import build
from lmforge.config.connection import ENV, connection, meeting_point
from lmforge.config.errors import UsageError
from lmforge.config.launch import plain_environment, read_launch
from lmforge.config.lines import show_log
from lmforge.config.machine import thread_share
from lmforge.config.plain import to_plain
from lmforge.data.missing import make_missing
from lmforge.data.module import TokenWindows
from lmforge.parallel.connect import write_nccl_log
from lmforge.parallel.launched import Launched
from lmforge.parallel.plan import Plan
from lmforge.parallel.precision import ForwardPrecision
from lmforge.parallel.strategy import MeshStrategy
from lmforge.runs.folder import RunFolder
from lmforge.tasks.update import UpdateTask
from lmforge.training.checkpoint import Checkpoint
from lmforge.training.lean import Unprofiled, lean_steps
from lmforge.training.preemption import replace_lightnings_signals
from lmforge.training.progress import human


def quiet() -> None:
    """Lightning's tips and notices say nothing that this program does not say itself; its own are shown."""
    show_log(rank_zero_only(print))
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # of a matrix that tensor parallelism and FSDP both cut, which Muon gathers in two messages
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*smaller than the logging interval.*")
    warnings.filterwarnings("ignore", message=".*`isinstance.treespec, LeafSpec.` is deprecated.*")


def report(message: str) -> None:
    """One line on standard error, from rank 0."""
    rank_zero_only(print)(message, file=sys.stderr)


def warn(message: str) -> None:
    report(f"warning: {message}")


def entries(group: DictConfig | None) -> dict[str, DictConfig]:
    """A keyed group's entries that are switched on."""
    return {str(name): node for name, node in group.items() if node is not None} if group else {}


def set_threads(threads: int | str, processes: int) -> int:
    """CPU threads of this process; `auto` divides the cores it may use among the processes of its node."""
    if threads == "auto":
        threads = thread_share(processes)
    torch.set_num_threads(int(threads))
    os.environ["OMP_NUM_THREADS"] = str(threads)  # else Lightning's launcher chooses for its children
    return int(threads)


def keep_memory() -> None:
    """Tell glibc to keep up to half a GiB of freed memory: giving a step's blocks back and faulting them in again costs
    a sixth of a small network's step. Blocks above 40 MiB are still mapped one by one: kept too, they would leave holes
    that small long-lived blocks settle in, and the process would grow. No effect elsewhere."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    if mallopt(-3, 40 << 20) == 1:  # M_MMAP_THRESHOLD
        mallopt(-1, 512 << 20)  # M_TRIM_THRESHOLD


def make_data(cfg: DictConfig) -> TokenWindows:
    """Have the shards made when they are missing, open them, and check that the model has a row for each token."""
    cache = Path(cfg.paths.cache)
    make_missing(to_plain(cfg.data), cache, read_launch(dict(os.environ))[0])
    data = build(cfg.data, cache=cache)
    assert isinstance(data, TokenWindows)
    if cfg.model.vocab_size is not None:
        data.check_vocabulary(cfg.model.vocab_size)
    return data


def run_length(cfg: DictConfig, data: TokenWindows, plan: BatchPlan, start: tuple[int, int]) -> tuple[int, int, str]:
    """Updates and samples of the whole run, and the key that ends it: whichever of the two limits comes first.

    `start` = (updates, samples) done so far; raises UsageError when they are more than `max_steps`. Only `max_epochs`
    makes the last batch a short one.
    """
    step, sample = start
    if cfg.trainer.max_steps is not None and cfg.trainer.max_steps < step:
        raise UsageError(
            f"trainer.max_steps={cfg.trainer.max_steps}: fewer than the {step} steps of the checkpoint that is resumed"
        )
    in_epochs = None if cfg.trainer.max_epochs is None else cfg.trainer.max_epochs * len(data.train)
    limits = {"max_steps": cfg.trainer.max_steps}
    if in_epochs is not None:
        limits["max_epochs"] = step + -(-max(0, in_epochs - sample) // plan.sequences)
    given = {name: steps for name, steps in limits.items() if steps is not None}
    reason = min(given, key=lambda name: given[name])
    samples = sample + (given[reason] - step) * plan.sequences
    return given[reason], samples if in_epochs is None else min(samples, in_epochs), reason


def make_network(cfg: DictConfig, vocab_size: int) -> torch.nn.Module:
    """The network on the meta device: shapes and names, no memory."""
    rows = cfg.model.vocab_size or -(-vocab_size // 64) * 64
    with torch.device("meta"):
        return build(cfg.model, vocab_size=rows)


def check_rows(cfg: DictConfig, network: torch.nn.Module) -> None:
    """Raises UsageError where the embedding's rows, which the data may have decided, cannot be cut into equal parts."""
    tp = layout_of(cfg).tp
    if tp > 1 and (rows := int(network.vocab_size)) % tp:  # type: ignore[arg-type]
        raise UsageError(
            f"model.vocab_size={cfg.model.vocab_size or 'null'}: {rows} rows, which strategy.tp={tp} does not divide; "
            f"model.vocab_size={-(-rows // tp) * tp} would, or another strategy.tp"
        )


def make_task(cfg: DictConfig, data: TokenWindows, steps: int, initialise: bool) -> UpdateTask:
    network = make_network(cfg, data.vocab_size)
    check_rows(cfg, network)
    task = build(
        cfg.task,
        network=network,
        make_optimizers=partial(build, cfg.optimizer),
        schedule=build(cfg.schedule),
        total_steps=steps,
        plan=make_plan(cfg),
        seed=cfg.seed,
        clip_norm=cfg.trainer.gradient_clip_val,
        nonfinite_patience=cfg.trainer.nonfinite_patience,
        initialise=initialise,
        token_bytes=token_bytes(data),
        loss_chunk=cfg.trainer.loss_chunk,
    )
    assert isinstance(task, UpdateTask)
    return task


def make_plan(cfg: DictConfig) -> Plan:
    options = {field.name: cfg.strategy[field.name] for field in fields(Plan) if field.name in cfg.strategy}
    options |= {"kind": strategy_kind(cfg), "layout": layout_of(cfg)}
    options |= {"static_graph": batch_plan(cfg).accumulation == 1}
    return Plan(
        activation_checkpointing=cfg.trainer.activation_checkpointing,
        compile_backend=cfg.compile.backend,
        **options,
    )


def token_bytes(data: TokenWindows) -> torch.Tensor | None:
    return torch.from_numpy(data.tokenizer.byte_lengths()) if data.tokenizer is not None else None


def make_precision(cfg: DictConfig, device: str) -> ForwardPrecision:
    return ForwardPrecision(**OmegaConf.to_container(cfg.precision), device=device)  # type: ignore[arg-type]


def device_type(cfg: DictConfig) -> str:
    """cuda or cpu, as the accelerator word means on this machine; raises UsageError when it is not there."""
    word = cfg.trainer.accelerator
    if word in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        return "cuda"
    if word in ("auto", "cpu"):
        return "cpu"
    raise UsageError(f"trainer.accelerator={word}: torch {torch.__version__} finds none here; allowed: auto, cpu")


def make_profiler(word: str | None, folder: Path) -> Profiler:
    """The table of `simple` goes to a file `fit-profile-<rank>.txt`."""
    return Unprofiled() if word is None else SimpleProfiler(dirpath=folder, filename="profile")


def make_plugins(cfg: DictConfig, device: str) -> list[Any]:
    """The precision, and where ranks are: for a process that no launcher started Lightning's own environment, which
    starts them and hands MASTER_ADDR and MASTER_PORT to them."""
    launch, how = read_launch(dict(os.environ))[0], connection(cfg)
    if not plain_environment(launch):
        return [make_precision(cfg, device), Launched(launch, *meeting_point(how.init_method, launch, os.environ))]
    if how.init_method != ENV:
        address, port = meeting_point(how.init_method, launch, os.environ)
        os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    return [make_precision(cfg, device), LightningEnvironment()]


def make_trainer(cfg: DictConfig, folder: Path, callbacks: list[pl.Callback], loggers: Any, **more: Any) -> pl.Trainer:
    """Lightning's Trainer with everything it would do on its own switched off that is done here."""
    device, devices = device_type(cfg), OmegaConf.to_container(cfg)["trainer"]["devices"]  # type: ignore[index, call-overload]
    if strategy_kind(cfg) == "single":
        index = devices[0] if isinstance(devices, list) else 0
        strategy: Any = SingleDeviceStrategy(device if device == "cpu" else f"{device}:{index}")
    else:
        how = connection(cfg)
        write_nccl_log(how.nccl_debug, folder, read_launch(dict(os.environ))[0].rank)
        strategy = MeshStrategy(how)
    trainer = pl.Trainer(
        accelerator="cpu" if device == "cpu" else "gpu",
        devices=devices,
        num_nodes=cfg.trainer.num_nodes,
        strategy=strategy,
        plugins=make_plugins(cfg, device),
        callbacks=callbacks,
        logger=loggers,
        default_root_dir=folder,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        inference_mode=False,  # tensors made in it could not be used where sharded weights are gathered again
        profiler=make_profiler(more.pop("profiler", None), folder),
        **more,
    )
    replace_lightnings_signals(trainer)
    lean_steps(trainer)
    return trainer


def training_options(cfg: DictConfig, steps: int) -> dict[str, Any]:
    """Limits and intervals for the Trainer; steps are updates are Lightning's batches. A validation batch is one of
    micro-batches, and the limit counts global ones, so that no layout changes what is scored."""
    trainer, limit = cfg.trainer, cfg.trainer.limit_val_batches
    return {
        "max_steps": steps,
        "max_epochs": -1,
        "val_check_interval": trainer.val_every_n_steps or steps,
        "check_val_every_n_epoch": None,
        "limit_val_batches": 1.0 if limit is None else limit * batch_plan(cfg).accumulation,
        "log_every_n_steps": trainer.log_every_n_steps,
        "detect_anomaly": trainer.detect_anomaly,
        "profiler": trainer.profiler,
    }


@rank_zero_only
def announce(
    cfg: DictConfig,
    run: RunFolder,
    task: UpdateTask,
    plan: BatchPlan,
    trainer: pl.Trainer,
    checkpoint: Checkpoint | None,
) -> None:
    """What is about to run, in a few lines on standard error."""
    precision = trainer.precision_plugin
    assert isinstance(precision, ForwardPrecision)
    over = f" over {connection(cfg)}" if plan.world > 1 else ""
    lines = [
        f"run folder  {run.path}",
        f"network     {human(task.parameter_count)} parameters",
        f"batch       {plan}, {plan.sequences * plan.context} tokens",
        f"strategy    {task.plan}{over}, {cfg.precision.word}: {precision.describe()}",
        f"loggers     {', '.join(entries(cfg.logger)) or 'none'}",
    ]
    if checkpoint is not None:
        lines.append(f"resuming    {checkpoint.folder.name} of {checkpoint.state['total_steps']} steps")
        lines += _changed_horizon(task, checkpoint)
    print("\n".join(lines), file=sys.stderr)


def _changed_horizon(task: UpdateTask, checkpoint: Checkpoint) -> list[str]:
    """A resumed run follows the schedule of its new length; says what that does to the rate at this step."""
    step, old, new = checkpoint.step, checkpoint.state["total_steps"], task.total_steps
    if old == new:
        return []
    before, after = task.schedule(step, old), task.schedule(step, new)
    return [f"horizon     {old} -> {new} steps; rate at step {step}: {before:.4g} -> {after:.4g} of the peak"]
