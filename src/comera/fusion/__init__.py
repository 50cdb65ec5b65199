"""fuse_: what surrounds the compressed layers, made as cheap as they are."""
