"""Models in folders: `save_pretrained` and `load_pretrained`."""

from comera.pretrained.folder import MANIFEST, read_manifest, tensor_headers
from comera.pretrained.load import load_pretrained
from comera.pretrained.save import save_pretrained
from comera.pretrained.stored import WEIGHTS

__all__ = ["MANIFEST", "WEIGHTS", "load_pretrained", "read_manifest", "save_pretrained", "tensor_headers"]
