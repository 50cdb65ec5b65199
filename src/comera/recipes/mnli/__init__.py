"""Natural-language inference: `recipe` trains, `files` reads the pairs, `data` tokenizes and `pairs` batches them."""

__all__ = ["data", "files", "pairs", "recipe"]
