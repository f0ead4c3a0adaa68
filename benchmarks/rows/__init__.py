"""The rows of the table by name, one module each; every module has `rows(settings) -> list[Row]`."""

NAMES = (
    "training",
    "recipe",
    "overhead",
    "startup",
    "loader",
    "tokenising",
    "checkpoint",
    "generation",
    "memory",
    "precision",
    "search",
)
