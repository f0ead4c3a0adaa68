"""How every command starts: its words, its help, its exit code. Nothing here imports torch."""
