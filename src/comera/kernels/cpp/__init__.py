"""Kernels in C++ for the CPU, compiled on first use by the machine's compiler and not used where there is none.

They do in one pass over large tensors what takes torch many, with large intermediates in the caches of a core. They
compute in float32 and stand behind the same contracts as torch's operations; COMERA_KERNELS=none does without them.
"""

__all__: list[str] = []
