"""Text in, arrays out, for the recipes: `documents` and `tables` say where texts are and read them, `tokenizer`
makes tokens of them, `prepared` stores these and makes batches, and `cache` keeps what was prepared once."""

__all__ = ["cache", "documents", "prepared", "tables", "tokenizer"]
