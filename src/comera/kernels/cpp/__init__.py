"""Kernels in C++ for the CPU, compiled on first use by the compiler that is there, and left out where there is none.

What torch does in many passes over wide tensors these do in one, with the wide intermediates in the caches of a core.
They take float32, and stand behind the same contracts as torch's operations; COMERA_KERNELS=none does without them.
"""
