import pytest

from lmforge.config import machine, machine_checks
from lmforge.config.batch import batch_plan, strategy_kind
from lmforge.config.checks import NEEDED_BY, preflight
from lmforge.config.connection import DEFAULTS, Connection, connection
from lmforge.config.errors import UsageError
from lmforge.config.launch import Launch
from lmforge.config.machine_checks import parameter_count


def problems(compose, *typed):
    return preflight(compose.plain(*typed))[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model.n_head=3", "model.n_kv_head=3"], "model.n_head=3: must divide model.d_model=128"),
        (["model.n_kv_head=3"], "model.n_kv_head=3: must divide model.n_head=4"),
        (["model.d_model=100"], "model.d_model=100: must be a multiple of 8; near: 96"),
        (["model.d_ff=3"], "model.d_ff=3: must be a multiple of 8"),
        (["model.head_dim=31"], "needs an even head_dim"),
        (["model.context=128", "data.context=512", "batch.tokens=512"], "longer than model.context=128"),
        (["strategy=single", "trainer.devices=2"], "choose strategy=ddp or fsdp"),
        (
            ["strategy=fsdp", "precision=16-true", "trainer.devices=2"],
            "precision=32-true|64-true|bf16-mixed|bf16-true|16-mixed can",
        ),
        (
            ["strategy=deepspeed", "optimizer=adamw", "precision=bf16-true", "trainer.devices=2"],
            "precision=bf16-mixed can, or strategy=fsdp with bf16-true",
        ),
        (["strategy=deepspeed", "optimizer=muon", "trainer.devices=2"], "optimizer=adamw can, or strategy=fsdp"),
        (
            ["strategy=deepspeed", "optimizer=adamw", "strategy.stage=3", "compile=eager", "trainer.devices=2"],
            "strategy.stage=3 compile=eager: weights come and go inside every block; strategy.stage=1|2 can",
        ),
        (
            ["strategy=local_sgd", "trainer.devices=2", "trainer.val_every_n_steps=7"],
            "trainer.val_every_n_steps=7: must be a multiple of strategy.sync_every=10",
        ),
        (
            ["strategy=local_sgd", "trainer.devices=2", "strategy.sync_every=3"],
            "callbacks.checkpoint.every_n_steps=100: must be a multiple of strategy.sync_every=3, for ranks know of "
            "each other only where they meet; near: 99 or 102",
        ),
        (["strategy=local_sgd", "trainer.devices=2", "precision=16-mixed"], "scale its loss apart; use bf16-mixed"),
        (["strategy=ddp_bf16", "trainer.devices=2", "precision=bf16-true"], "gradients have 16 bits already"),
        (["trainer.max_steps=null"], "would never end"),
        (["schedule.warmup=500", "trainer.max_steps=400"], "longer than the run (trainer.max_steps=400)"),
        (["trainer.devices=0"], "needs at least 1 device"),
        (["trainer.devices=1,1"], "names a device twice"),
        (["data=text", "data.path=no/such.txt"], "data.path=no/such.txt: no such file or folder"),
        (["data=tokens", "data.path=."], "no manifest.json in it"),
        (["callbacks.early_stopping.mode=max"], "callbacks.early_stopping.monitor=val/bits_per_byte callbacks.early"),
        (["callbacks.checkpoint.monitor=val/accuracy"], "type callbacks.checkpoint.mode=max"),
        (["trainer.accelerator=cpu", "trainer.devices=0,1"], "trainer.devices=0,1: a list picks GPUs"),
        (["data.prefetch=2"], "set data.num_workers above 0"),
        (["weights=runs/none"], "weights=runs/none: no such run"),
        (["trainer.accelerator=tpu"], "needs the package torch_xla"),
        (["trainer.accelerator=mps"], "only cpu and gpu (or cuda) are implemented"),
        (["logger=wandb", "logger.wandb.offline=false"], "WANDB_API_KEY"),
    ],
)
def test_combinations_that_cannot_be(compose, monkeypatch, words, said):
    monkeypatch.setenv("NETRC", "no-such-file")
    assert any(said in problem for problem in problems(compose, *words))


@pytest.mark.parametrize(
    "words",
    [
        ["data.overlap=0.75", "callbacks.early_stopping=null"],
        ["callbacks.checkpoint.monitor=val/accuracy", "callbacks.checkpoint.mode=max"],
        ["strategy=fsdp", "precision=bf16-mixed"],
        ["strategy=ddp", "precision=16-mixed"],
        ["strategy=local_sgd", "trainer.devices=2"],
        ["strategy=local_sgd", "strategy.sync_every=3"],
        ["strategy=ddp_fp16", "trainer.devices=2", "precision=16-mixed"],
        ["strategy=fsdp", "precision=16-mixed"],
        ["logger=many"],
        [],
    ],
)
def test_combinations_that_can_be(compose, words):
    assert problems(compose, *words) == []


