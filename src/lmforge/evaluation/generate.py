"""`lmforge generate`: continue a prompt with a trained run, streaming to the terminal."""

import sys
from collections.abc import Mapping
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn

from lmforge.data.tokenizer import Tokenizer
from lmforge.parallel.plan import Plan
from lmforge.runs.folder import RunFolder
from lmforge.tasks.generation import Sampling, encode_prompt, generate_ids, stream_text
from lmforge.training.assemble import device_type, make_network, make_precision, warn
from lmforge.training.resume import find_weights, tokenizer_of
from lmforge.training.weights import load_weights


def generate(cfg: DictConfig, run: RunFolder) -> Mapping[str, Any]:
    """Print the prompt and its continuation; returns both under `prompt` and `text`."""
    checkpoint = find_weights(run, cfg.ckpt, warn)
    tokenizer = tokenizer_of(run, checkpoint)
    device = torch.device(device_type(cfg))
    precision = make_precision(cfg, device.type)
    network = make_network(cfg, tokenizer.size)
    Plan(kind="single").apply(network, precision, device, seed=None)
    load_weights(network, checkpoint.reader("weights"))
    network.to(precision.compute)  # once, instead of at every token
    with torch.inference_mode():
        text = _print(network.eval(), tokenizer, cfg)
    return {"prompt": cfg.prompt, "text": text, "step": checkpoint.step, "checkpoint": checkpoint.hash}


def _print(network: nn.Module, tokenizer: Tokenizer, cfg: DictConfig) -> str:
    prompt = encode_prompt(tokenizer, cfg.prompt, network.context, cfg.keep_end)  # type: ignore[arg-type]
    sampling = Sampling(cfg.temperature, cfg.top_k, cfg.top_p)
    ids = generate_ids(network, prompt, cfg.max_new_tokens, sampling, cfg.seed, tokenizer.eos, tokenizer.size)
    text = ""
    if cfg.stream:
        print(cfg.prompt, end="", flush=True)
    for piece in stream_text(tokenizer, ids, cfg.stop):
        text += piece
        if cfg.stream:
            print(piece, end="", flush=True)
    print("" if cfg.stream else cfg.prompt + text, flush=True)
    sys.stdout.flush()
    return text
