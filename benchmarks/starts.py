"""Processes that end with their first optimizer step: `python -m benchmarks.starts bare | lmforge | trainer`."""

import os
import sys

LAYERS, HEADS, WIDTH, CONTEXT, BATCH, VOCABULARY = 2, 4, 128, 256, 8, 4096  # about the default run's


def bare() -> None:
    """PyTorch alone: a network, AdamW, one step."""
    import torch

    from benchmarks.nanogpt import PlainGPT, make_adamw, plain_loss

    network = PlainGPT(VOCABULARY, CONTEXT, LAYERS, HEADS, WIDTH)
    optimizer = make_adamw(network, 1e-3)
    ids = torch.randint(VOCABULARY, (BATCH, CONTEXT))
    plain_loss(network(ids), ids).backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()


def lmforge() -> None:
    """`python train.py WORDS` as typed, until its first update is done."""
    from train import train

    from lmforge.start.entry import run_front_door

    def job(cfg, run):  # type: ignore[no-untyped-def]
        from lmforge.tasks.update import UpdateTask

        UpdateTask._count_step = lambda self: os._exit(0)  # type: ignore[method-assign]
        return train(cfg, run)

    run_front_door("train", job, ["train.py", *sys.argv[2:]])


def trainer() -> None:
    """transformers' Trainer on its GPT-2."""
    import torch
    from transformers import GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    from benchmarks.peers import gpt2_config

    class Stop(TrainerCallback):
        def on_step_end(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            os._exit(0)

    shape = {"vocabulary": VOCABULARY, "context": CONTEXT, "layers": LAYERS, "heads": HEADS, "width": WIDTH}
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(VOCABULARY, (BATCH, CONTEXT))]
    arguments = TrainingArguments(
        output_dir="trainer", per_device_train_batch_size=BATCH, max_steps=2, report_to="none", use_cpu=True
    )
    Trainer(GPT2LMHeadModel(gpt2_config(shape)), arguments, train_dataset=rows, callbacks=[Stop()]).train()


if __name__ == "__main__":
    {"bare": bare, "lmforge": lmforge, "trainer": trainer}[sys.argv[1]]()
