"""Kernels in C++ for the CPU, compiled in the wheel or on first use, and not used where neither is possible.

They do in one pass over large tensors what takes torch many, with large intermediates in the caches of a core. They
compute in float32 and stand behind the same contracts as torch's operations; COMERA_KERNELS=none does without them.
"""

__all__: list[str] = []
