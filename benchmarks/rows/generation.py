"""Continuing a text greedily, one sequence at a time, against transformers' generate with the same weights."""

from importlib.util import find_spec
from time import process_time
from typing import Any

import torch

from benchmarks.contest import Ratio
from benchmarks.report import Row, not_run, verdict
from benchmarks.settings import Settings
from lmforge.models.gpt import GPT
from lmforge.tasks.generation import Sampling, generate_ids
from lmforge.training.assemble import keep_memory

WHAT, GOAL, LEAST = "generation, batch 1, greedy", ">= 2x transformers generate, equal text", 2.0
CONTEXT = 256
# layers, width, heads, vocabulary
SIZES = {"tiny": (4, 128, 4, 256), "small": (6, 384, 6, 256), "38M parameters": (8, 512, 8, 8192)}


def rows(settings: Settings) -> list[Row]:
    if not find_spec("transformers"):
        return [not_run(WHAT, GOAL, "transformers is not installed; `make bench` installs it")]
    torch.set_num_threads(1)
    keep_memory()
    return [_size(name, *SIZES[name], settings) for name in settings.pick(list(SIZES), ["tiny"])]


def _size(name: str, layers: int, width: int, heads: int, vocabulary: int, settings: Settings) -> Row:
    ours = GPT(vocabulary, CONTEXT, layers, heads, heads, width, 4 * width, qk_norm=False, tied=False).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in ours.named_parameters():
            parameter.fill_(1.0) if "norm" in key else parameter.normal_(0.0, 0.05, generator=generator)
    return _compare(f"{WHAT}, {name}", ours, llama(ours), settings)


def llama(ours: GPT) -> Any:
    """transformers' network of the same shape and weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=ours.vocab_size,
            hidden_size=ours.embed.embedding_dim,
            intermediate_size=4 * ours.embed.embedding_dim,
            num_hidden_layers=ours.n_layer,
            num_attention_heads=ours.n_head,
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
    for layer in range(ours.n_layer):
        names |= {f"blocks.{layer}.{a}.weight": f"model.layers.{layer}.{b}.weight" for a, b in parts.items()}
    theirs.load_state_dict({names[name]: p.detach() for name, p in ours.named_parameters()}, strict=True)
    return theirs


def _compare(what: str, ours: GPT, theirs: Any, settings: Settings) -> Row:
    prompt, most = list(range(100, 116)), settings.pick(64, 8)
    texts: dict[str, list[int]] = {}

    @torch.inference_mode()
    def by_product() -> list[int]:
        return list(generate_ids(ours, prompt, most, Sampling(temperature=0.0), 0, None, ours.vocab_size))

    def by_transformers() -> list[int]:
        found = theirs.generate(torch.tensor([prompt]), max_new_tokens=most, do_sample=False, use_cache=True)
        return found[0, len(prompt) :].tolist()

    times: dict[str, list[float]] = {"transformers": [], "LMForge": []}
    for number in range(settings.pick(8, 2)):
        for name, way in (("transformers", by_transformers), ("LMForge", by_product)):
            began = process_time()
            texts[name] = way()
            if number:
                times[name].append(process_time() - began)
    ratio = Ratio.of(times["transformers"], times["LMForge"])
    same = texts["LMForge"] == texts["transformers"]
    speeds = {name: most / min(spent) for name, spent in times.items()}
    return Row(
        what,
        GOAL,
        f"{ratio}x; {speeds['LMForge']:.0f} against {speeds['transformers']:.0f} tokens per CPU-s, "
        f"{'equal text' if same else 'OTHER TEXT'}",
        verdict(ratio.best >= LEAST and same),
        {"ratio": vars(ratio), "tokens_per_cpu_second": speeds},
    )
