"""Real trainings under injected faults, watched from outside; nothing here imports torch."""
