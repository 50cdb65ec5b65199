"""Raw backends of the operations, without autograd."""
