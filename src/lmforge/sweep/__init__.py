"""Many runs from one command. Each job is a process of its own; nothing here imports torch."""
