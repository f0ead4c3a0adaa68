"""Peers from pip as contenders, on the same batches and the same shape. Each import stands where it is needed."""

import torch
from torch import Tensor, nn

from benchmarks.contest import Turn
from benchmarks.nanogpt import loop, product_batches


def litgpt_network(shape: dict[str, int]) -> nn.Module:
    from litgpt import GPT, Config

    return GPT(
        Config(
            block_size=shape["context"],
            padded_vocab_size=shape["vocabulary"],
            n_layer=shape["layers"],
            n_head=shape["heads"],
            n_embd=shape["width"],
            bias=False,
            rotary_percentage=1.0,
        )
    )


def litgpt_loop(turn: Turn, words: list[str], shape: dict[str, int], every: int, low: bool = False) -> None:
    """litgpt's network in the plain loop, with bf16 autocast when `low`."""
    torch.set_num_threads(1)
    batches, _ = product_batches(words)
    network = litgpt_network(shape)

    def forward(ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            return network(ids)

    loop(turn, lambda step: batches[step % len(batches)], forward, network, every)


def transformers_trainer(turn: Turn, words: list[str], shape: dict[str, int], every: int) -> None:
    """transformers' own Trainer on its GPT-2."""
    from transformers import GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    batches, _ = product_batches(words)
    rows = [{"input_ids": i, "labels": y} for ids, labels in batches for i, y in zip(ids, labels, strict=True)]

    class Turns(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
            if state.global_step == 0:
                turn()

        def on_step_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
            if state.global_step % every == 0:
                turn()

    size = len(batches[0][0])
    arguments = TrainingArguments(
        output_dir="trainer",
        per_device_train_batch_size=size,
        max_steps=10**6,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        logging_steps=10,
        disable_tqdm=True,
    )
    torch.set_num_threads(1)
    Trainer(GPT2LMHeadModel(gpt2_config(shape)), arguments, train_dataset=rows, callbacks=[Turns()]).train()


def gpt2_config(shape: dict[str, int]):  # type: ignore[no-untyped-def]
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=shape["vocabulary"],
        n_positions=shape["context"],
        n_layer=shape["layers"],
        n_head=shape["heads"],
        n_embd=shape["width"],
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
    )