ZERO = ("strategy=deepspeed", "trainer.devices=2", "optimizer=adamw")


@pytest.mark.parametrize(
    "words",
    [
        (*ZERO, "strategy.stage=3", "precision=bf16-mixed"),
        (*ZERO, "strategy.stage=1", "precision=32-true", "compile=eager"),
        (*ZERO, "trainer.devices=1", "optimizer=muon", "precision=64-true"),
    ],
)
def test_what_zero_goes_with(compose, words):
    assert preflight(compose.plain(*words), machine_too=False)[0] == []


def test_scoring_holds_nothing_for_zero_to_cut(compose):
    found, _ = preflight(compose.plain(*ZERO) | {"ckpt": "best"}, only=NEEDED_BY["evaluate"])
    assert "strategy=deepspeed: cuts what only training holds; strategy=ddp|fsdp score" in found


def test_gpus_must_be_visible(compose, monkeypatch):
    monkeypatch.setattr(machine, "torch_has_gpu_build", lambda: True)
    monkeypatch.setattr(machine, "gpu_count", lambda: 2)
    assert problems(compose, "trainer.devices=2") == []
    assert problems(compose, "trainer.devices=0,1") == []
    assert "trainer.devices=4: this process sees 2 GPUs" in problems(compose, "trainer.devices=4")
    assert "trainer.devices=1,2: this process sees 2 GPUs (0 to 1)" in problems(compose, "trainer.devices=1,2")
    assert problems(compose, "trainer.devices=4", "trainer.accelerator=cpu") == []


def test_several_machines_need_a_launcher_and_a_place_to_meet(compose, monkeypatch):
    words = ["trainer.num_nodes=2", "trainer.devices=2"]
    with pytest.raises(UsageError, match=r"torchrun --nnodes=2 --nproc-per-node=2 .* or srun --nodes=2 --ntasks-per"):
        compose.plan(*words)
    launch = Launch("torchrun", 0, 4, 0, 2, 2)
    with pytest.raises(UsageError, match="torchrun set no MASTER_ADDR and no MASTER_PORT, so ranks do not know where"):
        compose.plan(*words, launch=launch)
    assert compose.plan(*words, "strategy.init_method=tcp://host:1", launch=launch)
    monkeypatch.setenv("MASTER_ADDR", "host")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert compose.plan(*words, launch=launch).plain["trainer"]["num_nodes"] == 2


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("tcp:/host7:29511", "tcp://host7:29511"),
        ("host7:29511", "tcp://host7:29511"),
        ("http://10.0.0.1:80", "tcp://10.0.0.1:80"),
        ("env:/", "env://"),
        ("env", "env://"),
        ("tcp://host", "tcp://HOST:PORT"),
        ("tcp://host:0", "tcp://HOST:PORT"),
        ("tcp://host:65536", "tcp://HOST:PORT"),
        ("tcp://:29511", "tcp://HOST:PORT"),
        ("tcp://a b:1", "tcp://HOST:PORT"),
        ("file:///tmp/x", "tcp://HOST:PORT"),
    ],
)
def test_a_place_to_meet_that_is_none(compose, text, near):
    (problem,) = problems(compose, f"strategy.init_method={text}")
    assert problem == (
        f"strategy.init_method={text}: not allowed; did you mean {near}?; "
        "allowed: env://, tcp://HOST:PORT with a port from 1 to 65535"
    )


@pytest.mark.parametrize("text", ["env://", "tcp://127.0.0.1:29511", "tcp://node-1.cluster:1", "tcp://[fe80::1]:65535"])
def test_places_to_meet(compose, text):
    assert problems(compose, f"strategy.init_method={text}") == []


def test_a_backend_for_another_device(compose, monkeypatch):
    (problem,) = problems(compose, "strategy.process_group_backend=nccl", "trainer.accelerator=cpu")
    assert problem.startswith(
        "strategy.process_group_backend=nccl: carries GPU tensors only, and this run is on the CPU"
    )
    assert "did you mean gloo?; allowed here: auto, gloo, mpi" in problem
    plain = compose.plain("strategy.process_group_backend=gloo", "strategy.nccl_debug=INFO")
    notes = preflight(plain, machine_too=False)[1]
    assert "strategy.nccl_debug=INFO: no file is written, this run talks over gloo" in notes
    monkeypatch.setattr(machine, "accelerator", lambda word: "gpu")
    assert "strategy.process_group_backend=gloo: slow between GPUs" in "\n".join(preflight(plain, machine_too=False)[1])
    assert connection(compose.plain()).backend == "nccl"


def test_the_words_of_connecting_are_part_of_every_strategy(compose):
    for choice in compose.composer.tree.groups["strategy"]:
        words = compose.plain(f"strategy={choice}", "strategy.timeout_seconds=7")["strategy"]
        assert {key: words[key] for key in DEFAULTS} == {**DEFAULTS, "timeout_seconds": 7.0}
    assert connection({"strategy": {"kind": "ddp"}, "trainer": {"accelerator": "cpu"}}) == Connection(
        "gloo", "env://", 1800.0, None
    )


