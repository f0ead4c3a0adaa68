import pytest

from lmforge.config import machine, machine_checks
from lmforge.config.batch import batch_plan, strategy_kind
from lmforge.config.checks import preflight
from lmforge.config.errors import UsageError
from lmforge.config.launch import Launch
from lmforge.config.machine_checks import parameter_count


def problems(compose, *typed):
    return preflight(compose.plain(*typed))[0]


@pytest.mark.parametrize(("devices", "nodes", "factor"), [(1, 1, 8), (2, 1, 4), (2, 2, 2)])
def test_accumulation_counts_devices_and_nodes(compose, devices, nodes, factor):
    words = [
        "batch.sequences=16",
        "batch.micro_sequences=2",
        f"trainer.devices={devices}",
        f"trainer.num_nodes={nodes}",
    ]
    plan = batch_plan(compose.plain(*words))
    assert (plan.sequences, plan.micro, plan.accumulation, plan.world) == (16, 2, factor, devices * nodes)
    assert plan.micro * plan.world * plan.accumulation == plan.sequences


def test_batch_plan_reads_as_arithmetic(compose):
    plan = batch_plan(compose.plain("batch.sequences=16", "batch.micro_sequences=2", "trainer.devices=2"))
    assert str(plan) == "global batch 16 = 2 x 2 devices x 1 node x accumulation 4"


def test_batch_that_does_not_divide_shows_the_numbers(compose):
    (problem,) = problems(compose, "batch.sequences=15", "batch.micro_sequences=2")
    assert problem.startswith("global batch 15 = 2 x 1 device x 1 node x accumulation 7.5: does not divide")
    assert "14 or 16" in problem


def test_tokens_that_do_not_divide(compose):
    (problem,) = problems(compose, "batch.tokens=1000")
    assert problem == "batch.tokens=1000: 1000 / data.context 256 = 3.906 sequences; use 768 or 1024"


@pytest.mark.parametrize(("sequences", "context", "micro"), [(4, 256, 4), (64, 256, 8), (10, 256, 5), (7, 8192, 1)])
def test_auto_micro_is_the_largest_divisor_within_2048_tokens_on_a_cpu(compose, sequences, context, micro):
    plan = batch_plan(compose.plain(f"batch.sequences={sequences}", f"model.context={context}"))
    assert plan.micro == micro


@pytest.mark.parametrize("words", [["batch.tokens=null"], ["batch.tokens=512", "batch.sequences=2"]])
def test_exactly_one_batch_word(compose, words):
    assert "give exactly one" in problems(compose, *words)[0]


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
        ["strategy=fsdp", "precision=16-mixed"],
        ["logger=many"],
        [],
    ],
)
def test_combinations_that_can_be(compose, words):
    assert problems(compose, *words) == []


def test_gpus_must_be_visible(compose, monkeypatch):
    monkeypatch.setattr(machine, "torch_has_gpu_build", lambda: True)
    monkeypatch.setattr(machine, "gpu_count", lambda: 2)
    assert problems(compose, "trainer.devices=2") == []
    assert problems(compose, "trainer.devices=0,1") == []
    assert "trainer.devices=4: this process sees 2 GPUs" in problems(compose, "trainer.devices=4")
    assert "trainer.devices=1,2: this process sees 2 GPUs (0 to 1)" in problems(compose, "trainer.devices=1,2")
    assert problems(compose, "trainer.devices=4", "trainer.accelerator=cpu") == []


def test_several_machines_need_a_launcher(compose):
    words = ["trainer.num_nodes=2", "trainer.devices=2"]
    with pytest.raises(UsageError, match=r"torchrun --nnodes=2 --nproc-per-node=2 .* or srun --nodes=2 --ntasks-per"):
        compose.plan(*words)
    assert compose.plan(*words, launch=Launch("torchrun", 0, 4, 0, 2, 2)).plain["trainer"]["num_nodes"] == 2


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


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ([], "single"),
        (["trainer.devices=2"], "ddp"),
        (["strategy=fsdp"], "single"),
        (["strategy=hsdp", "trainer.devices=2"], "mesh"),
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
