"""Stands for train.py: counts, saves and stops as a training does, in milliseconds and without torch."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

words = dict(word.split("=", 1) for word in sys.argv[1:])
run = Path(words["paths.runs"]) / words["name"] / "run"
steps, every = int(words["trainer.max_steps"]), int(words["callbacks.checkpoint.every_n_steps"])
faulty = set(words.get("faulty", "").split(",")) if words["name"] != "reference" else set()
(run / "probe").mkdir(parents=True, exist_ok=True)
(run / "checkpoints").mkdir(exist_ok=True)
(run / "config.yaml").touch()
for part in (run / "checkpoints").glob(".step-*"):
    shutil.rmtree(part)
if "dirty" in faulty:
    (run / ".metrics.csv.17.tmp").touch()
asked = []
signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))


def save(step: int) -> None:
    part = run / "checkpoints" / f".step-{step:08d}.part"
    if (run / "checkpoints" / f"step-{step:08d}").exists():
        return
    part.mkdir(exist_ok=True)
    (part / "w.safetensors").write_bytes(bytes(100))
    (part / "state.json").write_text(json.dumps({"step": step, "files": [{"file": "w", "sha256": str(step)}]}))
    time.sleep(0.03)
    part.rename(run / "checkpoints" / f"step-{step:08d}")


saved = [int(path.name[5:]) for path in (run / "checkpoints").glob("step-*")]
start = max(saved, default=0)
if saved:
    print(f"resuming    step-{start:08d}", flush=True)
if saved and "hangs" in faulty:
    time.sleep(60)
if "leaves" in faulty:
    subprocess.Popen(["sleep", "60"])
for step in range(start + 1, steps + 1):
    row = step + 1 if saved and "repeats" in faulty and step == start + 1 else step
    with (run / "probe" / "rank-00000.txt").open("a") as file:
        file.write(f"{step} row-{row}\n")
    if step % every == 0:
        save(step)
    if asked:
        save(step)
        print(f"stopped at step {step} and saved", flush=True)
        sys.exit(1 if "code" in faulty else 143)
    time.sleep(0.01)
(run / "metrics.csv").write_text(f"step,train/loss\n{steps},{2.5 if 'loss' in faulty else 1.5}\n")
