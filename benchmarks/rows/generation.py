"""Continuing a text greedily, one sequence at a time, against transformers' generate with the same weights."""

from importlib.util import find_spec
from time import process_time
from typing import Any

import torch

from benchmarks.contest import Ratio
from benchmarks.report import Row, not_run, verdict
from benchmarks.settings import Settings
from lmforge.tasks.generation import Sampling, generate_ids
from lmforge.models.gpt import GPT
from lmforge.training.assemble import keep_memory

WHAT, GOAL, LEAST = "generation, batch 1, greedy", ">= 2x transformers generate, equal text", 2.0
VOCABULARY, CONTEXT, HEADS = 8192, 256, 8


def rows(settings: Settings) -> list[Row]:
    if not find_spec("transformers"):
        return [not_run(WHAT, GOAL, "transformers is not installed; `make bench` installs it")]
    torch.set_num_threads(1)
    keep_memory()
    layers, width = settings.pick((8, 512), (2, 64))
    ours = GPT(VOCABULARY, CONTEXT, layers, HEADS, HEADS, width, 4 * width, qk_norm=False, tied=False).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.fill_(1.0) if "norm" in name else parameter.normal_(0.0, 0.05, generator=generator)
    return [_compare(ours, llama(ours, layers, width), settings)]


def llama(ours: GPT, layers: int, width: int) -> Any:
    """transformers' network of the same shape and weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=HEADS,
            max_position_embeddings=CONTEXT,
            rms_norm_eps=1e-6,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
    ).eval()
    names = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    names["head.weight"] = "lm_head.weight"
    parts = {
        "attention_norm": "input_layernorm",
        "ff_norm": "post_attention_layernorm",
        "attention.out": "self_attn.o_proj",
    }
    parts |= {f"attention.{part}": f"self_attn.{part}_proj" for part in "qkv"}
    parts |= {f"ff.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    for layer in range(layers):
        names |= {f"blocks.{layer}.{a}.weight": f"model.layers.{layer}.{b}.weight" for a, b in parts.items()}
    theirs.load_state_dict({names[name]: p.detach() for name, p in ours.named_parameters()}, strict=True)
    return theirs


def _compare(ours: GPT, theirs: Any, settings: Settings) -> Row:
    prompt, most = list(range(100, 116)), settings.pick(64, 8)
    texts: dict[str, list[int]] = {}

    def by_lmforge() -> list[int]:
        return list(generate_ids(ours, prompt, most, Sampling(temperature=0.0), 0, None, VOCABULARY))

    def by_transformers() -> list[int]:
        found = theirs.generate(torch.tensor([prompt]), max_new_tokens=most, do_sample=False, use_cache=True)
        return found[0, len(prompt) :].tolist()

    times: dict[str, list[float]] = {"transformers": [], "LMForge": []}
    for number in range(settings.pick(8, 2)):
        for name, way in (("transformers", by_transformers), ("LMForge", by_lmforge)):
            began = process_time()
            texts[name] = way()
            if number:
                times[name].append(process_time() - began)
    ratio = Ratio.of(times["transformers"], times["LMForge"])
    same = texts["LMForge"] == texts["transformers"]
    speeds = {name: most / min(spent) for name, spent in times.items()}
    return Row(
        WHAT,
        GOAL,
        f"{ratio}x; {speeds['LMForge']:.0f} against {speeds['transformers']:.0f} tokens per CPU-s, "
        f"{'equal text' if same else 'OTHER TEXT'}",
        verdict(ratio.best >= LEAST and same),
        {"ratio": vars(ratio), "tokens_per_cpu_second": speeds},
    )