def test_accelerators_that_cannot_be_are_not_offered(compose):
    composed = compose.composer.compose(compose.words("trainer.accelerator=tpux"))
    assert composed.problems["trainer.accelerator"].endswith("allowed: one of auto, cpu, gpu, cuda")


def test_wandb_goes_online_with_a_key(compose, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "x")
    assert problems(compose, "logger=wandb", "logger.wandb.offline=false") == []


def test_checks_of_broken_keys_are_left_out(compose):
    plain = compose.plain("batch.sequences=15", "batch.micro_sequences=2")
    assert preflight(plain, {"batch.sequences"})[0] == []


def test_notes(compose):
    _, notes = preflight(compose.plain("precision=16-mixed", "trainer.accelerator=cpu", "model.vocab_size=50257"))
    assert any("no fast path" in note for note in notes)
    assert any("vocab_size 50257 not a multiple of 8" in note for note in notes)


def test_file_in_the_way_of_the_run_folder(compose, tmp_path):
    (tmp_path / "file").write_text("")
    assert "paths.runs=file/runs" in problems(compose, "paths.runs=file/runs")[0]


def test_disk_must_hold_one_checkpoint(compose, monkeypatch):
    monkeypatch.setattr(machine_checks.shutil, "disk_usage", lambda place: type("Usage", (), {"free": 1000}))
    assert "one checkpoint needs about" in problems(compose)[0]


def test_gpt2_is_124_million(compose):
    plain = compose.plain("model=gpt2-124m")
    assert parameter_count(plain) == pytest.approx(124.4e6, rel=0.002)


def test_ranks_that_always_meet_are_told_that_this_is_ddp(compose):
    words = ["strategy=local_sgd", "trainer.devices=2", "strategy.sync_every=1"]
    assert any("which is ddp: gradients are averaged" in note for note in compose.plan(*words).notes)


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ([], "single"),
        (["trainer.devices=2"], "ddp"),
        (["strategy=fsdp"], "single"),
        (["strategy=hsdp", "trainer.devices=2"], "mesh"),
        (["strategy=ddp_powersgd", "trainer.devices=2"], "ddp"),
        (["strategy=local_sgd", "trainer.devices=2"], "local_sgd"),
        (["strategy=local_sgd", "trainer.devices=2", "strategy.sync_every=1"], "ddp"),
    ],
)
def test_auto_strategy(compose, words, kind):
    assert strategy_kind(compose.plain(*words)) == kind


@pytest.mark.parametrize(
    ("flags", "resolved"),
    [
        ({"amx_bf16"}, "bf16-mixed"),
        ({"avx512_bf16"}, "bf16-mixed"),
        ({"avx512f", "avx2"}, "32-true"),
        (set(), "32-true"),
    ],
)
def test_auto_precision_needs_hardware_made_for_it(flags, resolved):
    assert machine.resolve_precision("auto", "cpu", frozenset(flags)) == resolved
    assert machine.resolve_precision("16-true", "cpu", frozenset(flags)) == "16-true"


def test_cpu_build_of_torch_cannot_use_a_gpu(monkeypatch):
    monkeypatch.setattr(machine.importlib.metadata, "version", lambda package: "2.13.0+cpu")
    assert "is a CPU build" in machine.missing_backend("gpu")
    monkeypatch.setattr(machine.importlib.metadata, "version", lambda package: "2.13.0")
    monkeypatch.setattr(machine, "gpu_count", lambda: 0)
    assert "no GPU driver" in machine.missing_backend("gpu")
    monkeypatch.setattr(machine, "gpus_have_bf16", lambda: True)
    monkeypatch.setattr(machine, "gpu_count", lambda: 2)
    assert machine.missing_backend("gpu") is None
    assert (machine.accelerator("auto"), machine.device_count("auto")) == ("gpu", 2)
    assert machine.resolve_precision("auto", "auto") == "bf16-mixed"


def test_config_that_lacks_a_key_is_a_usage_problem(compose):
    plain = compose.plain()
    del plain["trainer"]["devices"]
    assert "the config holds no key 'devices'" in preflight(plain)[0]
    with pytest.raises(UsageError):
        batch_plan(compose.plain("batch.tokens=null"))


def test_a_network_without_heads_is_checked_for_what_it_has(compose):
    plain = compose.plain()
    plain["model"] = {"_target_": plain["model"]["_target_"], "vocab_size": None, "context": 64, "d_model": 32}
    plain["data"]["context"] = 64
    assert preflight(plain)[0] == []
    plain["model"]["d_model"] = 33
    assert "model.d_model=33: must be a multiple of 8" in preflight(plain)[0][0]
