"""Every config key with its type, its limits and what may happen to it on resume. A new key is one line here."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase

from lmforge.config.schema import Key

METRICS = ("val/loss", "val/bits_per_byte", "val/perplexity", "val/accuracy")
ACCELERATORS = ("auto", "cpu", "gpu", "cuda")
STRATEGIES = ("auto", "single", "ddp", "mesh", "deepspeed", "local_sgd")
PROCESS_GROUP_BACKENDS = ("auto", "nccl", "gloo", "mpi")
COMPRESSIONS = ("none", "powersgd", "fp16", "bf16")
PRECISIONS = ("auto", "32-true", "64-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true")
DTYPES = ("float64", "float32", "bfloat16", "float16")
BACKENDS = ("eager", "aot_eager", "inductor")
EXPORT_FORMATS = ("safetensors",)  # each is written by src/lmforge/export/<its name>.py


def _free(key: Key) -> Key:
    return replace(key, resume="free")


def _logged(key: Key) -> Key:
    return replace(key, resume="logged")


COUNT = Key("int", low=1)
COUNT_OR_NULL = Key("int", low=1, nullable=True)
FROM_ZERO = Key("int", low=0)
POSITIVE = Key("float", above=0)
NOT_NEGATIVE = Key("float", low=0)
SHARE_BELOW_1 = Key("float", low=0, below=1)
FLAG = Key("bool")
PATH = Key("path")
PATH_OR_NULL = Key("path", nullable=True)
SEED = Key("int", low=0, high=2**32 - 1)
MONITOR = Key("text", words=METRICS)
MODE = Key("text", words=("min", "max"))
DTYPE = Key("text", words=DTYPES)
ACCELERATOR = Key("text", words=ACCELERATORS, known=("mps", "tpu", "hpu"), resume="free")
DEVICES = Key("int", low=0, words=("auto",), many="also", resume="free")
THREADS = Key("int", low=1, words=("auto",), resume="free")
SWEPT = Key("text", many="also")
BETAS = Key("float", low=0, below=1, many="always", length=2, resume="logged")

KEYS: dict[str, Key] = {
    "name": Key("name"),
    "seed": SEED,
    "resume": _free(PATH_OR_NULL),
    "weights": PATH_OR_NULL,
    "batch.tokens": COUNT_OR_NULL,
    "batch.sequences": COUNT_OR_NULL,
    "batch.micro_sequences": Key("int", low=1, words=("auto",), resume="free"),
    "paths.*": _free(PATH),
    "*._target_": Key("text"),
    # data
    "data.path": PATH,
    "data.text_key": Key("text"),
    "data.on_bad": Key("text", words=("strict", "lenient")),
    "data.name": PATH,
    "data.config": Key("text", nullable=True),
    "data.split": Key("text"),
    "data.revision": Key("text", nullable=True),
    "data.streaming": FLAG,
    "data.val_split": Key("text", nullable=True),
    "data.val_documents": COUNT,
    "data.shuffle_documents": COUNT,
    "data.vocab_size": Key("int", low=258),
    "data.tokenizer": PATH_OR_NULL,
    "data.context": COUNT,
    "data.overlap": _logged(SHARE_BELOW_1),
    "data.num_workers": _free(FROM_ZERO),
    "data.pin_memory": _free(FLAG),
    "data.prefetch": _free(COUNT_OR_NULL),
    "data.limit_train_rows": COUNT_OR_NULL,
    "data.sources.*": Key("node", nullable=True),
    "data.sources.*.path": PATH_OR_NULL,
    "data.sources.*.name": Key("path", nullable=True),
    "data.sources.*.config": Key("text", nullable=True),
    "data.sources.*.split": Key("text"),
    "data.sources.*.revision": Key("text", nullable=True),
    "data.sources.*.text_key": Key("text"),
    "data.sources.*.on_bad": Key("text", words=("strict", "lenient")),
    "data.sources.*.weight": POSITIVE,
    # model
    "model.vocab_size": COUNT_OR_NULL,
    "model.context": COUNT,
    "model.n_layer": COUNT,
    "model.n_head": COUNT,
    "model.n_kv_head": COUNT,
    "model.d_model": COUNT,
    "model.d_ff": COUNT,
    "model.head_dim": COUNT_OR_NULL,
    "model.norm": Key("text", words=("rms", "layer")),
    "model.norm_place": Key("text", words=("pre", "post")),
    "model.qk_norm": FLAG,
    "model.positions": Key("text", words=("rope", "learned")),
    "model.rope_base": POSITIVE,
    "model.activation": Key("text", words=("swiglu", "relu2", "gelu")),
    "model.bias": FLAG,
    "model.tied": FLAG,
    "model.dropout": SHARE_BELOW_1,
    # optimizer and schedule
    "optimizer.lr": _logged(POSITIVE),
    "optimizer.adamw_lr": _logged(POSITIVE),
    "optimizer.betas": BETAS,
    "optimizer.momentum": _logged(SHARE_BELOW_1),
    "optimizer.eps": _logged(POSITIVE),
    "optimizer.weight_decay": _logged(NOT_NEGATIVE),
    "schedule._target_": Key("text", resume="logged"),
    "schedule.warmup": Key("number", low=0, resume="logged"),
    "schedule.decay": Key("float", above=0, high=1, resume="logged"),
    "schedule.final": Key("float", low=0, high=1, resume="logged"),
    # strategy, precision, compile
    "strategy.kind": Key("text", words=STRATEGIES, resume="free"),
    "strategy.dp": Key("int", low=1, words=("auto",), resume="free"),
    "strategy.shard": Key("int", low=1, words=("all", "node"), resume="free"),
    "strategy.tp": _free(COUNT),
    "strategy.pp": _free(COUNT),
    "strategy.cp": _free(COUNT),
    "strategy.reshard_after_forward": _free(FLAG),
    "strategy.virtual_stages": _free(COUNT),
    "strategy.process_group_backend": Key("text", words=PROCESS_GROUP_BACKENDS, resume="free"),
    "strategy.init_method": Key("text", resume="free"),
    "strategy.timeout_seconds": _free(POSITIVE),
    "strategy.nccl_debug": Key("text", words=("VERSION", "WARN", "INFO", "TRACE"), nullable=True, resume="free"),
    "strategy.stage": Key("int", low=1, high=3, resume="free"),
    "strategy.compress": Key("text", words=COMPRESSIONS, resume="logged"),
    "strategy.rank": _logged(COUNT),
    "strategy.start_step": _logged(FROM_ZERO),
    "strategy.sync_every": _logged(COUNT),
    "strategy.outer_lr": _logged(POSITIVE),
    "strategy.outer_momentum": _logged(SHARE_BELOW_1),
    "precision.word": Key("text", words=PRECISIONS),
    "precision.weights": DTYPE,
    "precision.compute": DTYPE,
    "precision.reduce": DTYPE,
    "precision.scaler": FLAG,
    "compile.backend": Key("text", words=BACKENDS, nullable=True, resume="free"),
    # trainer
    "trainer.max_steps": _free(COUNT_OR_NULL),
    "trainer.max_epochs": _free(COUNT_OR_NULL),
    "trainer.accelerator": ACCELERATOR,
    "trainer.devices": DEVICES,
    "trainer.num_nodes": _free(COUNT),
    "trainer.val_every_n_steps": _free(COUNT_OR_NULL),
    "trainer.log_every_n_steps": _free(COUNT),
    "trainer.limit_val_batches": _free(COUNT_OR_NULL),
    "trainer.gradient_clip_val": Key("float", above=0, nullable=True, resume="logged"),
    "trainer.activation_checkpointing": _free(FROM_ZERO),
    "trainer.loss_chunk": _free(COUNT_OR_NULL),
    "trainer.nonfinite_patience": _free(COUNT),
    "trainer.threads": THREADS,
    "trainer.detect_anomaly": _free(FLAG),
    "trainer.profiler": Key("text", words=("simple",), nullable=True, resume="free"),
    # callbacks and loggers: keyed entries, null switches one off
    "callbacks.*._target_": Key("text", resume="free"),
    "callbacks.*.every_n_steps": _free(COUNT),
    "callbacks.*.empty_cache_every_n_steps": _free(FROM_ZERO),
    "callbacks.*.keep_last": _free(COUNT),
    "callbacks.*.keep_best": _free(FROM_ZERO),
    "callbacks.*.monitor": _free(MONITOR),
    "callbacks.*.mode": _free(MODE),
    "callbacks.*.notice_url": _free(PATH_OR_NULL),
    "callbacks.*.notice_file": _free(PATH_OR_NULL),
    "callbacks.*.notice_seconds": _free(POSITIVE),
    "callbacks.*.patience": _free(COUNT_OR_NULL),
    "callbacks.*.min_delta": _free(NOT_NEGATIVE),
    "callbacks.*.refresh_seconds": _free(POSITIVE),
    "callbacks.*.warmup_steps": _free(FROM_ZERO),
    "callbacks.*.step_seconds": _free(POSITIVE),
    "callbacks.*.first_seconds": _free(POSITIVE),
    "callbacks.*.warn_above": _free(POSITIVE),
    "callbacks.*.every_n_validations": _free(COUNT),
    "callbacks.*.prompt": Key("text", resume="free"),
    "callbacks.*.max_new_tokens": _free(COUNT),
    "callbacks.*.temperature": _free(NOT_NEGATIVE),
    "callbacks.*": Key("node", nullable=True, resume="free"),
    "logger.*._target_": Key("text", resume="free"),
    "logger.*.save_dir": _free(PATH_OR_NULL),
    "logger.wandb.project": Key("text", resume="free"),
    "logger.*.offline": _free(FLAG),
    "logger.*": Key("node", nullable=True, resume="free"),
    # sweep: of the sweep that starts runs, never of a run; here `resume` is about a sweep that goes on
    "sweep.kind": Key("text", words=("grid", "optuna")),
    "sweep.folder": _free(PATH_OR_NULL),
    "sweep.jobs": Key("int", low=1, words=("auto",), resume="free"),
    "sweep.stop_on_failure": _free(FLAG),
    "sweep.rerun_failed": _free(FLAG),
    "sweep.metric": MONITOR,
    "sweep.mode": MODE,
    "sweep.trials": _free(COUNT),
    "sweep.timeout_minutes": Key("float", above=0, nullable=True, resume="free"),
    "sweep.sampler": Key("text", words=("tpe", "random")),
    "sweep.sampler_seed": SEED,
    "sweep.pruner": Key("text", words=("median", "asha", "none")),
    "sweep.pruner_warmup_steps": FROM_ZERO,
    "sweep.pruner_startup_trials": FROM_ZERO,
    "sweep.params.*": SWEPT,
    "sweep.params.*.*": SWEPT,
    "sweep.params.*.*.*": SWEPT,
    # prepare
    "workers": Key("int", low=1, words=("auto",)),
    # evaluate and generate
    "run": PATH,
    "ckpt": PATH,
    "split": Key("text", words=("train", "val", "test")),
    "batch_sequences": COUNT,
    "limit_batches": COUNT_OR_NULL,
    "prompt": Key("text"),
    "max_new_tokens": COUNT,
    "temperature": NOT_NEGATIVE,
    "top_k": COUNT_OR_NULL,
    "top_p": Key("float", above=0, high=1, nullable=True),
    "stop": Key("text", nullable=True),
    "stream": FLAG,
    "keep_end": FLAG,
    "accelerator": ACCELERATOR,
    # runs
    "sort": Key("text", words=("time", "metric", "disk")),
    "delete": PATH_OR_NULL,
    "yes": FLAG,
    # what evaluate reports beside the headline
    "calibration_bins": Key("int", low=0, high=1000),
    "domains": FLAG,
    # soak
    "hours": POSITIVE,
    "words": Key("text"),
    "steps": COUNT,
    "save_every_n_steps": COUNT,
    "fault_every_n_steps": COUNT,
    "limits.memory_mb_per_hour": NOT_NEGATIVE,
    "limits.handles": FROM_ZERO,
    "limits.hang_seconds": POSITIVE,
    "report": PATH,
    # export
    "format": Key("text", words=EXPORT_FORMATS),
    "dtype": Key("text", words=("keep", *DTYPES)),
    "out": PATH_OR_NULL,
}


def find_key(dotted: str) -> Key | None:
    """The table's line for a key: an exact name first, then the longest pattern with as many parts that fits."""
    if dotted in KEYS:
        return KEYS[dotted]
    depth = dotted.count(".")
    fits = [p for p in KEYS if "*" in p and p.count(".") == depth and fnmatchcase(dotted, p)]
    return KEYS[max(fits, key=len)] if fits else None
