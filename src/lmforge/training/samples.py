"""A sample of what the network writes, after validations."""

import sys
from typing import Any

import lightning.pytorch as pl

from lmforge.tasks.generation import Sampling, encode_prompt, generate_ids, stream_text
from lmforge.tasks.update import UpdateTask


class Samples(pl.Callback):
    """Continues `prompt` after every n-th validation; draws from a generator of its own, so training is not touched.

    Every rank takes part (a sharded network needs all of them); rank 0 keeps and prints the text.
    """

    def __init__(self, every_n_validations: int, prompt: str, max_new_tokens: int, temperature: float, seed: int):
        self.every, self.prompt, self.most, self.seed = every_n_validations, prompt, max_new_tokens, seed
        self.sampling = Sampling(temperature=temperature, top_p=0.95)
        self.validations = 0
        self.text: str | None = None

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, UpdateTask)
        tokenizer = trainer.datamodule.tokenizer  # type: ignore[attr-defined]
        if trainer.state.fn != "fit" or tokenizer is None:
            return
        self.validations += 1
        if self.validations % self.every and trainer.global_step < pl_module.total_steps:
            return
        network = pl_module.network
        prompt = encode_prompt(tokenizer, self.prompt, network.context, keep_end=True)  # type: ignore[arg-type]
        assert pl_module.parallel is not None
        ends = (tokenizer.eos, tokenizer.size, pl_module.parallel.infer)
        ids = generate_ids(network, prompt, self.most, self.sampling, self.seed, *ends)
        self.text = self.prompt + "".join(stream_text(tokenizer, ids))
        if trainer.is_global_zero and sys.stderr.isatty() and trainer.global_step < pl_module.total_steps:
            print(f"\x1b[2m{self.text}\x1b[0m", file=sys.stderr)

    @property
    def state_key(self) -> str:
        """Lightning allows several of a class only under keys that differ."""
        return self._generate_state_key(prompt=self.prompt)

    def state_dict(self) -> dict[str, Any]:
        return {"validations": self.validations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.validations = int(state_dict["validations"])
