"""Raw backends of the operations, without autograd; `select` chooses among them. Import the files themselves."""

__all__: list[str] = []
