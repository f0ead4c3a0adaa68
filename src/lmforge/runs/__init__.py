"""Run folders and exports: making, finding, checking, listing, removing. Nothing here imports torch."""
