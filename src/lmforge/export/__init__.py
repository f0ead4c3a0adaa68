"""Networks on their way out: `lmforge export` writes them, `load` opens them anywhere.

from lmforge.export import load
network, tokenizer = load("folder")
"""

from lmforge.export.loading import load

__all__ = ["load"]
