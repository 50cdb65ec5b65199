"""Kernels in C++ for the CPU, compiled when comera is installed, and not used where there is no compiler.

They do in one pass over large tensors what takes torch many, with large intermediates in the caches of a core. They
compute in float32 and stand behind the same contracts as torch's operations; COMERA_KERNELS=none does without them.
"""

__all__: list[str] = []
