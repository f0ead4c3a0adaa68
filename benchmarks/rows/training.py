"""Training tokens per second against a plain float32 loop and the peers, and the loss after equal steps."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import contest, corpus, nanogpt, peers, product
from benchmarks.report import Row, verdict
from benchmarks.settings import Settings

# layers x width, context, batch, updates a turn, goal
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"layers": 4, "heads": 4, "width": 128, "context": 64, "batch": 12, "every": 10, "goal": 1.6},
    "small": {"layers": 6, "heads": 6, "width": 384, "context": 256, "batch": 4, "every": 2, "goal": 2.2},
}
SAME_LOSS = 1.01  # of the baseline's, after the same number of updates


def words(shards: Path, size: dict[str, Any]) -> list[str]:
    """The product on the baseline's shape, batches and optimizer."""
    return f"""
    data=tokens data.path={shards} model.vocab_size={corpus.VOCABULARY} model.context={size["context"]}
    model.n_layer={size["layers"]} model.n_head={size["heads"]} model.n_kv_head={size["heads"]}
    model.d_model={size["width"]} model.d_ff={4 * size["width"]} model.norm=layer model.qk_norm=false
    model.positions=learned model.activation=gelu model.tied=true
    batch.tokens=null batch.sequences={size["batch"]} batch.micro_sequences={size["batch"]}
    optimizer=adamw optimizer.lr={nanogpt.RATE} optimizer.betas=0.9,0.99 optimizer.weight_decay=0.1
    schedule=constant schedule.warmup={nanogpt.WARMUP} callbacks.checkpoint.monitor=val/loss
    callbacks.checkpoint.every_n_steps=1000000
    """.split()


def shape(size: dict[str, Any]) -> dict[str, int]:
    return {"vocabulary": corpus.VOCABULARY, **{key: size[key] for key in ("context", "layers", "heads", "width")}}


def rows(settings: Settings) -> list[Row]:
    shards = corpus.byte_shards(settings.folder / "bytes", settings.pick(4.0, 0.3))
    names = settings.pick(list(SIZES), ["tiny"])
    return [row for name in names for row in _size(name, SIZES[name], shards, settings)]


def _size(name: str, size: dict[str, Any], shards: Path, settings: Settings) -> list[Row]:
    every = settings.pick(size["every"], 1)
    options = {"words": words(shards, size), "every": every}
    rival = options | {"shape": shape(size)}
    contenders: dict[str, Any] = {
        "plain": (nanogpt.contender, rival),
        "LMForge": (product.fit, options),
        "bare loop": (product.bare_loop, options),
        "LMForge again": (product.fit, options),
    }
    if find_spec("litgpt"):
        contenders["litgpt"] = (peers.litgpt_loop, rival)
        contenders["litgpt bf16"] = (peers.litgpt_loop, rival | {"low": True})
    if find_spec("transformers"):
        contenders["transformers Trainer"] = (peers.transformers_trainer, rival)
    lanes = contest.compete(contenders, settings.pick(15, 3), settings.pick(3, 1), settings.folder / f"training-{name}")
    return [_row(name, size, lanes, every)]


def _row(name: str, size: dict[str, Any], lanes: dict[str, contest.Lane], every: int) -> Row:
    tokens = every * size["batch"] * size["context"]
    speeds = {who: tokens / lane.best for who, lane in lanes.items()}
    over = {who: contest.Ratio.of(lanes[who].seconds, lanes["LMForge"].seconds) for who in lanes}
    losses = {who: lanes[who].said[-1]["loss"] for who in ("plain", "LMForge")}
    same = losses["LMForge"] <= SAME_LOSS * losses["plain"]
    steps = every * len(lanes["plain"].seconds)
    measured = [f"{over['plain']}x the plain loop, {speeds['LMForge']:.0f} tokens per CPU-s"]
    measured += [f"{over[who]}x {who}" for who in lanes if who not in ("plain", "LMForge", "LMForge again")]
    measured += [f"A/A {over['LMForge again'].best:.3f}"]
    measured += [f"loss {losses['LMForge']:.4f}, plain {losses['plain']:.4f}"]
    reached = over["plain"].best >= size["goal"] and same
    return Row(
        f"training, {name} ({size['layers']}x{size['width']}, context {size['context']})",
        f">= {size['goal']}x a plain fp32 loop; loss within 1 %",
        "\n".join(measured),
        verdict(reached, over["LMForge again"].best),
        {
            "cpu_ms": {who: 1e3 * lane.best / every for who, lane in lanes.items()},
            "tokens_per_cpu_second": speeds,
            "ratios": {who: vars(ratio) for who, ratio in over.items()},
            "losses": losses,
            "steps": steps,
        },
    )
