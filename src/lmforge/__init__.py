"""LMForge: train large language models with PyTorch Lightning and Hydra."""

__version__ = "0.1.0"
