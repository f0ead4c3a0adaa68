import pytest

from lmforge.config import machine


@pytest.fixture
def gpus(monkeypatch, tmp_path):
    """Pretends that the driver shows GPUs of the given models."""
    for name in machine.VISIBLE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(machine, "NVIDIA", tmp_path / "gpus")
    monkeypatch.setattr(machine, "AMD", tmp_path / "kfd")
    monkeypatch.setattr(machine, "DEVICES", tmp_path / "dev")
    monkeypatch.setattr(machine, "WSL_DRIVER", tmp_path / "libcuda.so.1")
    monkeypatch.setattr(machine, "torch_has_gpu_build", lambda: True)

    def install(*models):
        for index, model in enumerate(models):
            folder = tmp_path / "gpus" / f"0000:{index:02}:00.0"
            folder.mkdir(parents=True)
            (folder / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 1\n")

    return install


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, 4),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "2, 0"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "0,9,1"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1b2c,GPU-3d4e,MIG-5f"}, 3),
        ({"HIP_VISIBLE_DEVICES": "1"}, 1),
        ({"ROCR_VISIBLE_DEVICES": "0,1,2", "HIP_VISIBLE_DEVICES": "0,1"}, 2),
    ],
)
def test_visible_gpus(environ, count):
    assert machine.visible_gpus(4, environ) == count


def test_hidden_gpus_are_none(gpus, monkeypatch):
    gpus("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB")
    assert (machine.gpu_count(), machine.gpu_limit(), machine.accelerator("auto")) == (2, 2, "gpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert (machine.gpu_count(), machine.accelerator("auto")) == (0, "cpu")
    assert machine.missing_backend("gpu") == "CUDA_VISIBLE_DEVICES= hides every GPU"


def test_a_gpu_behind_windows_is_not_ruled_out(gpus, tmp_path):
    gpus()
    assert "no GPU driver" in machine.missing_backend("gpu")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "dxg").touch()
    assert machine.missing_backend("gpu") is None
    assert machine.accelerator("auto") == "cpu"  # it may be no NVIDIA GPU
    machine.WSL_DRIVER.touch()
    assert (machine.accelerator("auto"), machine.gpu_limit()) == ("gpu", None)


@pytest.mark.parametrize(
    ("model", "word"),
    [
        ("NVIDIA H200", "bf16-mixed"),
        ("NVIDIA A100-SXM4-40GB", "bf16-mixed"),
        ("NVIDIA L4", "bf16-mixed"),
        ("NVIDIA GB200", "bf16-mixed"),
        ("NVIDIA GeForce RTX 2050", "bf16-mixed"),
        ("NVIDIA GeForce RTX 3090 Ti", "bf16-mixed"),
        ("NVIDIA RTX A6000", "bf16-mixed"),
        ("NVIDIA RTX 6000 Ada Generation", "bf16-mixed"),
        ("Unknown", "bf16-mixed"),
        ("Tesla V100-SXM2-16GB", "32-true"),
        ("Tesla T4", "32-true"),
        ("NVIDIA T1000", "32-true"),
        ("NVIDIA GeForce RTX 2080 Ti", "32-true"),
        ("NVIDIA GeForce GTX 1660", "32-true"),
        ("NVIDIA TITAN V", "32-true"),
        ("Quadro RTX 6000", "32-true"),
        ("Quadro GV100", "32-true"),
    ],
)
def test_auto_precision_by_the_gpus_name(gpus, model, word):
    gpus("NVIDIA H100 PCIe", model)
    assert machine.resolve_precision("auto", "auto", frozenset()) == word


def test_unreadable_names_count_as_with_bf16(gpus):
    gpus("Tesla T4")
    next(machine.NVIDIA.glob("*/information")).unlink()
    assert machine.gpus_have_bf16()


@pytest.mark.parametrize(
    ("word", "said"), [("tpu", "package torch_xla"), ("hpu", "lightning_habana"), ("mps", "only cpu")]
)
def test_accelerators_that_are_not_implemented(word, said):
    assert said in machine.missing_backend(word)


def test_threads_are_shared_out(monkeypatch):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert [machine.thread_share(processes) for processes in (1, 2, 3, 16)] == [8, 4, 2, 1]
